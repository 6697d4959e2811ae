"""Helpers for models that write down speech."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.errors import InvalidRequestError
from aioengine.processors import cut_windows, whisper_prompt

RATE = 1000


def test_whispers_prompt() -> None:
    assert whisper_prompt() == "<|startoftranscript|><|notimestamps|>"
    assert whisper_prompt("German") == whisper_prompt("DE") == whisper_prompt("de")
    assert whisper_prompt("de") == "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
    assert whisper_prompt("de", "translate", timestamps=True) == (
        "<|startoftranscript|><|de|><|translate|>"
    )


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (("de", "sing"), "task"),
        (("klingon",), "language"),
        (("d|>",), "language"),
        ((None, "translate"), "language"),
    ],
)
def test_prompts_that_make_no_sense(arguments: tuple[str, ...], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        whisper_prompt(*arguments)
    assert caught.value.parameter == parameter


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 9000), window_s=st.floats(0.5, 4), share=st.floats(0, 0.9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_windows_are_the_clip(length: int, window_s: float, share: float, seed: int) -> None:
    samples = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    windows = cut_windows(samples, RATE, window_s=window_s, search_s=window_s * share)
    assert np.array_equal(np.concatenate([part for part, _ in windows]), samples)
    assert all(len(part) <= window_s * RATE and rate == RATE for part, rate in windows)
    assert all(len(part) > 0 for part, _ in windows[:-1])
    assert all(np.shares_memory(part, samples) for part, _ in windows if len(part))


def test_windows_end_where_it_is_quiet() -> None:
    samples = np.ones(5000, np.float32)
    samples[1800:1900] = 0
    (first, _), *_ = cut_windows(samples, RATE, window_s=2, search_s=0.5)
    assert 1800 <= len(first) <= 1900
    (first, _), *_ = cut_windows(samples, RATE, window_s=2, search_s=0)
    assert len(first) == 2000


def test_short_clips_are_one_window() -> None:
    samples = np.ones(RATE, np.float32)
    ((window, rate),) = cut_windows(samples, RATE)
    assert np.array_equal(window, samples) and rate == RATE


@pytest.mark.parametrize(
    ("shape", "rate", "window_s", "search_s"),
    [
        ((2, 9), RATE, 1, 0),
        ((9,), 0, 1, 0),
        ((9,), RATE, 1, 1),
        ((9,), RATE, 1, -1),
        ((9,), RATE, 1e-5, 0),
        ((9,), RATE, float("inf"), 0),
        ((9,), RATE, float("nan"), 0),
    ],
)
def test_settings_that_make_no_sense(
    shape: tuple[int, ...], rate: int, window_s: float, search_s: float
) -> None:
    with pytest.raises(InvalidRequestError):
        cut_windows(np.ones(shape), rate, window_s=window_s, search_s=search_s)
