"""Configuration and sampling parameters refuse nonsense when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine import AsyncEngine, EngineConfig, MediaConfig, SamplingParams
from aioengine.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.5}),
        ("top_k", {"top_k": -2}),
        ("top_k", {"top_k": 1.5}),
        ("min_p", {"min_p": -0.1}),
        ("seed", {"seed": 1.5}),
        ("seed", {"seed": 2**64}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": True}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 17}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": ["a"] * 10_000}),
        ("stop", {"stop": [5]}),
        ("stop", {"stop": ["a"], "detokenize": False}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("stop_token_ids", {"stop_token_ids": ["a"]}),
        ("stop_token_ids", {"stop_token_ids": list(range(5000))}),
        ("n", {"n": 16384}),
        ("logprobs", {"logprobs": 5}),
        ("bad_words", {"bad_words": ["x"]}),
    ],
)
def test_bad_sampling_params(parameter: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("parameter", ["stop", "stop_token_ids"])
def test_stops_have_to_be_sequences(parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{parameter: 5})
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("max_seqs", {"max_seqs": 4}),
        ("max_num_seqs", {"max_num_seqs": 0}),
        ("max_num_seqs", {"max_num_seqs": "8"}),
        ("block_size", {"block_size": 1.5}),
        ("dtype", {"dtype": "int8"}),
        ("kv_cache_bytes", {"kv_cache_bytes": -1}),
        ("processor_workers", {"processor_workers": "process:2"}),
        ("processor_workers", {"processor_workers": "thread:0"}),
        ("limit_mm_per_prompt['image']", {"limit_mm_per_prompt": {"image": -1}}),
        ("tensor_parallel_size", {"tensor_parallel_size": 2}),
    ],
)
def test_bad_engine_options(parameter: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AsyncEngine.from_pretrained("anything", **options)
    assert caught.value.parameter == parameter


def test_configurations_are_checked_when_made() -> None:
    for options in ({"fetch_timeout_s": 0}, {"max_image_pixels": -1}, {"max_image_bytes": "1"}):
        with pytest.raises(InvalidRequestError):
            MediaConfig(**options)
    with pytest.raises(InvalidRequestError):
        EngineConfig(limit_mm_per_prompt={"image": 1.5})
