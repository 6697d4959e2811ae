"""Answers in the shapes that clients expect: what kinds of answers have in common."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from aioengine.asgi.api.asks import Ask
from aioengine.asgi.error_responses import ApiError
from aioengine.engine.detokenizer import TokenTexts
from aioengine.types import CompletionOutput, Delta, RequestOutput, TokenLogprobs

__all__ = ["PIECE", "Answer", "ChoicesAnswer", "finite", "most_probable", "position_entry"]

PIECE = 128
"""Log probabilities that are written out at a time: 3 ms where each token is new."""


class Answer(ABC):
    """One HTTP answer, made of the outputs and deltas of one or more requests."""

    prefix: ClassVar[str]
    """Of its id."""
    has_named_events: ClassVar[bool] = False
    """Events of a stream are named by their `type`, and no `[DONE]` ends them."""

    def __init__(self, model: str, texts: TokenTexts, ask: Ask) -> None:
        self.id = f"{self.prefix}{uuid4().hex}"
        self.model = model
        self.created = int(time.time())
        self._texts = texts
        self._ask = ask

    @abstractmethod
    async def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def chunks(self, number: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """Write the events of a delta of the request `number`."""

    @abstractmethod
    def ending(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """Write the events behind the last delta."""

    def failure(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Write the last events of a stream that cannot go on."""
        yield error.body


class ChoicesAnswer(Answer):
    """Answers of one or more choices, as OpenAI's completions are.

    Its choices come from one or more requests of `n` completions each.
    """

    whole: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(self, model: str, texts: TokenTexts, ask: Ask) -> None:
        super().__init__(model, texts, ask)
        self._head = {"created": self.created, "model": model}
        self._no_usage = {"usage": None} if ask.wants_usage else {}
        """Of all chunks but the last, for those who asked for usage."""
        self._num_logprobs = ask.params.logprobs or 0
        self._piece = max(1, PIECE // (1 + self._num_logprobs))
        """Positions that are written out at a time."""
        self._begun: set[int] = set()

    async def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `Answer`."""
        choices = [
            {
                "index": self._index(number, output.index),
                **self._content(output),
                "logprobs": await self._all_logprobs(number, output),
                "stop_reason": output.stop_reason,
            }
            for number, request in enumerate(outputs)
            for output in request.outputs
        ]
        usage = _usage(outputs)
        return {"id": self.id, "object": self.whole, **self._head, "choices": choices, **usage}

    def chunks(self, number: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """See `Answer`; half a character adds nothing yet.

        A delta of many tokens with logprobs, as a slow reader gets, makes several chunks.
        """
        index, positions = self._index(number, delta.index), delta.logprobs
        if index not in self._begun:
            self._begun.add(index)
            yield from (self._chunk([{"index": index, **first}]) for first in self._first())
        if self._is_empty(delta) and not positions and delta.finish_reason is None:
            return
        count = len(positions or ())
        added = self._addition(index, delta)
        for start in range(0, max(1, count), self._piece):
            is_last = start + self._piece >= count
            piece = None if positions is None else positions[start : start + self._piece]
            choice = {
                "index": index,
                **(added if start == 0 else self._rest()),
                "logprobs": None if piece is None else self._logprobs(index, piece),
                "finish_reason": added["finish_reason"] if is_last else None,
            }
            yield self._chunk([choice])

    def ending(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """See `Answer`: usage, for those who asked for it."""
        if self._ask.wants_usage:
            yield self._chunk([]) | _usage(outputs)

    def _index(self, number: int, index: int) -> int:
        return number * self._ask.params.n + index

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": self.chunk, **self._head}
        return {**head, "choices": choices, **self._no_usage}

    async def _all_logprobs(self, number: int, output: CompletionOutput) -> dict[str, Any] | None:
        """Piece by piece, so that thousands of tokens do not hold the loop."""
        if output.logprobs is None:
            return None
        index = self._index(number, output.index)
        whole = self._logprobs(index, ())
        for start in range(0, len(output.logprobs), self._piece):
            piece = self._logprobs(index, output.logprobs[start : start + self._piece])
            for name, values in piece.items():
                if values:
                    whole[name] += values
            await asyncio.sleep(0)
        return whole

    def _first(self) -> Iterable[dict[str, Any]]:
        """The choices of the chunks that come before a completion's text."""
        return ()

    @abstractmethod
    def _content(self, output: CompletionOutput) -> dict[str, Any]:
        """Fields of a finished completion, its reason to end among them."""

    @abstractmethod
    def _addition(self, index: int, delta: Delta) -> dict[str, Any]:
        """Fields of a chunk of what a delta adds, its reason to end among them."""

    @abstractmethod
    def _rest(self) -> dict[str, Any]:
        """Fields of a chunk that only has log probabilities."""

    @abstractmethod
    def _is_empty(self, delta: Delta) -> bool:
        """Return whether a delta adds nothing to the text."""

    @abstractmethod
    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The log probabilities of the next positions of a completion; lists, or None."""


def position_entry(texts: TokenTexts, position: TokenLogprobs, num_top: int) -> dict[str, Any]:
    """Log probabilities of one position, the token's own and those of the most probable."""
    entries = [
        {
            "token": texts.text(token_id),
            "logprob": finite(found.logprob),
            "bytes": texts.utf8(token_id),
        }
        for token_id, found in position.items()
    ]
    top = most_probable(zip(position.values(), entries, strict=True), num_top)
    return {**entries[0], "top_logprobs": top}


def most_probable(entries: Iterable[tuple[Any, Any]], count: int) -> list[Any]:
    """Choose from `(Logprob, its entry)` pairs the entries of the `count` most probable, in
    order."""
    ranked = sorted((found.rank, number, said) for number, (found, said) in enumerate(entries))
    return [said for rank, _, said in ranked if rank <= count]


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says so much for what is next to impossible."""
    return max(logprob, -9999.0)


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    usages = [output.usage for output in outputs]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    runs = (run for request in outputs for output in request.outputs for run in output.runs)
    num_thought = sum(run.num_tokens for run in runs if run.kind == "reasoning")
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": num_thought},
        }
    }
