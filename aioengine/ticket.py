"""One request as its caller sees it: the stream it feeds, its text so far, its times."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioengine.config import SamplingParams
from aioengine.detokenizer import Detokenizer
from aioengine.plan import Advance
from aioengine.request import Request
from aioengine.streams.tokens import TokenSink
from aioengine.types import (
    CompletionOutput,
    Delta,
    FinishReason,
    RequestOutput,
    Timings,
    Usage,
)

if TYPE_CHECKING:
    from aioengine.processors.processor import Layout

__all__ = ["MediaInput", "Ticket"]


@dataclass(slots=True)
class MediaInput:
    """One media item of a request, from the caller's object to its place in the prompt.

    `source` is what is decoded (an `ImageSource`), or the item itself where it needs no decoding;
    `header` is what the layout reads of it; `index` counts within the modality.
    """

    modality: str
    index: int
    item: Any
    parameter: str
    trusted: bool
    uuid: str | None = None
    source: Any = None
    header: Any = None
    key: str = ""


class Ticket:
    """A live request on the engine's floor. Ends exactly once: `finish` or `fail`."""

    def __init__(
        self,
        request_id: str,
        sink: TokenSink,
        params: SamplingParams,
        *,
        priority: int,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.priority = priority
        self.media: list[MediaInput] = []
        self.layout: Layout | None = None
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.request: Request | None = None
        self.detokenizer: Detokenizer | None = None
        self.intake: asyncio.Task[None] | None = None
        self.has_ended = False
        self._sink = sink
        self._submitted = time.perf_counter()
        self._times: dict[str, float] = {}

    def stamp(self, stage: str) -> None:
        """Note that the stage is complete, as far as one knows now."""
        self._times[stage] = time.perf_counter() - self._submitted

    def admit(self, request: Request) -> None:
        """The scheduler has taken the request."""
        self.request = request
        self.stamp("admitted")
        self._sink.admit()

    def media_with(self, key: str) -> MediaInput | None:
        """The first of its items with this content key."""
        return next((media for media in self.media if media.key == key), None)

    def deliver(self, advance: Advance) -> None:
        """Turn an accepted token into a delta, and into the end where it is one."""
        self._times.setdefault("first_token", time.perf_counter() - self._submitted)
        reason = advance.finish_reason
        text, stop = self._text(advance, reason)
        stop_reason: int | str | None = advance.stop_reason
        if stop is not None:
            reason, stop_reason = FinishReason.STOP, stop
        self._sink.push(Delta(0, text, (advance.token_id,), finish_reason=reason))
        if reason is not None:
            self.finish(reason, stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End well."""
        assert self.request is not None and not self.has_ended
        self.has_ended = True
        self.stamp("finished")
        request = self.request
        completion = CompletionOutput(
            index=0,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=tuple(request.output_token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=len(request.output_token_ids),
            cached_tokens=request.num_cached_tokens,
            encoder_items=len(request.items),
            encoder_cached_items=len(request.items) - len(request.encoded_keys),
        )
        self._sink.finish(
            RequestOutput(
                request_id=self.request_id,
                prompt_token_ids=request.prompt_token_ids,
                outputs=[completion],
                usage=usage,
                timings=Timings(**self._times),
            )
        )

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        assert not self.has_ended
        self.has_ended = True
        self._sink.fail(error)

    def _text(self, advance: Advance, reason: FinishReason | None) -> tuple[str, str | None]:
        """The new text, and the stop string that ended it."""
        if self.detokenizer is None:
            return "", None
        ends_in_token = reason is FinishReason.STOP and not self.params.include_stop_str_in_output
        text, stop = "", None
        if not ends_in_token:
            piece = self.detokenizer.add(advance.token_id)
            text, stop = piece.text, piece.stop
        if reason is not None and stop is None:
            text += self.detokenizer.flush().text
        return text, stop
