"""What tests of the Responses API have in common: reading events, and a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Store:
    """Keeps responses in a dict."""

    def __init__(self) -> None:
        self.records: dict[str, Mapping[str, Any]] = {}

    async def save(self, response_id: str, record: Mapping[str, Any]) -> None:
        self.records[response_id] = record

    async def load(self, response_id: str) -> Mapping[str, Any] | None:
        return self.records.get(response_id)

    async def delete(self, response_id: str) -> None:
        self.records.pop(response_id, None)


def added_up(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The response that events end with, after a look at whether those before add up to it."""
    output: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    read = [*events]
    for number, event in enumerate(read):
        EVENTS.validate_python(event, strict=True)
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if "item_id" in event:
            assert event["output_index"] == len(output) - 1 == len(done)
            assert event["item_id"] == output[-1]["id"]
        if kind == "output_item.added":
            assert event["item"]["status"] == "in_progress" and len(output) == len(done)
            output.append(event["item"])
        elif kind == "output_item.done":
            assert event["output_index"] == len(done)
            done.append(event["item"])
            assert {**output[-1], "status": event["item"]["status"]} == event["item"]
        elif kind == "content_part.added":
            output[-1]["content"].append(event["part"])
        elif kind == "content_part.done":
            assert output[-1]["content"][event["content_index"]] == event["part"]
        elif kind.endswith(".delta"):
            grown = output[-1]["content"][0] if "content" in output[-1] else output[-1]
            grown["text" if "text" in grown else "arguments"] += event["delta"]
            if "logprobs" in event:
                grown["logprobs"] += event["logprobs"]
            assert event["delta"] or event["logprobs"]
        elif kind.endswith(("text.done", "arguments.done")):
            grown = output[-1]["content"][0] if "content" in output[-1] else output[-1]
            for key in {"text", "arguments", "logprobs"} & event.keys():
                assert event[key] == grown[key]
    names = [event["type"] for event in read]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert read[0]["response"]["status"] == "in_progress" and not read[0]["response"]["output"]
    response: dict[str, Any] = read[-1]["response"]
    assert names[-1] == f"response.{response['status']}"
    assert response["output"] == done
    Response.model_validate(response, strict=True)
    return response


def without_ids(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response as another answer to the same request has it."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    own = ("id", "created_at", "completed_at")
    return {name: value for name, value in response.items() if name not in own} | {"output": output}


def said(response: Any) -> list[tuple[str, str]]:
    """Kinds of the output's items, and their texts."""
    found: list[tuple[str, str]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        else:
            parts: Sequence[Any] = item.content
            found.append((item.type, "".join(part.text for part in parts)))
    return found
