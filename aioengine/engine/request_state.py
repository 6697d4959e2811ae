"""One request as its caller sees it: the stream it feeds, its completions so far, its times.

A request of n completions is n requests to the scheduler, which share all that they can.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioengine.core.plan import Advance
from aioengine.core.request import Request
from aioengine.engine.detokenizer import Addition, Detokenizer, MessageReader, Piece
from aioengine.sampling_params import SamplingParams
from aioengine.streams.tokens import TokenSink
from aioengine.types import (
    CompletionOutput,
    Delta,
    FinishReason,
    RequestOutput,
    Timings,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from aioengine.media_pipeline.items import IdentifiedMedia
    from aioengine.processors.cache.memory import Lease
    from aioengine.processors.chat.renderer import ChatPrompt
    from aioengine.processors.processor import Layout
    from aioengine.sampling.logprobs import PromptLogprobs, ScoreColumns
    from aioengine.sampling.pooling import Pooling

__all__ = ["CompletionState", "RequestState"]


@dataclass(slots=True)
class CompletionState:
    """One of a request's completions, as it grows."""

    index: int
    request: Request
    params: SamplingParams
    detokenizer: Detokenizer | None = None
    reader: MessageReader | None = None
    """Of an answer to messages."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def take(self, advance: Advance, logprobs: TokenLogprobs | None) -> Delta:
        """Append one accepted token and return the delta."""
        reason = advance.finish_reason
        text, stop, marked = self._text(advance, reason)
        self.stop_reason = advance.stop_reason
        if stop is not None:
            reason, self.stop_reason = FinishReason.STOP, stop
        self.finish_reason = reason
        if logprobs is not None:
            self.logprobs.append(logprobs)
        scores = None if logprobs is None else (logprobs,)
        added = Addition()
        if self.reader is not None:
            added = self.reader.add(marked, is_end=reason is not None)
        return Delta(self.index, text, (advance.token_id,), scores, reason, *added)

    def output(self) -> CompletionOutput:
        """All of it."""
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=tuple(self.request.output_token_ids),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            message=None if self.reader is None else self.reader.message,
            runs=() if self.reader is None else self.reader.runs,
        )

    def _text(self, advance: Advance, reason: FinishReason | None) -> Piece:
        """The new text, and the stop string that ended it."""
        if self.detokenizer is None:
            return Piece("")
        ends_in_token = reason is FinishReason.STOP and not self.params.include_stop_str_in_output
        added = Piece("") if ends_in_token else self.detokenizer.add(advance.token_id)
        if reason is None or added.stop is not None:
            return added
        held = self.detokenizer.flush()
        return Piece(added.text + held.text, None, added.marked + held.marked)


class RequestState:
    """A live request on the engine's floor. Ends exactly once: `finish` or `fail`."""

    def __init__(
        self,
        request_id: str,
        sink: TokenSink,
        params: SamplingParams,
        *,
        priority: int,
        pooling: Pooling | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.priority = priority
        self.pooling = pooling
        """Of one that ends with its prompt; how long that is, its core request's knows."""
        self.media: tuple[IdentifiedMedia, ...] = ()
        self.lease: Lease | None = None
        """Holds features that nothing could make again."""
        self.layout: Layout | None = None
        self.chat: ChatPrompt | None = None
        """The conversation that it goes on with."""
        self.num_encoder_tokens = 0
        """Of text that an encoder reads for cross-attention."""
        self.completions: dict[str, CompletionState] = {}
        """By the scheduler's name for each."""
        self.preparation: asyncio.Task[None] | None = None
        self.has_ended = False
        self.output: RequestOutput | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._pooled: Any = None
        self._sink = sink
        self._submitted = time.perf_counter()
        self._times: dict[str, float] = {}

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of an admitted request, those that an encoder reads among them."""
        request = next(iter(self.completions.values())).request
        return len(request.prompt_token_ids) + self.num_encoder_tokens

    @property
    def num_media(self) -> Counter[str]:
        """Return how many items it has of each modality."""
        return Counter(media.modality for media in self.media)

    def stamp(self, stage: str) -> None:
        """Note that the stage is complete, as far as one knows now."""
        self._times[stage] = time.perf_counter() - self._submitted

    def admit(self) -> None:
        """The scheduler has taken all completions."""
        self.stamp("admitted")
        self._sink.admit()

    def media_with(self, key: str) -> IdentifiedMedia:
        """The first of its items with this content key."""
        return next(media for media in self.media if media.key == key)

    def note_prompt(self, first: int, scores: ScoreColumns) -> None:
        """Log probabilities of prompt tokens, from position `first` on."""
        if self._prompt_logprobs is None:
            length = len(next(iter(self.completions.values())).request.prompt_token_ids)
            self._prompt_logprobs = scores.blank(length)
        self._prompt_logprobs.put(first, scores)

    def note_pooled(self, first: int, part: Any) -> None:
        """Add what a step has pooled from position `first` on; once preempted, all comes anew."""
        part = part.astype("float64")
        self._pooled = part if first == 0 or self._pooled is None else self._pooled + part

    def deliver(self, advance: Advance, logprobs: TokenLogprobs | None) -> bool:
        """Turn an accepted token into a delta. Returns whether its completion has ended."""
        completion = self.completions[advance.request_id]
        if self.pooling is not None:
            completion.finish_reason = advance.finish_reason
            self._finish()
            return True
        self._times.setdefault("first_token", time.perf_counter() - self._submitted)
        delta = completion.take(advance, logprobs)
        self._sink.push(delta)
        if all(c.finish_reason is not None for c in self.completions.values()):
            self._finish()
        return delta.finish_reason is not None

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        assert not self.has_ended
        self.has_ended = True
        self._sink.fail(error)

    def _finish(self) -> None:
        """End well."""
        assert not self.has_ended
        self.has_ended = True
        self.stamp("finished")
        completions = list(self.completions.values())
        request = completions[0].request
        num_items = len(request.all_items)
        usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(len(c.request.output_token_ids) for c in completions),
            cached_tokens=request.num_cached_tokens,
            encoder_items=num_items,
            encoder_cached_items=num_items - len(request.encoded_keys),
        )
        self.output = RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion.output() for completion in completions],
            usage=usage,
            timings=Timings(**self._times),
            prompt_logprobs=self._prompt_scores(request),
            vector=None if self._pooled is None else request.pooling.whole(self._pooled),
        )
        self._sink.finish(self.output)

    def _prompt_scores(self, request: Request) -> Sequence[TokenLogprobs | None] | None:
        """None where they were not asked for. Where encoder rows stand there are none."""
        found, length = self._prompt_logprobs, len(request.prompt_token_ids)
        if self.params.prompt_logprobs is None or found is None:
            return None if self.params.prompt_logprobs is None else (None,) * length
        for item in request.items:
            for position, _, count in item.span.row_runs(0, length):
                found.hide(position, count)
        return found
