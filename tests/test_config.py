"""Configuration and sampling parameters refuse nonsense when they are made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from aioengine import (
    AsyncEngine,
    EngineConfig,
    MediaConfig,
    SamplingParams,
    StructuredOutputs,
)
from aioengine.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("temperature", {"temperature": -1}),
        ("skip_special_tokens", {"skip_special_tokens": 0}),
        ("ignore_eos", {"ignore_eos": "no"}),
        ("detokenize", {"detokenize": None}),
        ("include_stop_str_in_output", {"include_stop_str_in_output": 1}),
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
        ("n", {"n": 0}),
        ("n", {"n": 16384}),
        ("n", {"n": 1.0}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": float("inf")}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("repetition_penalty", {"repetition_penalty": None}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 100_000}),
        ("logprobs", {"logprobs": True}),
        ("prompt_logprobs", {"prompt_logprobs": "all"}),
        ("logit_bias", {"logit_bias": [1, 2]}),
        ("logit_bias", {"logit_bias": {"1": 2.0}}),
        ("logit_bias[1]", {"logit_bias": {1: 101}}),
        ("logit_bias[1]", {"logit_bias": {1: float("nan")}}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids", {"allowed_token_ids": {1: 2}}),
        ("allowed_token_ids", {"allowed_token_ids": [1.5]}),
        ("bad_words", {"bad_words": "word"}),
        ("bad_words", {"bad_words": [""]}),
        ("bad_words", {"bad_words": ["x"] * 1000}),
        ("bad_words", {"bad_words": [" "]}),
        ("bad_words", {"bad_words": ["\ud800"]}),
        ("stop", {"stop": "\ud800"}),
        ("temperature", {"temperature": 10**400}),
        ("seed", {"seed": 10**5000}),
        ("top_k", {"top_k": -(10**5000)}),
        ("logit_bias[1]", {"logit_bias": {1: 10**400}}),
        ("allowed_token_ids", {"allowed_token_ids": [True]}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("bad_words", {"bad_words": ["a" * 1000] * 5}),
        ("stop", {"stop": ["a" * 1000 + str(n) for n in range(5)]}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
        ("ignore_eos", {"structured_outputs": StructuredOutputs(regex="a"), "ignore_eos": True}),
    ],
)
def test_bad_sampling_params(parameter: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    assert caught.value.parameter == parameter


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def _shared(levels: int) -> dict[str, Any]:
    """Small in memory, but 2 to the power of `levels` when it is written out."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"a": schema, "b": schema}
    return schema


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"json": {}, "json_object": True}),
        ("structured_outputs.regex", {"regex": ""}),
        ("structured_outputs.regex", {"regex": "a" * 1_000_000}),
        ("structured_outputs.grammar", {"grammar": 5}),
        ("structured_outputs.choice", {"choice": []}),
        ("structured_outputs.choice", {"choice": "yes"}),
        ("structured_outputs.choice", {"choice": ["yes", ""]}),
        ("structured_outputs.choice", {"choice": ["yes"] * 1_000_000}),
        ("structured_outputs.json", {"json": 5}),
        ("structured_outputs.json", {"json": "{"}),
        ("structured_outputs.json", {"json": {"a": object()}}),
        ("structured_outputs.json", {"json": {"enum": ["x" * 1_000_000]}}),
        ("structured_outputs.json", {"json": json.dumps({"enum": ["x" * 1_000_000]})}),
        ("structured_outputs.json", {"json": _nested(64)}),
        ("structured_outputs.json", {"json": json.dumps(_nested(64))}),
        ("structured_outputs.json", {"json": "[" * 100_000 + "]" * 100_000}),
        ("structured_outputs.json", {"json": _shared(31)}),
        ("structured_outputs.json", {"json": {"pattern": "a?" * 5000}}),
        ("structured_outputs.json", {"json": {"patternProperties": {"a?" * 5000: {}}}}),
        ("structured_outputs.json", {"json": {"anyOf": [{"$ref": "#"}] * 1000}}),
        ("structured_outputs.regex", {"regex": "a?" * 5000}),
        ("structured_outputs.regex", {"regex": "\ud800"}),
        ("structured_outputs.grammar", {"grammar": "start: " + "/a?/ " * 5000}),
        ("structured_outputs.grammar", {"grammar": 'a: "b"\n' * 5000}),
        ("structured_outputs.choice", {"choice": ["\ud800"]}),
    ],
)
def test_bad_structures(parameter: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**options)
    assert caught.value.parameter == parameter


def test_a_structure_that_contains_itself() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidRequestError):
        StructuredOutputs(json=schema)
    schema["other"] = schema
    with pytest.raises(InvalidRequestError):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize("parameter", ["stop", "stop_token_ids"])
def test_stops_have_to_be_sequences(parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{parameter: 5})
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("max_seqs", {"max_seqs": 4}),
        ("device", {"device": None}),
        ("max_num_seqs", {"max_num_seqs": 0}),
        ("max_num_seqs", {"max_num_seqs": "8"}),
        ("block_size", {"block_size": 1.5}),
        ("dtype", {"dtype": "int8"}),
        ("kv_cache_bytes", {"kv_cache_bytes": -1}),
        ("processor_workers", {"processor_workers": "process:0"}),
        ("processor_workers", {"processor_workers": "thread:0"}),
        ("mm_processor_cache_dir", {"mm_processor_cache_dir": 5}),
        ("mm_processor_cache_dir_bytes", {"mm_processor_cache_dir_bytes": -1}),
        ("limit_mm_per_prompt['image']", {"limit_mm_per_prompt": {"image": -1}}),
        ("limit_mm_per_prompt['image']", {"limit_mm_per_prompt": {"image": "2"}}),
        ("limit_mm_per_prompt['image']", {"limit_mm_per_prompt": {"image": {"heigth": 9}}}),
        ("limit_mm_per_prompt['audio']", {"limit_mm_per_prompt": {"audio": {"width": 9}}}),
        (
            "limit_mm_per_prompt['video']['num_frames']",
            {"limit_mm_per_prompt": {"video": {"count": 0, "num_frames": 0}}},
        ),
        (
            "limit_mm_per_prompt['image']['count']",
            {"limit_mm_per_prompt": {"image": {"count": True}}},
        ),
        ("limit_mm_per_prompt", {"limit_mm_per_prompt": {"imgae": 1}}),
        ("limit_mm_per_prompt", {"limit_mm_per_prompt": {7: 1}}),
        ("limit_mm_per_prompt", {"limit_mm_per_prompt": ["image"]}),
        ("thread_niceness", {"thread_niceness": -1}),
        ("thread_niceness", {"thread_niceness": 20}),
        ("thread_niceness", {"thread_niceness": 1.5}),
        ("tensor_parallel_size", {"tensor_parallel_size": 2}),
    ],
)
def test_bad_engine_options(parameter: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AsyncEngine.from_pretrained("anything", **options)
    assert caught.value.parameter == parameter


def test_a_wrong_limit_says_what_there_is() -> None:
    with pytest.raises(InvalidRequestError, match="keyed by image, audio, video, not 'imgae'"):
        EngineConfig(limit_mm_per_prompt={"imgae": 1})
    with pytest.raises(InvalidRequestError, match="from count, width, height, not 'heigth'"):
        EngineConfig(limit_mm_per_prompt={"image": {"heigth": 512}})


def test_configurations_are_checked_when_made() -> None:
    for options in ({"fetch_timeout_s": 0}, {"max_image_pixels": -1}, {"max_image_bytes": "1"}):
        with pytest.raises(InvalidRequestError):
            MediaConfig(**options)
    with pytest.raises(InvalidRequestError):
        EngineConfig(limit_mm_per_prompt={"image": 1.5})


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        *(
            ("media.allowed_hosts", {"allowed_hosts": (entry,)})
            for entry in ("", "a b", "http://a.test", "a.test/", "**", "*a", "2606::1", "a.test:x")
        ),
        ("media.allowed_hosts", {"allowed_hosts": ("user@a.test",)}),
        ("media.allowed_hosts", {"allowed_hosts": "a.test"}),
        ("media.max_audio_s", {"max_audio_s": 0}),
        ("media.max_video_frames", {"max_video_frames": 1.5}),
        ("media.video_num_frames", {"video_num_frames": 0}),
        ("media.video_fps", {"video_fps": -1}),
        ("media.audio_formats", {"audio_formats": "WAV"}),
        ("media.max_concurrent_fetches", {"max_concurrent_fetches": 0}),
    ],
)
def test_bad_media_options(parameter: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MediaConfig(**options)
    assert caught.value.parameter == parameter


@dataclass(frozen=True, kw_only=True)
class Retrying(MediaConfig):
    retries: int = 0


def test_fields_of_a_subclass_are_its_own() -> None:
    assert Retrying(retries=-1).retries == -1
    with pytest.raises(InvalidRequestError, match="max_image_bytes"):
        Retrying(max_image_bytes=0)
