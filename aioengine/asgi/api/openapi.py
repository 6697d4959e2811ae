"""openapi.json: the endpoints there are, and their fields, for machines that read OpenAPI 3.1.

The tables of fields say what a request has: a refused field may only have a value that asks for
nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Route

from aioengine.asgi.api.anthropic_prompt import BLOCK_FIELDS, TOOL
from aioengine.asgi.api.chat import FUNCTION, PARTS
from aioengine.asgi.api.fields import (
    ANTHROPIC,
    BATCH_LIST,
    BATCHES,
    BLOCKS,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    FILE_LIST,
    FILES,
    KEPT_RESPONSE,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    TRANSCRIPTIONS,
    Field,
    Fields,
    Handling,
)
from aioengine.asgi.model_facts import version
from aioengine.sampling_params import SamplingParams

__all__ = ["TABLES", "document"]

JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
TYPES: Mapping[str, tuple[str, ...]] = {
    "array": ("messages", "tools", "tokens", "stop_sequences"),
    "object": (
        *("stream_options", "structured_outputs", "response_format", "mm_processor_kwargs"),
        *("chat_template_kwargs", "output_config", "thinking", "metadata", "logit_bias"),
    ),
    "integer": ("limit",),
    "boolean": (
        *("stream", "parallel_tool_calls", "echo", "return_token_strs", "add_special_tokens"),
    ),
    "string": ("model", "cache_salt", "user", "reasoning_effort", "after", "order"),
}
"""Types of fields that are no SamplingParams'."""


class Operation(NamedTuple):
    """Words about an endpoint, and the fields of its body, of which `required` have to be given;
    `query`: those of its URL."""

    summary: str
    fields: Fields | None = None
    required: tuple[str, ...] = ()
    media_type: str = "application/json"
    query: Fields = MappingProxyType({})


OPERATIONS: Mapping[str, Operation] = {
    "POST /chat/completions": Operation("Answer a conversation", CHAT, ("messages",)),
    "POST /completions": Operation("Go on with prompts", COMPLETIONS, ("prompt",)),
    "POST /responses": Operation("Answer items with items", RESPONSES, ("input",)),
    "GET /responses/{response_id}": Operation("A response that the host keeps"),
    "DELETE /responses/{response_id}": Operation("Delete a response that the host keeps"),
    "POST /audio/transcriptions": Operation(
        "Write down speech", TRANSCRIPTIONS, ("file",), "multipart/form-data"
    ),
    "POST /messages": Operation(
        "Answer a conversation, in Anthropic's form", ANTHROPIC, ("messages", "max_tokens")
    ),
    "POST /messages/count_tokens": Operation(
        "Count a conversation's tokens", ANTHROPIC, ("messages",)
    ),
    "POST /embeddings": Operation("Embeddings of prompts", EMBEDDINGS),
    "POST /score": Operation("Scores of texts for a text", SCORE, ("text_1", "text_2")),
    "POST /rerank": Operation("Documents by their scores", RERANK, ("query", "documents")),
    "POST /tokenize": Operation("Tokens of a prompt or a conversation", TOKENIZE),
    "POST /detokenize": Operation("Text of tokens", DETOKENIZE, ("tokens",)),
    "POST /files": Operation(
        "Keep a file of requests", FILES, ("file", "purpose"), "multipart/form-data"
    ),
    "GET /files": Operation("List the files", query=FILE_LIST),
    "GET /files/{name}": Operation("Describe a file"),
    "DELETE /files/{name}": Operation("Delete a file"),
    "GET /files/{name}/content": Operation("Bytes of a file"),
    "POST /batches": Operation(
        "Begin a batch", BATCHES, ("input_file_id", "endpoint", "completion_window")
    ),
    "GET /batches": Operation("List the batches", query=BATCH_LIST),
    "GET /batches/{name}": Operation("Describe a batch"),
    "POST /batches/{name}/cancel": Operation("End a batch"),
    "GET /models": Operation("List what is served"),
    "GET /models/{name}": Operation("Describe what is served under a name"),
    "GET /openapi.json": Operation("This document"),
    "GET /health": Operation("State of the engine: 200 while it takes requests, else 503"),
    "GET /metrics": Operation("Figures for Prometheus"),
}
TABLES: Mapping[str, Fields] = {
    "chat/completions": CHAT,
    "chat/completions: messages": MESSAGES,
    "chat/completions: parts of messages": {
        name: field for fields in PARTS.values() for name, field in fields.items()
    },
    "chat/completions: functions of tools": FUNCTION,
    "completions": COMPLETIONS,
    "audio/transcriptions": TRANSCRIPTIONS,
    "messages": ANTHROPIC,
    "messages: blocks": BLOCKS,
    "messages: fields of blocks": {
        name: field for fields in BLOCK_FIELDS.values() for name, field in fields.items()
    },
    "messages: tools": TOOL,
    "embeddings": EMBEDDINGS,
    "score": SCORE,
    "rerank": RERANK,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
    "files": FILES,
    "files: query of the list": FILE_LIST,
    "batches": BATCHES,
    "batches: query of the list": BATCH_LIST,
    "responses": RESPONSES,
    "responses: query of a kept one": KEPT_RESPONSE,
}
"""The tables that docs/list_fields.py writes down."""
OPEN = ("/health",)
"""Paths that need no key."""
CONVERTER = re.compile(r"{(\w+):\w+}")


def document(routes: Iterable[BaseRoute], root: str, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of routes below `root`, as JSON's objects."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"error": _error_schema()}
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = CONVERTER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            about = OPERATIONS.get(f"{method} {path}", Operation(path))
            name = _name(method, path)
            operation = _operation(name, path, about)
            if about.fields is not None:
                schemas[name] = _body_schema(about)
            if needs_key and path in OPEN:
                operation["security"] = []
            paths.setdefault(path, {})[method.lower()] = operation
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "aioengine", "version": version() or "source"},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
        "security": [{name: []} for name in schemes] if needs_key else [],
    }


def _name(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _operation(name: str, path: str, about: Operation) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/error"}}
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": about.summary,
        "responses": {
            "200": {"description": "The answer"},
            "default": {"description": "An error", "content": {"application/json": error}},
        },
    }
    if about.fields is not None:
        schema = {"$ref": f"#/components/schemas/{name}"}
        content = {about.media_type: {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
        if "stream" in about.fields:
            answer: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
            operation["responses"]["200"]["content"] = answer
    places = re.findall(r"{(\w+)}", path)
    parameters = [
        {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
        for each in places
    ]
    parameters += [
        {"name": name, "in": "query", "schema": _schema(name, field)}
        for name, field in about.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation


def _body_schema(about: Operation) -> dict[str, Any]:
    assert about.fields is not None
    return {
        "type": "object",
        "properties": {name: _schema(name, field) for name, field in about.fields.items()},
        "required": list(about.required),
        "additionalProperties": False,
    }


def _schema(name: str, field: Field) -> dict[str, Any]:
    """The schema of a field: null is as good as nothing for each."""
    if field.handling is Handling.REFUSED:
        return {"description": f"refused: {field.note}", "enum": [*field.neutral, None]}
    note = field.note if field.handling is Handling.DONE else f"ignored: {field.note}"
    schema: dict[str, Any] = {"description": note} if note else {}
    if field.handling is Handling.DONE and (kind := _type(name)) is not None:
        schema["type"] = [kind, "null"]
    return schema


def _type(name: str) -> str | None:
    """JSON's type of a field, where it has one alone."""
    for each in fields(SamplingParams):
        if each.name == name:
            return JSON_TYPES.get(str(each.type).removesuffix(" | None"))
    return next((kind for kind, names in TYPES.items() if name in names), None)


def _error_schema() -> dict[str, Any]:
    error = {"type": "object", "properties": {"message": {"type": "string"}}}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
