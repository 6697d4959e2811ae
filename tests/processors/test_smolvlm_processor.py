"""SmolVLM's processor without torchvision and num2words against what transformers' own gave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aioengine.processors.hf.smolvlm import SmolVLMProcessor, SmolVLMVideoProcessor, to_words
from tests.processors.make_smolvlm_goldens import (
    CASES,
    GOLDENS,
    NAME,
    digest,
    processor_of,
    text_of,
)
from tests.processors.make_video_goldens import describe, settings_of

RECORDED: Mapping[str, Any] = json.loads(GOLDENS.read_text())


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_theirs(name: str) -> None:
    mine = CASES[name].run({NAME: SmolVLMVideoProcessor})
    expected = RECORDED["tensors"][name]
    assert mine.keys() == expected.keys()
    for key, value in mine.items():
        assert describe(value) == expected[key], key


@pytest.mark.parametrize("name", RECORDED["settings"])
def test_settings_are_theirs(name: str) -> None:
    mine = SmolVLMVideoProcessor.from_dict(dict(CASES[name].settings))
    assert settings_of(mine) == RECORDED["settings"][name]


def test_a_video_becomes_the_same_text() -> None:
    assert text_of(processor_of(SmolVLMProcessor, SmolVLMVideoProcessor)) == RECORDED["text"]


def test_numbers_are_written_as_num2words_does() -> None:
    assert digest(map(to_words, range(1000))) == RECORDED["words"]
    for number in (-1, 1000):
        with pytest.raises(ValueError, match="no word"):
            to_words(number)


def test_a_size_that_names_no_edge() -> None:
    with pytest.raises(ValueError, match="longest_edge"):
        SmolVLMVideoProcessor()([np.zeros((2, 30, 30, 3), np.uint8)], size={"shortest_edge": 20})
