"""Answers of the Responses API: output items, and the events that tell how they grow."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar, cast
from uuid import uuid4

from aioengine.asgi.api.answers import PIECE, Answer, position_entry
from aioengine.asgi.api.asks import Ask
from aioengine.asgi.client_task import LongEvent
from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.responses.request import ResponseAsk
from aioengine.engine.detokenizer import TokenTexts
from aioengine.types import (
    CompletionOutput,
    Delta,
    FinishReason,
    Message,
    RequestOutput,
    Run,
    TokenLogprobs,
    ToolCallDelta,
)

__all__ = ["ResponseAnswer"]

FAILURES = {422: "invalid_image", 424: "failed_to_download_image", 429: "rate_limit_exceeded"}
"""HTTP status -> code of a failed response. There are few such codes; else it is the server's."""
Event = dict[str, Any]
Entries = Sequence[dict[str, Any]]
"""Log probabilities of some tokens, as JSON's objects."""


class OutputItem(ABC):
    """One item as it grows, at a place in the output."""

    prefix: ClassVar[str]
    """Of its id."""
    deltas: ClassVar[str]
    """Name of the events of its text, without their ends."""

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}{uuid4().hex}"
        self._place = {"output_index": index}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All that has come."""
        return "".join(self._texts)

    def value(self, status: str) -> dict[str, Any]:
        """The item as JSON's object."""
        return {"id": self.id, **self._fields(), "status": status}

    def opening(self) -> Iterator[Event]:
        """Write the events before its text."""
        item = self.value("in_progress")
        yield {"type": "response.output_item.added", **self._place, "item": item}

    def grow(self, text: str, entries: Entries = ()) -> Iterator[Event]:
        """Add text, and write its event if there is any."""
        if text:
            self._texts.append(text)
            yield {"type": f"{self.deltas}.delta", **self._text_place, "delta": text}

    def closing(self, status: str) -> Iterator[Event]:
        """Write the events behind its text."""
        item = self.value(status)
        yield self._long({"type": "response.output_item.done", **self._place, "item": item})

    @property
    def _text_place(self) -> dict[str, Any]:
        return {"item_id": self.id, **self._place}

    def _long(self, event: Event) -> Event:
        """The event, marked if it takes long to write."""
        return event

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """Fields of the item beside its id and status."""


class CallItem(OutputItem):
    """A call of a tool."""

    prefix = "fc_"
    deltas = "response.function_call_arguments"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call = {"call_id": call_id, "name": name}

    def closing(self, status: str) -> Iterator[Event]:
        """See `OutputItem`."""
        arguments = {"name": self._call["name"], "arguments": self.text}
        yield {"type": f"{self.deltas}.done", **self._text_place, **arguments}
        yield from super().closing(status)

    def _fields(self) -> dict[str, Any]:
        return {"type": "function_call", **self._call, "arguments": self.text}


class _PartItem(OutputItem):
    """An item whose text is a part of its own."""

    has_begun = False

    def opening(self) -> Iterator[Event]:
        """See `OutputItem`."""
        yield from super().opening()
        self.has_begun = True
        yield {"type": "response.content_part.added", **self._text_place, "part": self._part()}

    def closing(self, status: str) -> Iterator[Event]:
        """See `OutputItem`."""
        part = self._part()
        done = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self._long({"type": f"{self.deltas}.done", **self._text_place, **done})
        yield self._long({"type": "response.content_part.done", **self._text_place, "part": part})
        yield from super().closing(status)

    @property
    def _text_place(self) -> dict[str, Any]:
        return {**super()._text_place, "content_index": 0}

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [self._part()] if self.has_begun else []

    @abstractmethod
    def _part(self) -> dict[str, Any]:
        """The part as it is now."""


class ReasoningItem(_PartItem):
    """A stretch of what the model has thought, in its own words: there is no summary."""

    prefix = "rs_"
    deltas = "response.reasoning_text"

    def _fields(self) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": self._content}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class MessageItem(_PartItem):
    """A stretch of what the model has said, with the log probabilities of its tokens."""

    prefix = "msg_"
    deltas = "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._entries: list[dict[str, Any]] = []

    def grow(self, text: str, entries: Entries = ()) -> Iterator[Event]:
        """See `OutputItem`; tokens may come without text."""
        self._entries += entries
        event = next(super().grow(text), None)
        if event is None and entries:
            event = {"type": f"{self.deltas}.delta", **self._text_place, "delta": ""}
        if event is not None:
            yield {**event, "logprobs": list(entries)}

    def _fields(self) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": self._content}

    def _part(self) -> dict[str, Any]:
        entries = list(self._entries)
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": entries}

    def _long(self, event: Event) -> Event:
        return LongEvent(event) if len(self._entries) > PIECE else event


class ResponseAnswer(Answer):
    """A response, made by the same steps whether it is streamed or not: of deltas, or of one."""

    prefix = "resp_"
    has_named_events = True

    def __init__(self, model: str, texts: TokenTexts, ask: Ask) -> None:
        super().__init__(model, texts, ask)
        self._asked = cast("ResponseAsk", ask)
        self._num_top = ask.params.logprobs or 0
        self._piece = max(1, PIECE // (1 + self._num_top))
        """Positions that are written out at a time."""
        self._num_events = 0
        self._items: list[OutputItem] = []
        """The last of them may grow."""
        self._key: tuple[str, int] | None = None
        """Kind and call of that one."""
        self._positions: deque[TokenLogprobs] = deque()
        """Log probabilities of tokens that belong to no run yet."""
        self._whole: dict[str, Any] | None = None

    async def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `Answer`."""
        if not self._num_events:
            for _ in self.chunks(0, _as_delta(outputs[0].outputs[0])):
                await asyncio.sleep(0)  # thousands of log probabilities take long
        return self._finish(outputs[0])

    def chunks(self, number: int, delta: Delta) -> Iterator[Event]:
        """See `Answer`."""
        if not self._num_events:
            response = self._response("in_progress")
            yield self._numbered({"type": "response.created", "response": response})
            yield self._numbered({"type": "response.in_progress", "response": response})
        self._positions += delta.logprobs or ()
        for event in self._growth(delta):
            yield self._numbered(event)

    def ending(self, outputs: Sequence[RequestOutput]) -> Iterator[Event]:
        """See `Answer`."""
        response = self._finish(outputs[0])
        for event in self._items[-1].closing(response["status"]):
            yield self._numbered(event)
        end = {"type": f"response.{response['status']}", "response": response}
        yield self._numbered(end if self._ask.params.logprobs is None else LongEvent(end))

    def failure(self, error: ApiError) -> Iterator[Event]:
        """See `Answer`: the error by itself, and the response that has failed."""
        fields = {"code": error.code, "message": error.message, "param": error.parameter}
        yield self._numbered({"type": "error", **fields})
        code = FAILURES.get(error.status, "server_error")
        response = self._response(
            "failed",
            error={"code": code, "message": error.message},
            output=self._output("incomplete"),
        )
        yield self._numbered(LongEvent(type="response.failed", response=response))

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return event

    def _growth(self, delta: Delta) -> Iterator[Event]:
        """Write what a delta adds, run by run; it may have many of the same item in a row."""
        texts = {"content": delta.content, "reasoning": delta.reasoning}
        calls = _joined(delta.tool_calls)
        for key, runs in groupby(delta.runs, key=lambda run: (run.kind, run.call)):
            kind, number = key
            size, count = _sums(runs)
            # There are none where they were not asked for.
            positions = [self._positions.popleft() for _ in range(min(count, len(self._positions)))]
            if number and not self._asked.echoed["parallel_tool_calls"]:
                continue
            if key != self._key:
                yield from self._begin(key, calls.get(number))
            if kind == "call":
                call = calls.pop(number, None)
                yield from self._items[-1].grow(call.arguments if call else "")
                continue
            text, texts[kind] = texts[kind][:size], texts[kind][size:]
            if kind == "reasoning":
                yield from self._items[-1].grow(text)
                continue
            for start in range(0, max(1, len(positions)), self._piece):
                piece = positions[start : start + self._piece]
                entries = [position_entry(self._texts, each, self._num_top) for each in piece]
                yield from self._items[-1].grow("" if start else text, entries)
        if delta.finish_reason is not None and not self._items:
            yield from self._begin(("content", 0), None)  # it has said nothing

    def _begin(self, key: tuple[str, int], call: ToolCallDelta | None) -> Iterator[Event]:
        """End the item that grows, and begin the next."""
        if self._items:
            yield from self._items[-1].closing("completed")
        index, kind = len(self._items), key[0]
        if kind == "call":
            assert call is not None
            item: OutputItem = CallItem(index, str(call.id), str(call.name))
        else:
            item = MessageItem(index) if kind == "content" else ReasoningItem(index)
        self._items.append(item)
        self._key = key
        yield from item.opening()

    def _output(self, status: str) -> list[dict[str, Any]]:
        """All items, the last of which has this status."""
        last = len(self._items) - 1
        return [
            item.value(status if index == last else "completed")
            for index, item in enumerate(self._items)
        ]

    def _finish(self, output: RequestOutput) -> dict[str, Any]:
        """The response when all has come."""
        if self._whole is None:
            completion = output.outputs[0]
            is_cut = completion.finish_reason is FinishReason.LENGTH
            status = "incomplete" if is_cut else "completed"
            self._whole = self._response(
                status,
                completed_at=None if is_cut else int(time.time()),
                incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
                output=self._output(status),
                usage=_usage(output),
            )
        return self._whole

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            **self._asked.echoed,
            "store": self._asked.is_kept,
            "output": [],
            "usage": None,
            **fields,
        }


def _as_delta(output: CompletionOutput) -> Delta:
    """A whole completion as the one delta of a stream."""
    said = output.message or Message(output.text)
    calls = (
        ToolCallDelta(index, call.id, call.name, call.arguments)
        for index, call in enumerate(said.tool_calls)
    )
    return Delta(
        index=0,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        content=said.content,
        reasoning=said.reasoning,
        tool_calls=tuple(calls),
        runs=output.runs,
    )


def _joined(calls: Iterable[ToolCallDelta]) -> dict[int, ToolCallDelta]:
    """Number of a call -> all that a delta adds to it."""
    found: dict[int, list[ToolCallDelta]] = {}
    for call in calls:
        found.setdefault(call.index, []).append(call)
    return {
        index: ToolCallDelta(
            index, added[0].id, added[0].name, "".join(each.arguments for each in added)
        )
        for index, added in found.items()
    }


def _sums(runs: Iterable[Run]) -> tuple[int, int]:
    """Characters and tokens of some runs."""
    size = count = 0
    for run in runs:
        size, count = size + run.size, count + run.num_tokens
    return size, count


def _usage(output: RequestOutput) -> dict[str, Any]:
    usage = output.usage
    runs = output.outputs[0].runs
    num_thought = sum(run.num_tokens for run in runs if run.kind == "reasoning")
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
