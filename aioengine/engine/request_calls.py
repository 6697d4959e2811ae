"""The calls that begin and end requests of an engine that runs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

from aioengine.config import EngineConfig
from aioengine.engine.bulk import (
    Outcome,
    ParamsLike,
    Window,
    check_many,
    map_prompts,
    new_window,
)
from aioengine.engine.embedding_calls import EmbeddingCalls
from aioengine.engine.prompts import CHAT, PromptLike, check_arguments, read_prompt
from aioengine.errors import with_known_names
from aioengine.sampling_params import SamplingParams
from aioengine.streams.tokens import TokenStream
from aioengine.types import Prompt, RequestOutput

__all__ = ["OPTIONS", "RequestCalls"]

OPTIONS = {
    "SamplingParams: params=SamplingParams({}=...)": SamplingParams.__dataclass_fields__,
    "Prompt: Prompt(..., {}=...)": Prompt.__dataclass_fields__,
    "EngineConfig: AsyncEngine.from_pretrained(..., {}=...)": EngineConfig.__dataclass_fields__,
}
"""Names that a request's calls do not know, and where they go."""


class RequestCalls(EmbeddingCalls):
    """Calls of an engine that end with a request's output. Its life is the subclass's."""

    @with_known_names("generate() has no argument {}", OPTIONS)
    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        tools: Sequence[Any] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """The whole output for one prompt. Cancelling the awaiting task ends the request.

        `prompt`: text, token ids, chat messages, a `Prompt`, or a mapping as vLLM takes it.
        `images`: one, or any iterable of them, for its placeholders or its messages' parts without
        content, in order; so are `videos` and `audios`. `tools` and what follows: see `Prompt`. A
        smaller `priority` goes first, always: a steady flow of these keeps others waiting.
        Raises the errors of `aioengine.errors`.
        """
        given: dict[str, Any] = {"images": images, "videos": videos, "audios": audios}
        given |= _chat(tools, tool_choice, chat_template_kwargs)
        stream = self.stream(prompt, params, request_id=request_id, priority=priority, **given)
        try:
            return await stream.result()
        finally:
            stream.close()
            del stream  # it holds the error, whose traceback holds this frame

    @with_known_names("stream() has no argument {}", OPTIONS)
    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        tools: Sequence[Any] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> TokenStream:
        """The same as a stream of deltas; use it with `async with`. The request begins at once.

        What the arguments alone show is raised here; what headers and layout show, when the stream
        is entered; all else when it is read.
        """
        core = self._serving_core()
        core.loaded.embedder.check_generates()
        check_arguments(params, request_id, priority)
        name = request_id if request_id is not None else uuid.uuid4().hex
        core.tracker.check_name(name)
        params = params or SamplingParams()
        core.check_entry(params.n)
        # Last, as it runs through iterators: whoever finds no room may come again.
        media = {"image": images, "video": videos, "audio": audios}
        read = read_prompt(prompt, media, _chat(tools, tool_choice, chat_template_kwargs))
        return core.submit(name, read, params, priority)

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[True] = True,
        return_exceptions: Literal[False] = False,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[True] = True,
        return_exceptions: bool,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[Outcome]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[False],
        return_exceptions: bool = False,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[tuple[int, Outcome]]: ...

    @with_known_names("map() has no argument {}", OPTIONS)
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[Any]:
        """Outputs for any number of prompts, drawn as there is room for them.

        `params`: for all, or one for each prompt. In the prompts' order, or with `ordered=False` as
        `(index, output)` as they are completed. The first error ends it, unless
        `return_exceptions` puts those of single requests in their outputs' places. At most
        `max_in_flight` are live at once (None: twice `max_num_seqs`), and a bounded number of
        outputs waits for its turn. To stop early, use it within `contextlib.aclosing`.
        """
        check_many(prompts, params)
        window: Window[asyncio.Task[RequestOutput]] = new_window(
            self.config, params, max_in_flight, is_ordered=ordered
        )
        return map_prompts(
            self.generate, prompts, params, window, return_exceptions=return_exceptions
        )

    def check_room(self, num_completions: int) -> None:
        """Raise what would keep so many completions out now.

        That is OverloadedError or an EngineError; InvalidRequestError for more than ever may enter.
        """
        self._serving_core().check_entry(num_completions)

    async def abort(self, request_id: str) -> None:
        """End a live request with RequestAbortedError; an unknown or ended one is left alone."""
        self._serving_core().tracker.abort(request_id, "the request was aborted")
        await asyncio.sleep(0)


def _chat(*given: Any) -> dict[str, Any]:
    return dict(zip(CHAT, given, strict=True))
