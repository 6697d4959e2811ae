"""Every field that the installed clients know has its place in the API's tables."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.shared_params
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.audio import transcription_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_retrieve_params
from starlette.routing import Route

from aioengine import AsyncEngine
from aioengine.asgi import openai_app
from aioengine.asgi.api.fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Handling, known
from aioengine.asgi.api.openapi import TABLES
from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.renderer import EMPTY_KEYS, KEYS

PARAMS: dict[str, Any] = {
    "chat/completions": chat_create_params.CompletionCreateParams,
    "completions": completion_create_params.CompletionCreateParams,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
    "audio/transcriptions": transcription_create_params.TranscriptionCreateParams,
    "responses: query of a kept one": response_retrieve_params.ResponseRetrieveParamsStreaming,
    "files: query of the list": openai.types.FileListParams,
    "batches: query of the list": openai.types.BatchListParams,
    "responses": response_create_params.ResponseCreateParams,
    "chat/completions: parts of messages": (
        openai.types.chat.ChatCompletionContentPartTextParam
        | openai.types.chat.ChatCompletionContentPartImageParam
        | openai.types.chat.ChatCompletionContentPartInputAudioParam
    ),
    "chat/completions: functions of tools": openai.types.shared_params.FunctionDefinition,
    "messages: fields of blocks": (
        anthropic.types.TextBlockParam
        | anthropic.types.ImageBlockParam
        | anthropic.types.ToolUseBlockParam
        | anthropic.types.ToolResultBlockParam
        | anthropic.types.ThinkingBlockParam
        | anthropic.types.RedactedThinkingBlockParam
    ),
    "messages: tools": anthropic.types.ToolParam,
    "chat/completions: messages": openai.types.chat.ChatCompletionMessageParam,
}


def fields_of(params: Any) -> set[str]:
    """Names of the fields of a TypedDict, or of all those of a union."""
    if get_origin(params) in (Union, types.UnionType):
        return set().union(*map(fields_of, get_args(params)))
    return {*get_type_hints(params)}


@pytest.mark.parametrize("name", PARAMS)
def test_every_field_of_the_clients_types_is_known(name: str) -> None:
    fields = fields_of(PARAMS[name])
    assert fields and not fields - TABLES[name].keys()


def test_messages_are_read_as_the_table_says() -> None:
    kinds = {name: field.handling for name, field in MESSAGES.items()}
    assert {name for name, kind in kinds.items() if kind is Handling.DONE} <= {*KEYS}
    assert {name for name, kind in kinds.items() if kind is Handling.REFUSED} == {*EMPTY_KEYS}


def refusals() -> Iterator[tuple[str, str]]:
    for name, fields in TABLES.items():
        for field, found in fields.items():
            if found.handling is Handling.REFUSED:
                yield name, field


@pytest.mark.parametrize(("name", "field"), [*refusals()])
def test_what_is_refused_says_why(name: str, field: str) -> None:
    found = TABLES[name][field]
    assert found.note
    with pytest.raises(InvalidRequestError) as caught:
        known({field: "something"}, TABLES[name])
    assert caught.value.parameter == field
    assert str(caught.value) == f"{field} is not supported: {found.note}"
    for value in (None, *found.neutral):
        assert known({field: value}, TABLES[name]) == {}


def test_what_is_ignored_says_why() -> None:
    for fields in TABLES.values():
        for name, found in fields.items():
            if found.handling is Handling.IGNORED:
                assert found.note and known({name: "something"}, fields) == {}


def test_what_is_unknown_is_refused_with_what_was_meant() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'tools'"):
        known({"tool": []}, CHAT)
    with pytest.raises(InvalidRequestError, match="'echoes' is not a field"):
        known({"echoes": True}, COMPLETIONS)
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(InvalidRequestError, match="give max_output_tokens"):
            known({name: 3}, RESPONSES)


def test_every_table_is_of_an_endpoint() -> None:
    app = openai_app(AsyncEngine.from_pretrained("some/model"))
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert {f"/{name.partition(':')[0]}" for name in TABLES} <= paths
