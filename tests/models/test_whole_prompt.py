"""HF processors that expand a whole prompt and report nothing: their tokens, and whose they are."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from aioengine.errors import InvalidRequestError, ModelLoadError, PlaceholderMismatchError
from aioengine.models.generic import WholePromptProcessor
from aioengine.processors.chat.renderer import ChatRenderer
from aioengine.processors.generic import GenericMultiModalProcessor, GenericProcessingInfo
from tests.processors.hf_processors import FAMILIES, context_for, processor_for, tokenizer_with
from tests.processors.test_generic import group_of, item_of

PIECES = st.lists(
    st.sampled_from(["<image>", "<image><image>", "a cat", ". ", "\n", "<", "é猫", " "]), max_size=6
)
ROWS = 3
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}<end_of_utterance>"
    "{% endfor %}"
)


def idefics2(style: str, *, is_split: bool) -> hf.Idefics2Processor:
    images = hf.Idefics2ImageProcessorPil(
        do_image_splitting=is_split, size={"shortest_edge": 28, "longest_edge": 56}
    )
    tokenizer = tokenizer_with(style=style)
    return hf.Idefics2Processor(images, tokenizer, ROWS, chat_template=TEMPLATE)


@cache
def whole(style: str = "bytes", is_split: bool = False) -> GenericMultiModalProcessor:
    context = context_for(idefics2(style, is_split=is_split))
    return processor_for(context, WholePromptProcessor)


def _info(context: object) -> GenericProcessingInfo:
    return GenericProcessingInfo(context)  # type: ignore[arg-type]


@pytest.mark.parametrize("style", ["bytes", "metaspace"])
@pytest.mark.parametrize("is_split", [False, True])
@settings(max_examples=40, deadline=None)
@given(pieces=PIECES)
def test_tokens_are_hfs_and_each_image_has_its_rows(
    pieces: list[str], style: str, is_split: bool
) -> None:
    processor = whole(style, is_split)
    assert isinstance(processor, WholePromptProcessor)
    text, theirs = "".join(pieces), processor.info.get_hf_processor()
    sizes = [(30 + 5 * index, 90 - 5 * index) for index in range(text.count("<image>"))]
    images: list[Image.Image] = [item_of("image", size) for size in sizes]
    expected = theirs(text=text, **({"images": images} if images else {}), return_tensors="pt")
    found = processor.apply(text, group_of("image", images))
    assert found.token_ids == expected["input_ids"][0].tolist()
    rows = [ROWS * (5 if is_split else 1)] * len(images)
    places = [index for index, each in enumerate(found.token_ids) if each == theirs.image_token_id]
    assert len(places) == sum(rows)
    for end, size, place in zip(
        accumulate(rows), rows, found.placeholders.get("image", ()), strict=True
    ):
        mine = places[end - size : end]
        assert (place.offset, place.length) == (mine[0], mine[-1] + 1 - mine[0])
        embeds = [place.offset + i for run in place.to_span().embed_runs for i in range(*run)]
        assert embeds == mine


def test_encoder_inputs_are_hfs() -> None:
    processor, image = whole(), item_of("image", (40, 60))
    expected = processor.info.get_hf_processor()(text="<image>", images=[image])
    (item,) = processor.process(group_of("image", [image]), {})["image"]
    for name in ("pixel_values", "pixel_attention_mask"):
        torch.testing.assert_close(item[name], torch.as_tensor(expected[name]), rtol=0, atol=0)


@pytest.mark.parametrize("style", ["bytes", "metaspace"])
def test_token_ids_and_conversations_are_expanded_as_text(style: str) -> None:
    processor = whole(style)
    image = item_of("image", (40, 60))
    two = group_of("image", [image, image])
    text = "user: see <image><image>dogs<end_of_utterance>"
    expected = processor.apply(text, two)
    plain = processor.tokenize(text)
    for ids in (plain, expected.token_ids):  # also one that HF has expanded
        assert processor.apply(ids, two).token_ids == expected.token_ids
    content = [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "image"}]
    content = [{**part, "image": image} if part["type"] == "image" else part for part in content]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "dogs"}]}]
    chat = ChatRenderer(processor).render(messages)
    laid_out = processor.layout(chat.token_ids, two, {}, expected.items, chat.literals)
    assert laid_out.token_ids == expected.token_ids
    assert laid_out.placeholders == expected.placeholders


def test_what_it_cannot_place_is_refused() -> None:
    processor = whole()
    one = group_of("image", [item_of("image", (40, 60))])
    for text in ("none", "<image> and <image>"):
        with pytest.raises(PlaceholderMismatchError):
            processor.apply(text, one)
    with pytest.raises(PlaceholderMismatchError):
        processor.apply("<image>", group_of("image", []))
    # A user's words, that are no placeholder.
    words = [processor.tokenize(each, add_special_tokens=False) for each in "<image>"]
    letters = [token_id for word in words for token_id in word]
    with pytest.raises(InvalidRequestError, match="give a text prompt"):
        processor.apply([*processor.tokenize("<image>"), *letters], one)


def test_an_item_that_lies_elsewhere_than_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = processor_for(context_for(idefics2("bytes", is_split=False)), WholePromptProcessor)
    one = group_of("image", [item_of("image", (40, 60))])
    items = processor.process(one, {})
    monkeypatch.setattr(processor.info.get_hf_processor(), "image_seq_len", ROWS + 1)
    with pytest.raises(PlaceholderMismatchError):
        processor.layout("<image>", one, {}, items)


class Depends(hf.Idefics2Processor):
    """Expands a text with images otherwise than one without."""

    def __call__(self, images=None, text=None, **kwargs):  # type: ignore[no-untyped-def]
        self.image_seq_len = ROWS + (images is not None)
        return super().__call__(images=images, text=text, **kwargs)


def test_an_hf_processor_that_looks_at_media_for_its_text_is_refused() -> None:
    made = idefics2("bytes", is_split=False)
    made.__class__ = Depends
    with pytest.raises(ModelLoadError, match="PlaceholderMismatchError"):
        processor_for(context_for(made), WholePromptProcessor)


def test_one_that_puts_images_before_the_text_is_refused() -> None:
    images = hf.BlipImageProcessorPil(size={"height": 28, "width": 28})
    made = hf.Blip2Processor(images, tokenizer_with(image_token="<image>"), num_query_tokens=4)
    with pytest.raises(ModelLoadError, match=r"does not report.*Nor are its tokens of a text"):
        processor_for(context_for(made), WholePromptProcessor)


def test_who_serves_it() -> None:
    context = context_for(idefics2("bytes", is_split=False))
    assert WholePromptProcessor.chosen_for(_info(context)) is WholePromptProcessor
    with pytest.raises(ModelLoadError, match="does not report"):
        processor_for(context, GenericMultiModalProcessor)
    reporting = context_for(FAMILIES["idefics3"].make())
    assert WholePromptProcessor.chosen_for(_info(reporting)) is GenericMultiModalProcessor
