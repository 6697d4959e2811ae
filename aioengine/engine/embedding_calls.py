"""Embeddings and scores: calls whose requests end with their prompt, and sample no token."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aioengine.config import EngineConfig
from aioengine.engine.bulk import map_bounded, new_window
from aioengine.engine.prompts import PromptLike, check_arguments, read_prompt
from aioengine.errors import InvalidRequestError, OverloadedError, require, with_known_names
from aioengine.sampling_params import SamplingParams
from aioengine.types import EmbeddingOutput, Prompt, RequestOutput, ScoreOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aioengine.engine.engine_core import EngineCore
    from aioengine.sampling.pooling import Pooling

__all__ = ["BlockingEmbeddingCalls", "EmbeddingCalls"]

PARAMS = SamplingParams(max_tokens=1, detokenize=False)
"""Of requests that sample nothing."""
ROOM_LOOK_S = 0.02
NAMES = {"AsyncEngine.generate, which gives text: {}=...": ("params", "tools", "tool_choice")}


class Asked(NamedTuple):
    """One request of several. `name`: of its prompt, as the caller knows it; `company`: what the
    prompt has beside that, in words."""

    prompt: PromptLike
    pool: Pooling
    name: str
    company: str = ""

    def placed(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error about the prompt that says which prompt of the call it is."""
        own = error.parameter or "prompt"
        rest = own.removeprefix("prompt") if own.startswith("prompt") else f".{own}"
        place = self.name + rest
        text = str(error)
        text = text.removeprefix(own) if text.startswith(own) else f": {text}"
        return type(error)(place + self.company + text, parameter=place, value=error.value)


class EmbeddingCalls(ABC):
    """Calls of an engine that end with numbers. Its life is the subclass's."""

    config: EngineConfig

    @abstractmethod
    def _serving_core(self) -> EngineCore:
        """The core of an engine that runs; raises EngineError where it does not."""

    @property
    def embedding_width(self) -> int:
        """Numbers of an embedding, of a running engine. The few models that project their last
        hidden states to fewer may give fewer."""
        return self._serving_core().loaded.embedder.width

    @with_known_names("embed() has no argument {}", NAMES)
    async def embed(
        self,
        prompt: PromptLike,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        pooling: str | None = None,
        normalize: bool | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> NDArray[np.float32]:
        """The embedding of one prompt: float32 [width]. Cancelling the awaiting task ends it.

        `prompt`, `images` and so on: as for `generate`. `pooling`: "last", "mean" or "cls" (the
        first) of the hidden states behind the final norm; None: as the checkpoint says, else "last"
        where tokens see those before them only, and "mean" where they see all. `normalize`: to
        length 1; None: as the checkpoint says, else True. Nothing is cut off: a prompt that is too
        long raises PromptTooLongError.
        """
        media = {"images": images, "videos": videos, "audios": audios}
        options: dict[str, Any] = {"pooling": pooling, "normalize": normalize, **media}
        output = await self.embed_output(
            prompt, request_id=request_id, priority=priority, **options
        )
        vector: NDArray[np.float32] = output.vector
        return vector

    @with_known_names("embed_output() has no argument {}", NAMES)
    async def embed_output(
        self,
        prompt: PromptLike,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        pooling: str | None = None,
        normalize: bool | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> EmbeddingOutput:
        """The same with its usage; see `embed`."""
        core = self._serving_core()
        require(normalize in (True, False, None), "normalize", normalize, "True, False or None")
        pool, normalizes = core.loaded.embedder.pooling(pooling)
        media = {"image": images, "video": videos, "audio": audios}
        output = await _run(core, prompt, media, pool, request_id, priority)
        vector = _vector(output.vector, normalizes=normalizes if normalize is None else normalize)
        return EmbeddingOutput(output.request_id, vector, output.usage, output.timings)

    @with_known_names("score() has no argument {}")
    async def score(
        self, query: PromptLike, documents: Sequence[PromptLike], *, priority: int = 0
    ) -> list[float]:
        """Scores of documents for a query, the more the better.

        Of a classifier of one label (a cross-encoder): its head's number for the pair, as
        transformers gives it; then all are texts. Of an embedder: the cosine of the embeddings, and
        all are prompts as `embed` takes them. Raises InvalidRequestError for other models, and with
        the place (`documents[3]`) for what cannot be computed.
        """
        output = await self.score_output(query, documents, priority=priority)
        return list(output.scores)

    @with_known_names("score_output() has no argument {}")
    async def score_output(
        self, query: PromptLike, documents: Sequence[PromptLike], *, priority: int = 0
    ) -> ScoreOutput:
        """The same with its usage; see `score`."""
        core = self._serving_core()
        if isinstance(documents, str | bytes | Prompt) or not isinstance(documents, Sequence):
            message = "documents must be a list, of texts or other prompts"
            kind = type(documents).__name__
            raise InvalidRequestError(message, parameter="documents", value=kind)
        check_arguments(None, None, priority)
        names = ["query", *(f"documents[{index}]" for index in range(len(documents)))]
        if core.loaded.embedder.scores:
            asked = await _pairs(core, (query, *documents), names)
            found = await self._run_all(core, asked, priority)
            return _scored([float(each.vector[0]) for each in found], found)
        pool, _ = core.loaded.embedder.pooling(None)
        prompts = [query, *documents] if documents else []
        alone = [Asked(each, pool, name) for each, name in zip(prompts, names, strict=False)]
        found = await self._run_all(core, alone, priority)
        vectors = [_vector(each.vector, normalizes=True).astype("float64") for each in found]
        return _scored([float(vectors[0] @ each) for each in vectors[1:]], found)

    async def _run_all(
        self, core: EngineCore, asked: Sequence[Asked], priority: int
    ) -> list[RequestOutput]:
        """Run requests, as many at a time as the engine has room for; the first error ends them."""

        async def run(each: Asked) -> RequestOutput | Exception:
            while True:
                try:
                    return await _run(core, each.prompt, {}, each.pool, None, priority)
                except OverloadedError:  # others' requests have the room
                    await asyncio.sleep(ROOM_LOOK_S)
                except InvalidRequestError as error:
                    return each.placed(error)
                except Exception as error:
                    return error  # of several that fail at once, one is raised

        window = new_window(self.config, None, None, is_ordered=True)
        found: list[RequestOutput] = []
        async with aclosing(map_bounded(run, asked, window)) as ended:
            async for _, task in ended:
                output = task.result()
                if isinstance(output, Exception):
                    raise output
                found.append(output)
        return found


async def _run(
    core: EngineCore,
    prompt: PromptLike,
    media: dict[str, Any],
    pool: Pooling,
    request_id: str | None,
    priority: int,
) -> RequestOutput:
    """The output of one request that ends with its prompt."""
    check_arguments(None, request_id, priority)
    name = request_id if request_id is not None else uuid.uuid4().hex
    core.tracker.check_name(name)
    core.check_entry(1)
    stream = core.submit(name, read_prompt(prompt, media), PARAMS, priority, pool)
    try:
        return await stream.result()
    finally:
        stream.close()
        del stream  # it holds the error, whose traceback holds this frame


async def _pairs(
    core: EngineCore, prompts: Sequence[PromptLike], names: Sequence[str]
) -> list[Asked]:
    """Each pair of texts, of which the first is the query, as a classifier reads it."""
    texts, salts = [], []
    for name, each in zip(names, prompts, strict=True):
        text = each.text if isinstance(each, Prompt) else each
        if not isinstance(text, str):
            message = f"{name} must be a text: this model scores pairs of texts"
            raise InvalidRequestError(message, parameter=name, value=type(each).__name__)
        texts.append(text)
        salts.append(each.cache_salt if isinstance(each, Prompt) else None)
    first, *others = texts
    encoded = await core.input_processor.encode_pairs([(first, other) for other in others])
    head = core.loaded.embedder.head
    return [
        Asked(Prompt(token_ids=token_ids, cache_salt=salt), head(second), name, " with the query")
        for (token_ids, second), salt, name in zip(encoded, salts[1:], names[1:], strict=True)
    ]


def _vector(found: Any, *, normalizes: bool) -> NDArray[np.float32]:
    """A vector as callers get it, of length 1 if asked for; of zeros it stays so."""
    import numpy as np

    length = float(np.linalg.norm(found)) if normalizes else 1.0
    vector: NDArray[np.float32] = (found / (length or 1.0)).astype(np.float32)
    return vector


def _scored(scores: Sequence[float], outputs: Sequence[RequestOutput]) -> ScoreOutput:
    return ScoreOutput(tuple(scores), tuple(each.usage for each in outputs))


class BlockingEmbeddingCalls(ABC):
    """The same calls for code that does not await."""

    @abstractmethod
    def _serving(self) -> Any:
        """The engine, started where it is new."""

    @abstractmethod
    def _call(self, function: Any, *args: Any, limit: float | None = None) -> Any:
        """Return or raise what `function(*args)` on the loop does, awaited if need be."""

    @with_known_names("embed() has no argument {}", NAMES)
    def embed(
        self,
        prompt: PromptLike,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        pooling: str | None = None,
        normalize: bool | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """The embedding of one prompt, float32 [width]; see `AsyncEngine.embed`.

        After `timeout` seconds the request is ended and TimeoutError raised.
        """
        options: dict[str, Any] = {"images": images, "videos": videos, "audios": audios}
        options |= {"pooling": pooling, "normalize": normalize}
        options |= {"request_id": request_id, "priority": priority}
        ask: partial[Coroutine[Any, Any, Any]] = partial(self._serving().embed, prompt, **options)
        vector: NDArray[np.float32] = self._call(ask, limit=timeout)
        return vector

    @with_known_names("score() has no argument {}")
    def score(
        self,
        query: PromptLike,
        documents: Sequence[PromptLike],
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[float]:
        """Scores of documents for a query; see `AsyncEngine.score`.

        After `timeout` seconds the requests are ended and TimeoutError raised.
        """
        ask = partial(self._serving().score, query, documents, priority=priority)
        scores: list[float] = self._call(ask, limit=timeout)
        return scores
