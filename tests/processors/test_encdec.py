"""Prompts of two halves: the encoder's with its media, the decoder's with its start."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from aioengine.errors import ModelLoadError
from aioengine.processors import (
    EncDecMultiModalProcessor,
    ImageProcessorItems,
    MultiModalDataItems,
)
from aioengine.processors.encdec import EncDecTextProcessor, Halves, MultiModalEncDecInputs
from aioengine.processors.processor import TextOrTokens
from tests.processors.conftest import context_of
from tests.processors.test_guide import GuideDummyInputs, GuideInfo, GuideProcessor


class Listener(EncDecMultiModalProcessor, GuideProcessor):
    """The encoder sees images only; the prompt is the decoder's."""

    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        return [self.info.get_hf_config().image_token_index] * mm_items.get_count("image")


@pytest.fixture
def processor(llava_folder: Path) -> Listener:
    info = GuideInfo(context_of(llava_folder))
    info.get_hf_config().decoder_start_token_id = 7
    return Listener(info, GuideDummyInputs(info))


def pil_images(count: int) -> MultiModalDataItems:
    return MultiModalDataItems({"image": ImageProcessorItems([Image.new("RGB", (9, 9))] * count)})


def test_both_halves(processor: Listener) -> None:
    inputs = processor.apply("a cat", pil_images(2))
    assert isinstance(inputs, MultiModalEncDecInputs)
    image = processor.info.get_hf_config().image_token_index
    assert inputs.token_ids == [image] * 8
    assert [(place.offset, place.length) for place in inputs.placeholders["image"]] == [
        (0, 4),
        (4, 4),
    ]
    plain = processor.tokenize("a cat", add_special_tokens=False)
    assert inputs.decoder_token_ids == [7, *plain]
    assert len(inputs.items["image"]) == 2


def test_a_start_token_is_put_before_the_prompt_once(processor: Listener) -> None:
    for prompt, wanted in (([7, 9], [7, 9]), ([9, 7], [7, 9, 7]), ([], [7])):
        assert processor.apply(prompt, pil_images(1)).decoder_token_ids == wanted


def test_an_explicit_decoder_prompt_wins(processor: Listener) -> None:
    assert processor.apply("a", pil_images(1), None, [3, 4]).decoder_token_ids == [7, 3, 4]


class Reader(EncDecTextProcessor):
    """Text to text."""


def test_the_decoder_prompt_of_last_resort(llava_folder: Path) -> None:
    """Of no config, but of the tokenizer; and where that has none, an error that says so."""
    info = GuideInfo(context_of(llava_folder))
    info.ctx.generation_config = None
    config, tokenizer = info.get_hf_config(), info.get_tokenizer()
    config.get_text_config().bos_token_id = None
    reader = Reader(info, GuideDummyInputs(info))
    layout = reader.layout_halves(Halves(prompt="a cat"), MultiModalDataItems(), {})
    assert layout.decoder_token_ids == [tokenizer.bos_token_id]
    assert reader.decoder_prompt([9]) == [tokenizer.bos_token_id, 9]
    assert reader.decoder_prompt([tokenizer.bos_token_id]) == [tokenizer.bos_token_id]
    config.decoder_start_token_id = 7  # what a config says comes first
    assert reader.default_decoder_prompt() == [7]
    del config.decoder_start_token_id
    tokenizer.bos_token = None
    with pytest.raises(ModelLoadError, match=r"has no BOS; put decoder_start_token_id"):
        reader.default_decoder_prompt()
    assert reader.decoder_prompt([9]) == [9]


def test_without_a_start_token_of_its_own(processor: Listener) -> None:
    config = processor.info.get_hf_config()
    del config.decoder_start_token_id
    assert processor.decoder_start_token_id == config.get_text_config().bos_token_id
