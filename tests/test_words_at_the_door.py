"""What a newcomer is told: the error's kind, the parameter that it names, and its whole text."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import trio

from aioengine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    MediaConfig,
    SamplingParams,
    StructuredOutputs,
)
from aioengine.engine.lifecycle import EngineLifecycle
from aioengine.errors import (
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    WrongLoopError,
    did_you_mean,
)
from aioengine.execution.memory_budget import find_device
from aioengine.types import EngineState


def engine(**options: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained("model", **options)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


IN_PARAMS = "it belongs to SamplingParams: params=SamplingParams"
Row = tuple[Callable[..., Any], dict[str, Any], str, str]
MISSPELT: list[Row] = [
    (engine, {"max_seqs": 1}, "max_seqs",
     "EngineConfig has no option 'max_seqs'; did you mean 'max_num_seqs'?"),
    (engine, {"model_max_length": 1}, "model_max_length",
     "EngineConfig has no option 'model_max_length'; did you mean 'max_model_len'?"),
    (engine, {"torch_dtype": "auto"}, "torch_dtype",
     "EngineConfig has no option 'torch_dtype'; did you mean 'dtype'?"),
    (engine, {"allowed_hosts": ["a"]}, "allowed_hosts",
     "EngineConfig has no option 'allowed_hosts'; it belongs to MediaConfig: "
     "media=MediaConfig(allowed_hosts=...)"),
    (engine, {"qqq": 1}, "qqq", "EngineConfig has no option 'qqq'"),
    (EngineConfig, {"gpu_memory": 1}, "gpu_memory",
     "EngineConfig has no option 'gpu_memory'; did you mean 'gpu_memory_utilization'?"),
    (MediaConfig, {"allowed_host": ["a"]}, "media.allowed_host",
     "MediaConfig has no option 'allowed_host'; did you mean 'allowed_hosts'?"),
    (SamplingParams, {"max_token": 5}, "max_token",
     "SamplingParams has no option 'max_token'; did you mean 'max_tokens'?"),
    (SamplingParams, {"max_new_tokens": 5}, "max_new_tokens",
     "SamplingParams has no option 'max_new_tokens'; did you mean 'max_tokens'?"),
    (SamplingParams, {"do_sample": True}, "do_sample",
     "SamplingParams has no option 'do_sample'; did you mean 'temperature'?"),
    (SamplingParams, {"regex": "a"}, "regex",
     "SamplingParams has no option 'regex'; it belongs to StructuredOutputs: "
     "structured_outputs=StructuredOutputs(regex=...)"),
    (StructuredOutputs, {"rexeg": "a"}, "structured_outputs.rexeg",
     "StructuredOutputs has no field 'rexeg'; did you mean 'regex'?"),
    (lambda **options: replace(SamplingParams(), **options), {"temprature": 0}, "temprature",
     "SamplingParams has no option 'temprature'; did you mean 'temperature'?"),
]  # fmt: skip
CALLS: list[tuple[str, str]] = [
    ("temperature", f"'temperature'; {IN_PARAMS}(temperature=...)"),
    ("max_new_tokens", f"'max_new_tokens'; {IN_PARAMS}(max_tokens=...)"),
    ("image", "'image'; did you mean 'images'?"),
    ("sampling_params", "'sampling_params'; did you mean 'params'?"),
    ("cache_salt", "'cache_salt'; it belongs to Prompt: Prompt(..., cache_salt=...)"),
    ("max_num_seqs", "'max_num_seqs'; it belongs to EngineConfig: "
     "AsyncEngine.from_pretrained(..., max_num_seqs=...)"),
    ("qqq", "'qqq'"),
]  # fmt: skip
WRONG: list[Row] = [
    (SamplingParams, {"temperature": "0"}, "temperature",
     "temperature must be a number from 0 to 100, not '0'"),
    (SamplingParams, {"temperature": 500}, "temperature",
     "temperature must be a number from 0 to 100, not 500"),
    (SamplingParams, {"seed": "1"}, "seed", "seed must be an integer of 64 bits or None, not '1'"),
    (SamplingParams, {"stop": ["a"] * 65}, "stop", "stop must be at most 64 strings, not 65"),
    (SamplingParams, {"stop": ["a" * 1025]}, "stop",
     "stop must be a string or a list of strings of 1 to 1024 characters, not 1025"),
    (SamplingParams, {"stop": ""}, "stop",
     "stop must be a string or a list of strings of 1 to 1024 characters, not 0"),
    (SamplingParams, {"bad_words": [3]}, "bad_words",
     "bad_words must be a list of words, not int"),
    (SamplingParams, {"stop": ["a" * 1000] * 5}, "stop",
     "stop must be at most 4096 characters in all, not 5000"),
    (SamplingParams, {"stop": 3}, "stop",
     "stop must be a string, a list of strings, or None, not int"),
    (SamplingParams, {"bad_words": "no"}, "bad_words",
     "bad_words must be a list of words, or None, not str"),
    (SamplingParams, {"bad_words": [" "]}, "bad_words",
     "bad_words must be a list of words, and one of them is blank"),
    (SamplingParams, {"stop_token_ids": ["a"]}, "stop_token_ids",
     "stop_token_ids must be a list of token ids, which are integers, not str"),
    (SamplingParams, {"stop_token_ids": [1] * 1025}, "stop_token_ids",
     "stop_token_ids must be at most 1024 token ids, not 1025"),
    (SamplingParams, {"structured_outputs": {}}, "structured_outputs",
     "structured_outputs must be a StructuredOutputs or None, not dict"),
    (StructuredOutputs, {"regex": "a" * 2049}, "structured_outputs.regex",
     "structured_outputs.regex must be text of 1 to 2048 characters, not 2049"),
    (StructuredOutputs, {}, "structured_outputs",
     "structured_outputs must be exactly one of json, json_object, regex, choice and grammar, "
     "not none"),
    (StructuredOutputs, {"regex": "a", "json_object": True}, "structured_outputs",
     "structured_outputs must be exactly one of json, json_object, regex, choice and grammar, "
     "not regex and json_object"),
    (StructuredOutputs, {"regex": 3}, "structured_outputs.regex",
     "structured_outputs.regex must be text, not int"),
    (StructuredOutputs, {"regex": "\ud800"}, "structured_outputs.regex",
     "structured_outputs.regex must be text in Unicode, without lone surrogates"),
    (StructuredOutputs, {"json": nested(40)}, "structured_outputs.json",
     "structured_outputs.json must be nested at most 32 levels deep"),
    (StructuredOutputs, {"choice": []}, "structured_outputs.choice",
     "structured_outputs.choice must be 1 to 1000 texts, not 0"),
    (StructuredOutputs, {"grammar": "a\n" * 1001}, "structured_outputs.grammar",
     "structured_outputs.grammar must be at most 1000 lines, not 1001"),
    (EngineConfig, {"kv_cache_bytes": "4GiB"}, "kv_cache_bytes",
     "kv_cache_bytes must be a positive number of bytes, such as 4 << 30 (4 GiB), or None, "
     "not '4GiB'"),
    (EngineConfig, {"max_num_seqs": "64"}, "max_num_seqs",
     "max_num_seqs must be a positive integer, not '64'"),
    (EngineConfig, {"device": "tpu"}, "device",
     'device must be "auto", "cpu", "cuda" or "cuda:N", not \'tpu\''),
    (EngineConfig, {"media": {}}, "media", "media must be a MediaConfig, not {}"),
    (EngineConfig, {"trust_remote_code": "no"}, "trust_remote_code",
     "trust_remote_code must be True or False, not 'no'"),
]  # fmt: skip


@pytest.mark.parametrize("row", MISSPELT + WRONG, ids=lambda row: row[3][:60])
def test_options(row: Row) -> None:
    call, options, parameter, text = row
    with pytest.raises(InvalidRequestError) as caught:
        call(**options)
    assert (caught.value.parameter, str(caught.value)) == (parameter, text)


@pytest.mark.parametrize(("name", "text"), CALLS)
async def test_arguments_of_a_request(name: str, text: str) -> None:
    """Before anything else: the engine has not been started."""
    given: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidRequestError) as caught:
        engine().stream("hello", **given)
    assert (caught.value.parameter, str(caught.value)) == (name, f"stream() has no argument {text}")
    with pytest.raises(InvalidRequestError) as caught:
        await engine().generate("hello", **given)
    assert str(caught.value) == f"generate() has no argument {text}"


def test_the_classes_are_as_they_were() -> None:
    for kind in (EngineConfig, MediaConfig, SamplingParams, StructuredOutputs):
        assert [*inspect.signature(kind).parameters] == [*kind.__dataclass_fields__]
    for call in (AsyncEngine.generate, AsyncEngine.stream):
        names = [*inspect.signature(call).parameters]
        assert names[1:] == [
            *("prompt", "params", "images", "videos", "audios"),
            *("tools", "tool_choice", "chat_template_kwargs", "request_id", "priority"),
        ]
    assert inspect.iscoroutinefunction(AsyncEngine.generate)
    params = SamplingParams(seed=3, structured_outputs=StructuredOutputs(regex="a"))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params) == params
    positional: Any = SamplingParams
    with pytest.raises(TypeError, match="positional"):
        positional(0)


@pytest.mark.parametrize(
    ("word", "known", "text"),
    [
        ("--max-new-tokens", ["--max-tokens"], "; did you mean '--max-tokens'?"),
        ("serv", ["serve", "chat"], "; did you mean 'serve'?"),
        ("max_new_tokens", ["max_num_seqs"], ""),  # it is known what is meant, and not here
        ("serve" * 1000, ["serve"], ""),
    ],
)
def test_did_you_mean(word: str, known: list[str], text: str) -> None:
    assert did_you_mean(word, known) == text


NOT_STARTED = "the engine has not been started; use it inside 'async with'"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (EngineState.NEW, NOT_STARTED),
        (EngineState.STARTING, "the engine is still starting; await start() before it is used"),
        (EngineState.CLOSED, "the engine is closed, and is not started again; make a new one"),
    ],
)
def test_an_engine_that_does_not_serve(state: EngineState, text: str) -> None:
    lifecycle = EngineLifecycle(EngineConfig())
    lifecycle.state = state
    with pytest.raises(EngineClosedError) as caught:
        lifecycle.check_serving()
    assert str(caught.value) == text


def test_under_trio() -> None:
    new = engine()
    with pytest.raises(WrongLoopError) as caught:
        trio.run(new.start)
    assert str(caught.value) == (
        "an engine runs in an event loop of asyncio or uvloop, and there is none here; under trio, "
        "run it in a thread, as the blocking `Engine` does"
    )
    assert new.state is EngineState.NEW, "it can be started elsewhere"
    with pytest.raises(EngineClosedError, match=NOT_STARTED):
        trio.run(new.generate, "hello")
    with pytest.raises(EngineClosedError, match=NOT_STARTED):
        asyncio.run(new.generate("hello"))


@pytest.mark.parametrize(
    ("cuda", "count", "text"),
    [
        (None, 0, f"torch {torch.__version__} is built without CUDA; install a CUDA wheel of it"),
        ("13.0", 0, "torch finds no CUDA device; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ("13.0", 2, "torch finds 2 (cuda:0 to cuda:1)"),
    ],
)
def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, count: int, text: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ModelLoadError) as caught:
        find_device("cuda:7")
    assert str(caught.value) == f"device 'cuda:7' is not there: {text}, or use cpu"


@pytest.mark.parametrize("model", [None, 3, "", b"folder"])
@pytest.mark.parametrize("kind", [AsyncEngine, Engine])
def test_what_is_no_model(kind: Any, model: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a folder or a hub id") as caught:
        kind.from_pretrained(model)
    assert caught.value.parameter == "model"
