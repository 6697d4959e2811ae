"""Expansion by way of the text, against replacing in the text and tokenising the whole of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aioengine.errors import PlaceholderMismatchError
from aioengine.processors import (
    BaseMultiModalProcessor,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
    MultiModalFieldConfig,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from aioengine.processors.items import ImageHeader
from tests.processors.conftest import make_tokenizer
from tests.processors.test_guide import GuideDummyInputs, GuideInfo

TEXTS = st.text(st.sampled_from("a \nct.<>[]i>é"), max_size=10)


class TextProcessor(BaseMultiModalProcessor):
    """`[pic]`, which is no token of its own, becomes a paragraph with as many rows as wide."""

    def __init__(self, tokenizer: Any, target: str, frame: tuple[str, str], is_kept: bool) -> None:
        info = GuideInfo.__new__(GuideInfo)
        info.get_tokenizer = lambda: tokenizer  # type: ignore[method-assign]
        info.get_supported_mm_limits = lambda: {"image": None}  # type: ignore[method-assign]
        info.get_allowed_mm_limits = lambda: {"image": None}  # type: ignore[method-assign]
        info.ctx = type("Context", (), {"mm_processor_kwargs": {}})()
        super().__init__(info, GuideDummyInputs(info))
        self.target, self.frame, self.is_kept = target, frame, is_kept

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {}

    def content(self, width: int) -> str:
        return self.frame[0] + "<image>" * width + self.frame[1]

    def _get_prompt_updates(self, mm_items: Any, *_: Any) -> Sequence[PromptUpdate]:
        def put(item_idx: int) -> PromptUpdateDetails:
            width = mm_items.get_items("image", ImageProcessorItems).get_image_size(item_idx).width
            return PromptUpdateDetails(full=self.content(width), features="<image>" * width)

        if self.is_kept:
            return [PromptInsertion(modality="image", target=self.target, insertion=put)]
        return [PromptReplacement(modality="image", target=self.target, replacement=put)]


def headers(widths: Sequence[int]) -> MultiModalDataItems:
    entries = [ImageHeader(ImageSize(width, 1), "RGB") for width in widths]
    return MultiModalDataItems({"image": ImageProcessorItems(entries)})


TOKENIZERS = {style: make_tokenizer(style) for style in ("bytes", "words")}


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    style=st.sampled_from(sorted(TOKENIZERS)),
    target=st.sampled_from(["[pic]", "cat", "<image>"]),
    frame=st.sampled_from([("", ""), ("\n\n", "\n\n"), ("a", "c "), (" the", "")]),
    is_kept=st.booleans(),
)
@example(["a\n", "\nb"], [2, 1, 1], "bytes", "<image>", ("\n\n", "\n\n"), False)
def test_it_is_what_the_whole_text_is_tokenised_to(
    texts: list[str],
    widths: list[int],
    style: str,
    target: str,
    frame: tuple[str, str],
    is_kept: bool,
) -> None:
    tokenizer = TOKENIZERS[style]
    processor = TextProcessor(tokenizer, target, frame, is_kept)
    prompt = target.join(texts)
    widths = widths[: len(texts) - 1]
    if prompt.count(target) != len(widths) or (is_kept and (target == "<image>" or len(texts) > 2)):
        return  # a kept target takes all items
    expected = texts[0]
    for width, text in zip(widths, texts[1:], strict=True):
        expected += (target if is_kept else "") + processor.content(width) + text
    layout = processor.layout(prompt, headers(widths), {})
    wanted = processor.tokenize(expected)
    image = tokenizer.convert_tokens_to_ids("<image>")
    places = layout.placeholders.get("image", [])
    assert [place.length for place in places] == widths
    for place in places:
        assert set(layout.token_ids[place.offset : place.offset + place.length]) == {image}
    if style == "bytes" or "�" not in tokenizer.decode(wanted):
        assert layout.token_ids == wanted
    token_ids = processor.tokenize(prompt)
    if style == "bytes":
        again = processor.layout(token_ids, headers(widths), {})
        assert again.token_ids == layout.token_ids and again.placeholders == layout.placeholders
    if widths and not is_kept and frame == ("", ""):
        given_expanded = processor.layout(layout.token_ids, headers(widths), {})
        assert given_expanded.token_ids == layout.token_ids


def test_a_prompt_that_is_expanded_already() -> None:
    processor = TextProcessor(TOKENIZERS["bytes"], "<image>", ("", ""), False)
    whole = processor.layout("a<image>b<image>", headers([3, 2]), {})
    again = processor.layout(whole.token_ids, headers([3, 2]), {})
    assert again.token_ids == whole.token_ids and again.placeholders == whole.placeholders
    for widths in ([3, 1], [3], [3, 3], [2, 2]):
        with pytest.raises(PlaceholderMismatchError):
            processor.layout(whole.token_ids, headers(widths), {})
    with pytest.raises(PlaceholderMismatchError):
        processor.layout("a<image><image><image>", headers([3]), {})  # text is not tokens


def test_letters_that_spell_a_placeholder_stay_letters() -> None:
    """Token ids that are not what their own text is tokenised to: nothing is read from the text."""
    tokenizer = TOKENIZERS["bytes"]
    processor = TextProcessor(tokenizer, "[pic]", ("\n", "\n"), False)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "<image>"]
    prompt = [*letters, *tokenizer.encode("a [pic] b", add_special_tokens=False)]
    with pytest.raises(PlaceholderMismatchError):
        processor.layout([*letters, *prompt], headers([2, 2]), {})
    layout = processor.layout(prompt, headers([2]), {})
    assert layout.token_ids[: len(letters)] == letters
    assert tokenizer.decode(layout.token_ids[len(letters) :]) == "a \n<image><image>\n b"


def test_a_selector_reads_the_features() -> None:
    tokenizer = TOKENIZERS["bytes"]

    class Selecting(TextProcessor):
        def _get_prompt_updates(self, mm_items: Any, *_: Any) -> Sequence[PromptUpdate]:
            details = PromptUpdateDetails.select_text("\n<image>\n<image>\n", "<image>")
            return [PromptReplacement(modality="image", target="[pic]", replacement=details)]

    layout = Selecting(tokenizer, "[pic]", ("", ""), False).layout("x [pic] y", headers([1]), {})
    (place,) = layout.placeholders["image"]
    image = tokenizer.convert_tokens_to_ids("<image>")
    ids = torch.tensor(layout.token_ids[place.offset : place.offset + place.length])
    rows = [place.offset + i for run in place.embed_runs for i in range(*run)]
    assert rows == (place.offset + (ids == image).nonzero().flatten()).tolist()
    assert len(rows) == 2
