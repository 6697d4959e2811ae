"""The model guide's second example, Fuyu: an image's patches go before the text, row by row.

The HF processor wants no placeholder in the text, ends each row of patches with a newline token,
and puts `<s>` after the image and `<0x04>` (the answer begins) after the text. So this example
takes what LLaVA leaves alone: a range that is a part of what is put in, positions in it without
encoder rows, tokens that belong to no item, an empty dummy text, HF outputs that are cut up first.

What is assumed of the real tokenizer, and made so in the tiny one here: a Unigram model with byte
fallback, whose normalizer writes "▁" for each space and one before the text; `|SPEAKER|`,
`|NEWLINE|`, `<s>` and `<0x04>` are pieces of its vocabulary, not added tokens, so that "▁" comes
before `|SPEAKER|` too, and HF strips it with `[..., 1:]`; `|ENDOFTEXT|` is the one added token, BOS
and EOS at once, and the template puts it before each text; the pieces of a text with `<0x04>` at
its end are the text's own and that piece.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from aioengine.errors import MediaError, PlaceholderMismatchError, UnsupportedModalityError
from aioengine.processors import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
    MultiModalFieldConfig,
    MultiModalKwargs,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from aioengine.processors.items import ImageHeader
from aioengine.processors.processor import Layout
from aioengine.processors.prompt.updates import ResolvedUpdates
from aioengine.processors.registry import MultiModalRegistry
from tests.processors.conftest import context_of

REGISTRY = MultiModalRegistry()

_BOS_ID, _IMAGE_TOKEN_ID, _NEWLINE_TOKEN_ID, _BOA_ID, _SPACE_ID = 1, 2, 3, 4, 5
LIMIT = ImageSize(width=60, height=40)
PATCH = 10


class FuyuInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def get_image_feature_grid_size(
        self, *, image_width: int, image_height: int
    ) -> tuple[int, int]:
        image_processor = self.get_image_processor()
        target_width = image_processor.size["width"]
        target_height = image_processor.size["height"]
        patch_width = image_processor.patch_size["width"]
        patch_height = image_processor.patch_size["height"]
        if not (image_width <= target_width and image_height <= target_height):
            height_scale_factor = target_height / image_height
            width_scale_factor = target_width / image_width
            optimal_scale_factor = min(height_scale_factor, width_scale_factor)
            image_height = int(image_height * optimal_scale_factor)
            image_width = int(image_width * optimal_scale_factor)
        ncols = math.ceil(image_width / patch_width)
        nrows = math.ceil(image_height / patch_height)
        return ncols, nrows

    def get_num_image_patches(self, *, image_width: int, image_height: int) -> int:
        ncols, nrows = self.get_image_feature_grid_size(
            image_width=image_width, image_height=image_height
        )
        return ncols * nrows

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        ncols, nrows = self.get_image_feature_grid_size(
            image_width=image_width, image_height=image_height
        )
        return (ncols + 1) * nrows

    def get_image_size_with_most_features(self) -> ImageSize:
        image_processor = self.get_image_processor()
        return ImageSize(width=image_processor.size["width"], height=image_processor.size["height"])

    def get_max_image_tokens(self) -> int:
        target_width, target_height = self.get_image_size_with_most_features()
        return self.get_num_image_tokens(image_width=target_width, image_height=target_height)

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {"image": self.get_max_image_tokens()}


class FuyuDummyInputs(BaseDummyInputsBuilder):
    info: FuyuInfo

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        target_width, target_height = self.info.get_image_size_with_most_features()
        num_images = mm_counts.get("image", 0)
        images = self._get_dummy_images(
            width=target_width, height=target_height, num_images=num_images
        )
        return ProcessorInputs(prompt_text="", mm_data={"image": images})


class FuyuProcessing(BaseMultiModalProcessor):
    info: FuyuInfo

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        processed_outputs = dict(super()._call_hf_processor(prompt, mm_data, mm_kwargs))
        image_patches = processed_outputs.get("image_patches")
        if image_patches is not None:
            images = mm_data["images"]
            assert isinstance(images, list)
            image_sizes = map(ImageProcessorItems(images).get_image_size, range(len(images)))
            # Deviation: the patches of all images now come in one tensor, so they are cut here.
            num_patches = [
                self.info.get_num_image_patches(image_width=width, image_height=height)
                for width, height in image_sizes
            ]
            processed_outputs["image_patches"] = list(torch.split(image_patches, num_patches))
        return processed_outputs

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return dict(image_patches=MultiModalFieldConfig.batched("image"))

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        hf_config = self.info.get_hf_config()
        # Deviation: the attribute moved into the text configuration.
        bos_token_id = hf_config.text_config.bos_token_id
        assert isinstance(bos_token_id, int)
        tokenizer = self.info.get_tokenizer()
        eot_token_id = tokenizer.bos_token_id
        assert isinstance(eot_token_id, int)

        def get_replacement_fuyu(item_idx: int) -> PromptUpdateDetails:
            images = mm_items.get_items("image", ImageProcessorItems)
            image_size = images.get_image_size(item_idx)
            ncols, nrows = self.info.get_image_feature_grid_size(
                image_width=image_size.width, image_height=image_size.height
            )
            image_tokens = ([_IMAGE_TOKEN_ID] * ncols + [_NEWLINE_TOKEN_ID]) * nrows
            # Deviation: the encoder gives rows for the patches only, none for the newlines.
            details = PromptUpdateDetails.select_token_id(
                [*image_tokens, bos_token_id], _IMAGE_TOKEN_ID
            )
            return dataclasses.replace(details, features=image_tokens)

        return [
            PromptReplacement(
                modality="image", target=[eot_token_id], replacement=get_replacement_fuyu
            )
        ]

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        # Whether or not one is there already, as HF does.
        boa_token_id = self.info.get_tokenizer().get_vocab()["<0x04>"]
        return [*prompt_tokens, boa_token_id]


@REGISTRY.register_processor(FuyuProcessing, info=FuyuInfo, dummy_inputs=FuyuDummyInputs)
class FuyuModel:
    pass


class ExactFuyuProcessing(FuyuProcessing):
    """Leaves a text without images as the tokenizer gives it, as the HF processor does.

    The guide's hook is not told whether there are images; this later step is.
    """

    def _apply_prompt_updates(
        self,
        token_ids: list[int],
        mm_prompt_updates: ResolvedUpdates,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        if not mm_prompt_updates.num_items:
            return Layout(token_ids=token_ids[:-1], placeholders={})
        return super()._apply_prompt_updates(token_ids, mm_prompt_updates, literals)


def make_tokenizer() -> Any:
    """A tiny tokenizer that does what Fuyu's does in what matters (see the top of this file)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = dict.fromkeys(["<unk>", "<s>", "|SPEAKER|", "|NEWLINE|", "<0x04>"], 0.0)
    pieces |= {"▁": -3.0} | dict.fromkeys(["▁Describe", "▁the", "▁picture", "cat"], -2.0)
    pieces |= {chr(code): -4.0 for code in range(33, 127)}
    pieces |= {f"<0x{byte:02X}>": -0.5 for byte in range(256) if byte != 4}
    tokenizer = Tokenizer(models.Unigram(list(pieces.items()), unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Replace("▁", " ")
    end = "|ENDOFTEXT|"
    tokenizer.add_special_tokens([end])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


@pytest.fixture(scope="module", autouse=True)
def whole_patches() -> Iterator[None]:
    """Repairs the Pillow image processor of transformers 5.23, which cannot cut tensors.

    Its torch twin gives a tensor with a batch dimension, which FuyuProcessor counts on.
    """
    from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil

    cut = FuyuImageProcessorPil.patchify_image

    def patchify_image(self: Any, image: torch.Tensor, patch_size: Any = None) -> torch.Tensor:
        patches = torch.as_tensor(cut(self, np.asarray(image), patch_size))
        return patches.reshape(1, -1, patches.shape[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FuyuImageProcessorPil, "patchify_image", patchify_image)
        yield


@pytest.fixture(scope="module")
def fuyu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The guide's processor, for a tiny Fuyu."""
    from transformers import FuyuConfig, FuyuProcessor
    from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil

    folder = tmp_path_factory.mktemp("fuyu")
    image_processor = FuyuImageProcessorPil(
        size=LIMIT._asdict(), patch_size={"height": PATCH, "width": PATCH}
    )
    processor = FuyuProcessor(image_processor=image_processor, tokenizer=make_tokenizer())
    processor.save_pretrained(folder)
    text_config = {"vocab_size": 512, "hidden_size": 32, "bos_token_id": _BOS_ID}
    FuyuConfig(text_config={"model_type": "persimmon", **text_config}).save_pretrained(folder)
    return REGISTRY.create_processor(FuyuModel, context_of(folder))


def items_of(*pil_images: Image.Image | ImageHeader) -> MultiModalDataItems:
    return MultiModalDataItems({"image": ImageProcessorItems(pil_images)})


def header_of(size: tuple[int, int]) -> ImageHeader:
    return ImageHeader(ImageSize(*size), "RGB")


def image_of(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(size).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def theirs_of(fuyu: Any, text: str, **pil_images: Any) -> tuple[list[int], Any]:
    """The HF processor's own token ids and patches."""
    outputs = fuyu.info.get_hf_processor()(text=text, return_tensors="pt", **pil_images)
    return torch.as_tensor(outputs["input_ids"])[0].tolist(), outputs.get("image_patches")


def leaves_pixels(size: tuple[int, int]) -> bool:
    """Whether something is left of an image that is shrunk to the limit."""
    return min(1.0, LIMIT.width / size[0], LIMIT.height / size[1]) * min(size) >= 1.01


small = st.tuples(st.integers(1, LIMIT.width), st.integers(1, LIMIT.height))
large = st.tuples(st.integers(1, 200), st.integers(1, 200))
odd = st.tuples(st.integers(61, 600), st.integers(11, 19))
odd |= st.tuples(st.integers(11, 19), st.integers(61, 400))
sizes = small | (large | odd).filter(leaves_pixels)
words = st.sampled_from(
    ["Describe the picture.", "cat", " ", "\n", "▁", "é", "\x04", "<s>", "|NEWLINE|", "<0x04>"]
)
texts = st.lists(words | st.text(max_size=6), min_size=1).map("".join).filter(bool)


@settings(max_examples=60, deadline=None)
@example(text="Describe the picture.\n", size=tuple(LIMIT))
@example(text="<s> cat", size=(1, 1))
@example(text=" ", size=(61, 40))
@example(text="a", size=(60, 41))
@example(text="<0x04>", size=(599, 11))
@given(text=texts, size=sizes)
def test_the_guides_example(fuyu: Any, text: str, size: tuple[int, int]) -> None:
    pil_image = image_of(size)
    token_ids, patches = theirs_of(fuyu, text, images=pil_image)
    mine = fuyu.apply(text, items_of(pil_image))
    assert mine.token_ids == token_ids
    [placed] = mine.placeholders["image"]
    assert (placed.offset, placed.length) == (0, token_ids.index(_BOS_ID))
    assert placed.length == fuyu.info.get_num_image_tokens(
        image_width=size[0], image_height=size[1]
    )
    assert placed.length <= fuyu.info.get_max_image_tokens()  # The dummy image's.
    rows = [position for run in placed.embed_runs for position in range(*run)]
    assert rows == [index for index, token in enumerate(token_ids) if token == _IMAGE_TOKEN_ID]
    [item] = mine.items["image"]
    assert torch.equal(item["image_patches"], patches)
    assert placed.num_embeds == len(patches)

    prompt = fuyu.tokenize(text)
    for same in (
        fuyu.apply(prompt, items_of(pil_image)),
        fuyu.apply(token_ids, items_of(pil_image)),  # What the HF processor has laid out already.
        fuyu.layout(text, items_of(header_of(size)), {}),
        fuyu.layout(prompt, items_of(header_of(size)), {}),
    ):
        assert (same.token_ids, same.placeholders) == (mine.token_ids, mine.placeholders)
        fuyu.verify_layout(same, items_of(pil_image), mine.items, {})


@settings(deadline=None)
@given(text=texts)
def test_a_text_without_images(fuyu: Any, text: str) -> None:
    """As HF's, and `<0x04>`: the guide's hook adds it whatever media there are."""
    token_ids, _ = theirs_of(fuyu, text)
    mine = fuyu.apply(text, MultiModalDataItems())
    assert mine.token_ids == [*token_ids, _BOA_ID]
    assert (mine.placeholders, mine.items) == ({}, {})
    assert mine.token_ids == fuyu.layout(fuyu.tokenize(text), MultiModalDataItems(), {}).token_ids


@settings(deadline=None)
@given(text=texts)
def test_an_exact_text_without_images(fuyu: Any, text: str) -> None:
    exact = ExactFuyuProcessing(fuyu.info, fuyu.dummy_inputs)
    token_ids, _ = theirs_of(fuyu, text)
    mine = exact.apply(text, MultiModalDataItems())
    assert (mine.token_ids, mine.placeholders, mine.items) == (token_ids, {}, {})
    pil_image = image_of((25, 15))
    token_ids, _ = theirs_of(fuyu, text, images=pil_image)
    assert exact.apply(text, items_of(pil_image)).token_ids == token_ids


def test_a_text_with_the_target_in_it(fuyu: Any) -> None:
    pil_image = image_of((25, 15))
    token_ids, _ = theirs_of(fuyu, "a|ENDOFTEXT|b", images=pil_image)
    assert fuyu.apply("a|ENDOFTEXT|b", items_of(pil_image)).token_ids == token_ids


def test_an_empty_text(fuyu: Any) -> None:
    """The only text that differs: HF tokenizes `<0x04>` with the text, thus behind a lone "▁"."""
    pil_image = image_of((25, 15))
    token_ids, _ = theirs_of(fuyu, "", images=pil_image)
    assert token_ids[-2:] == [_SPACE_ID, _BOA_ID]
    assert fuyu.apply("", items_of(pil_image)).token_ids == [*token_ids[:-2], _BOA_ID]


def test_the_dummy_image_is_the_largest(fuyu: Any) -> None:
    inputs = fuyu.dummy_inputs.get_dummy_processor_inputs(100, {"image": 1})
    assert inputs.prompt_text == fuyu.dummy_inputs.get_dummy_text({"image": 1}) == ""
    mine = fuyu.apply(inputs.prompt_text, items_of(*inputs.mm_data["image"]))
    [placed] = mine.placeholders["image"]
    assert placed.embed_runs == ((0, 6), (7, 13), (14, 20), (21, 27))
    assert {"image": placed.length} == fuyu.info.get_mm_max_tokens_per_item(100, {"image": 1})
    assert mine.items["image"][0]["image_patches"].shape == (24, 3 * PATCH * PATCH)
    assert fuyu.dummy_inputs.get_dummy_processor_inputs(100, {}).mm_data == {"image": []}


def test_a_header_that_lied(fuyu: Any) -> None:
    layout = fuyu.layout("a", items_of(header_of((30, 10))), {})
    for size in ((10, 30), (30, 11), (31, 10)):
        pil_image = items_of(image_of(size))
        with pytest.raises(MediaError, match="promised"):
            fuyu.verify_layout(layout, pil_image, fuyu.process(pil_image, {}), {})


def test_prompts_that_are_refused(fuyu: Any) -> None:
    pil_image = image_of((25, 15))
    with pytest.raises(UnsupportedModalityError, match="at most 1 image, not 2"):
        fuyu.apply("a", items_of(pil_image, pil_image))
    with pytest.raises(PlaceholderMismatchError, match="1 image was given"):
        fuyu.layout([70, 71], items_of(pil_image), {})  # Without |ENDOFTEXT| at its start.


def test_a_image_that_shrinks_to_nothing(fuyu: Any) -> None:
    with pytest.raises(MediaError):
        fuyu.layout("a", items_of(header_of((1, 130))), {})
