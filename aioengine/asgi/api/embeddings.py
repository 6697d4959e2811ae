"""embeddings, score and rerank: prompts in, numbers out."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from aioengine.asgi.api.asks import Ask, flag, make_ask, prompt_options, wrong
from aioengine.asgi.api.chat import check_conversation, template_options
from aioengine.asgi.api.completions import read_prompts
from aioengine.asgi.api.fields import EMBEDDINGS, RERANK, SCORE, done, known
from aioengine.asgi.client_task import LongEvent
from aioengine.asgi.json_body import LONG
from aioengine.asgi.service import Service
from aioengine.errors import is_int
from aioengine.streams.loop_bridge import run_apart
from aioengine.streams.together import run_together
from aioengine.types import EmbeddingOutput, Prompt, ScoreOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "answer_embeddings",
    "embed",
    "read_embeddings",
    "read_rerank",
    "read_score",
    "rerank",
    "score",
]

MAX_INPUTS = 2048
MANY = 4096
"""Numbers whose JSON is not written on the loop."""
DOCUMENT = {"text": done()}
FORMATS = ("float", "base64")


def read_embeddings(body: Mapping[str, Any]) -> Ask:
    """The body of embeddings. Raises InvalidRequestError."""
    given = known(body, EMBEDDINGS)
    if ("input" in given) == ("messages" in given):
        raise wrong("input", "given, or messages, and not both")
    if given.get("encoding_format", "float") not in FORMATS:
        raise wrong("encoding_format", f"one of {', '.join(FORMATS)}")
    size = given.get("dimensions")
    if size is not None and not (is_int(size) and size > 0):
        raise wrong("dimensions", "a positive integer")
    flag(given, "normalize")
    options, are_listed = prompt_options(given), False
    if "messages" in given:
        conversation = check_conversation(given["messages"])
        template = template_options(given)
        prompts = [Prompt(messages=conversation, chat_template_kwargs=template, **options)]
    else:
        listed = read_prompts(given["input"], "input", MAX_INPUTS)
        are_listed = listed is given["input"]
        prompts = [
            Prompt(**{**options, "text" if isinstance(each, str) else "token_ids": each})
            for each in listed
        ]
    name = "messages" if "messages" in given else "input"
    used = {"prompt": name, "n": name}
    return replace(make_ask(given, tuple(prompts), None, used), are_listed=are_listed)


def read_score(body: Mapping[str, Any]) -> Ask:
    """The body of score. Raises InvalidRequestError."""
    given = known(body, SCORE)
    query = _text(given.get("text_1"), "text_1")
    texts = given.get("text_2")
    listed = [texts] if isinstance(texts, str) else texts
    names = {"query": "text_1", "documents": "text_2"}
    if isinstance(texts, str):
        names["documents[0]"] = "text_2"
    return _scored(given, query, _texts(listed, "text_2"), names)


def read_rerank(body: Mapping[str, Any]) -> Ask:
    """The body of rerank. Raises InvalidRequestError."""
    given = known(body, RERANK)
    count = given.get("top_n")
    if count is not None and not (is_int(count) and count >= 0):
        raise wrong("top_n", "an integer, 0 for all")
    flag(given, "return_documents")
    query = _text(given.get("query"), "query")
    documents = given.get("documents")
    if isinstance(documents, list):
        documents = [_document(each, f"documents[{i}].") for i, each in enumerate(documents)]
    return _scored(given, query, _texts(documents, "documents"), {})


def _document(given: Any, path: str) -> Any:
    return known(given, DOCUMENT, path).get("text") if isinstance(given, dict) else given


def _scored(
    given: dict[str, Any], query: str, documents: Sequence[str], aliases: Mapping[str, str]
) -> Ask:
    """The prompts are the query and the documents."""
    options = prompt_options(given)
    prompts = tuple(Prompt(text=text, **options) for text in (query, *documents))
    # All of them: a place in the documents is no field that is given.
    return replace(make_ask(given, prompts, None), aliases=aliases)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong(name, "text")
    return value


def _texts(values: Any, name: str) -> list[str]:
    if not isinstance(values, list) or not 0 < len(values) <= MAX_INPUTS:
        raise wrong(name, f"a list of 1 to {MAX_INPUTS} texts")
    return [_text(value, f"{name}[{index}]") for index, value in enumerate(values)]


async def embed(service: Service, ask: Ask) -> dict[str, Any]:
    """Answer embeddings."""
    service.engine.check_room(len(ask.prompts))
    return await answer_embeddings(service, ask, service.engine.embed_output)


async def answer_embeddings(
    service: Service, ask: Ask, call: Callable[..., Awaitable[EmbeddingOutput]]
) -> dict[str, Any]:
    """The answer of embeddings. `call`: the engine's, or one that waits for its turn."""
    given = ask.fields
    options = {name: given[name] for name in ("pooling", "normalize") if name in given}
    size = given.get("dimensions")
    _check_size(size, service.engine.embedding_width)
    turn = asyncio.Lock()

    async def embedded(number: int, prompt: Prompt) -> EmbeddingOutput:
        async with turn:
            await asyncio.sleep(0)  # thousands that begin at once would hold the loop
        with ask.naming(number):
            return await call(prompt, **options)

    outputs = await run_together(starmap(embedded, enumerate(ask.prompts)))
    width = len(outputs[0].vector)
    _check_size(size, width)
    is_short = given.get("encoding_format") == "base64"
    is_long = len(outputs) * (size or width) > MANY
    vectors = [output.vector for output in outputs]
    write = partial(_written, vectors, size, is_short)
    written = await run_apart(write) if is_long else write()
    data = [
        {"object": "embedding", "index": index, "embedding": each}
        for index, each in enumerate(written)
    ]
    kind = LongEvent if is_long else dict
    usage = _usage(output.usage.prompt_tokens for output in outputs)
    return kind(object="list", data=data, model=ask.model, usage=usage)


def _check_size(size: int | None, width: int) -> None:
    if size is not None and size > width:
        raise wrong("dimensions", f"{width} at most")


def _written(
    vectors: Sequence[NDArray[np.float32]], size: int | None, is_short: bool
) -> list[str | list[float]]:
    """The vectors as JSON has them."""
    return [_vector(each, size, is_short) for each in vectors]


def _vector(vector: NDArray[np.float32], size: int | None, is_short: bool) -> str | list[float]:
    """The vector, or its beginning, which has the length that the whole has."""
    if size is not None:
        length = float((vector @ vector) ** 0.5)
        vector = vector[:size]
        vector = vector * (length / (float((vector @ vector) ** 0.5) or 1.0))
    if is_short:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


async def score(service: Service, ask: Ask) -> dict[str, Any]:
    """Answer score."""
    output = await _scores(service, ask)
    data = [
        {"object": "score", "index": index, "score": each}
        for index, each in enumerate(output.scores)
    ]
    answer = {"id": f"score-{uuid4().hex}", "object": "list", "model": ask.model, "data": data}
    return {**answer, "usage": _usage(usage.prompt_tokens for usage in output.usages)}


async def rerank(service: Service, ask: Ask) -> dict[str, Any]:
    """Answer rerank: the best first."""
    output = await _scores(service, ask)
    ranked = sorted(enumerate(output.scores), key=lambda each: -each[1])
    shows = ask.fields.get("return_documents", True)
    results = [
        {
            "index": index,
            **({"document": {"text": ask.prompts[index + 1].text}} if shows else {}),
            "relevance_score": each,
        }
        for index, each in ranked[: ask.fields.get("top_n") or None]
    ]
    usage = _usage(usage.prompt_tokens for usage in output.usages)
    kind = LongEvent if sum(len(each.text or "") for each in ask.prompts) > LONG else dict
    return kind(id=f"rerank-{uuid4().hex}", model=ask.model, results=results, usage=usage)


async def _scores(service: Service, ask: Ask) -> ScoreOutput:
    query, *documents = ask.prompts
    service.engine.check_room(1)
    return await service.engine.score_output(query, documents)


def _usage(counts: Iterable[int]) -> dict[str, int]:
    total = sum(counts)
    return {"prompt_tokens": total, "total_tokens": total}
