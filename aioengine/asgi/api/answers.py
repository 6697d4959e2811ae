"""Results in OpenAI's shape: chat completions and text completions, whole and in chunks."""

from __future__ import annotations

import asyncio
import codecs
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from aioengine.engine.detokenizer import TokenTexts
from aioengine.types import CompletionOutput, Delta, RequestOutput, TokenLogprobs

__all__ = ["Answer", "ChatAnswer", "TextAnswer"]

PIECE = 128
"""Log probabilities that are written out at a time: 3 ms where each token is new."""


class Answer(ABC):
    """One HTTP answer, whose choices come from one or more requests of `n` completions each."""

    whole: ClassVar[str]
    chunk: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, model: str, texts: TokenTexts, *, n: int, num_logprobs: int | None) -> None:
        self.id = f"{self.prefix}-{uuid4().hex}"
        self._head = {"created": int(time.time()), "model": model}
        self._texts = texts
        self._n = n
        self._num_logprobs = num_logprobs or 0
        self._piece = max(1, PIECE // (1 + self._num_logprobs))
        """Positions that are written out at a time."""
        self._begun: set[int] = set()

    async def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": number * self._n + output.index,
                **self._content(output.text),
                "logprobs": await self._all_logprobs(number, output),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            for number, request in enumerate(outputs)
            for output in request.outputs
        ]
        usage = _usage(outputs)
        return {"id": self.id, "object": self.whole, **self._head, "choices": choices, **usage}

    def chunks(self, number: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """Write what a delta of the request `number` adds; half a character adds nothing yet.

        A delta of many tokens with logprobs, as a slow reader gets, makes several chunks.
        """
        index, positions = number * self._n + delta.index, delta.logprobs
        if index not in self._begun:
            self._begun.add(index)
            yield from (self._chunk([{"index": index, **first}]) for first in self._first())
        if not (delta.text or positions or delta.finish_reason is not None):
            return
        count = len(positions or ())
        for start in range(0, max(1, count), self._piece):
            is_last = start + self._piece >= count
            piece = None if positions is None else positions[start : start + self._piece]
            choice = {
                "index": index,
                **self._addition(delta.text if start == 0 else ""),
                "logprobs": None if piece is None else self._logprobs(index, piece),
                "finish_reason": delta.finish_reason if is_last else None,
            }
            yield self._chunk([choice])

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last chunk, for those who asked for it."""
        return self._chunk([]) | _usage(outputs)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": self.chunk, **self._head, "choices": choices}

    async def _all_logprobs(self, number: int, output: CompletionOutput) -> dict[str, Any] | None:
        """Piece by piece, so that thousands of tokens do not hold the loop."""
        if output.logprobs is None:
            return None
        index = number * self._n + output.index
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
    def _content(self, text: str) -> dict[str, Any]:
        """Field of a finished completion that has its text."""

    @abstractmethod
    def _addition(self, text: str) -> dict[str, Any]:
        """Field of a chunk that has its text."""

    @abstractmethod
    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The log probabilities of the next positions of a completion; lists, or None."""


class ChatAnswer(Answer):
    """chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _first(self) -> Iterable[dict[str, Any]]:
        return ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None},)

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _addition(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._position(position) for position in positions], "refusal": None}

    def _position(self, position: TokenLogprobs) -> dict[str, Any]:
        entries = [
            {
                "token": self._texts.text(token_id),
                "logprob": _finite(found.logprob),
                "bytes": self._texts.utf8(token_id),
            }
            for token_id, found in position.items()
        ]
        top = _most_probable(zip(position.values(), entries, strict=True), self._num_logprobs)
        return {**entries[0], "top_logprobs": top}


class TextAnswer(Answer):
    """completions."""

    whole = chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._offsets: Counter[int] = Counter()
        new_reader = partial(codecs.getincrementaldecoder("utf-8"), "replace")
        self._readers: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(new_reader)

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _addition = _content

    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens, chosen, top, offsets = [], [], [], []
        for position in positions:
            texts = [self._texts.text(token_id) for token_id in position]
            found = list(position.values())
            tokens.append(texts[0])
            chosen.append(_finite(found[0].logprob))
            named = [(text, _finite(each.logprob)) for text, each in zip(texts, found, strict=True)]
            best = _most_probable(zip(found, named, strict=True), self._num_logprobs)
            top.append(dict([*best, named[0]]))  # the sampled token is always among them
            offsets.append(self._offsets[index])
            token_id = next(iter(position))
            if not self._texts.is_special(token_id):
                # Characters that are whole: a token may be a part of one.
                fresh = self._readers[index].decode(bytes(self._texts.utf8(token_id)))
                self._offsets[index] += len(fresh)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _most_probable(entries: Iterable[tuple[Any, Any]], count: int) -> list[Any]:
    """Choose from `(Logprob, its entry)` pairs the entries of the `count` most probable, in
    order."""
    ranked = sorted((found.rank, number, said) for number, (found, said) in enumerate(entries))
    return [said for rank, _, said in ranked if rank <= count]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says so much for what is next to impossible."""
    return max(logprob, -9999.0)


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    usages = [output.usage for output in outputs]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    }
