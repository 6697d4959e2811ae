"""Batches of requests, answered beside all others, and after them: files in, files out, in memory.

A batch is lost with the process. `aioengine batch` and `engine.map` are for those who have the
files or the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, starmap
from typing import Any, TypeVar
from uuid import uuid4

from starlette.types import Scope, Send

from aioengine.asgi.api.answers import Answer
from aioengine.asgi.api.asks import Ask, read_metadata, wrong
from aioengine.asgi.api.embeddings import answer_embeddings
from aioengine.asgi.api.fields import BATCHES, known
from aioengine.asgi.api.files import FileStore, StoredFile, page_of
from aioengine.asgi.client_task import JsonAnswer, long_json
from aioengine.asgi.endpoint import QUERY
from aioengine.asgi.error_responses import ApiError, api_error, forget_frames
from aioengine.asgi.json_body import LONG, BoundedBody, parse_object, read_object
from aioengine.asgi.service import Service
from aioengine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    shown,
)
from aioengine.streams.loop_bridge import run_apart
from aioengine.streams.together import run_together
from aioengine.types import Prompt, RequestOutput

__all__ = ["Batches", "Kinds", "embedding", "generating"]

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Of one batch that its object lists."""
MAX_BATCHES = 256
"""Kept, of all owners together; the oldest that has ended goes first."""
LIMITS = (20, 100)
"""Entries of a page of the list, without `limit` and at most."""
PRIORITY = 1
"""Requests of people, who wait, have 0 and go first."""
AGAIN_S = 1.0
PIECE = 1 << 12
"""Bytes in which empty lines are looked for at once."""
ENDED = ("failed", "completed", "cancelled")

Read = TypeVar("Read")
Work = Callable[[Service, Ask], Awaitable[dict[str, Any]]]
Kinds = Mapping[str, tuple[Callable[[Mapping[str, Any]], Ask], Work]]
"""Endpoint, as a line names it -> what reads a body, and what answers it."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """A batch. `answers`, `failures`: lines of the files that it ends with, until it does; `times`:
    status -> when it came to that; `salted`: gives prompts the cache salt of the owner."""

    owner: str
    salted: Callable[[Prompt], Prompt]
    endpoint: str
    file: str
    metadata: Mapping[str, str] | None
    id: str = field(default_factory=lambda: f"batch_{uuid4().hex}")
    status: str = "validating"
    times: dict[str, int] = field(default_factory=lambda: {"created": int(time.time())})
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    num_answers: int = 0
    num_failures: int = 0
    answers: list[bytes] = field(default_factory=list)
    failures: list[bytes] = field(default_factory=list)
    output: str | None = None
    failed: str | None = None
    task: asyncio.Task[None] | None = None

    def become(self, status: str) -> None:
        """Come to a status."""
        self.status = status
        self.times[status] = int(time.time())

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object of it."""
        times = {f"{name}_at": when for name, when in self.times.items() if name != "validating"}
        counts = {"completed": self.num_answers, "failed": self.num_failures}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.file,
            "completion_window": "24h",
            "status": self.status,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "output_file_id": self.output,
            "error_file_id": self.failed,
            "request_counts": {"total": self.total, **counts},
            "metadata": self.metadata,
            **times,
        }


class Batches:
    """The endpoints below /batches."""

    def __init__(self, service: Service, store: FileStore, kinds: Kinds) -> None:
        self._service = service
        self._store = store
        self._kinds = kinds
        self._batches: dict[str, Batch] = {}

    async def create(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """Begin a batch."""
        given = await read_object(receive, lambda body: known(body, BATCHES))
        endpoint, name = given.get("endpoint"), given.get("input_file_id")
        metadata = read_metadata(given["metadata"]) if "metadata" in given else None
        if not isinstance(endpoint, str) or endpoint not in self._kinds:
            raise wrong("endpoint", f"one of {', '.join(self._kinds)}")
        if given.get("completion_window") != "24h":
            raise wrong("completion_window", "24h")
        if not isinstance(name, str):
            raise wrong("input_file_id", "the id of a file")
        owner = self._service.keys.owner(scope)
        file = self._store.get(owner, name, "input_file_id")
        self._make_room(owner)
        batch = Batch(
            owner=owner,
            salted=self._service.salter(scope),
            endpoint=endpoint,
            file=name,
            metadata=metadata,
        )
        self._batches[batch.id] = batch
        batch.task = asyncio.create_task(self._run(batch, file))
        self._service.batches.add(batch.task)
        batch.task.add_done_callback(self._service.batches.discard)
        await asyncio.sleep(0)  # it has to have begun, to end well where it is cancelled
        await JsonAnswer(batch.to_dict())(scope, receive, send)

    async def all(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """List the batches, the latest first."""
        owner = self._service.keys.owner(scope)
        found = [each for each in self._batches.values() if each.owner == owner]
        await JsonAnswer(page_of(found[::-1], scope[QUERY], *LIMITS))(scope, receive, send)

    async def one(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """Describe a batch."""
        await JsonAnswer(self._find(scope).to_dict())(scope, receive, send)

    async def cancel(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """End a batch; what has been answered stays."""
        batch = self._find(scope)
        if batch.status not in ENDED and batch.task is not None:
            batch.become("cancelling")
            batch.task.cancel()
        await JsonAnswer(batch.to_dict())(scope, receive, send)

    def _find(self, scope: Scope) -> Batch:
        name = scope["path_params"]["name"]
        found = self._batches.get(name)
        if found is None or found.owner != self._service.keys.owner(scope):
            raise ApiError(404, f"there is no batch {shown(name)}", code="not_found")
        return found

    def _make_room(self, owner: str) -> None:
        """Forget a batch that has ended, the owner's own before others', where there are as many as
        there may be. Raises ApiError where none has."""
        own = [each for each in self._batches.values() if each.owner == owner]
        share = MAX_BATCHES // self._service.keys.num_shares
        is_full = len(self._batches) >= MAX_BATCHES
        if len(own) < share and not is_full:
            return
        candidates = own if len(own) >= share else [*own, *self._batches.values()]
        ended = next((each for each in candidates if each.status in ENDED), None)
        if ended is None:
            counted = f"{share} of your batches" if len(own) >= share else f"{MAX_BATCHES} batches"
            raise api_error(OverloadedError(f"{counted} are under way; try later"))
        del self._batches[ended.id]

    # ---- one batch

    async def _run(self, batch: Batch, file: StoredFile) -> None:
        ends = "failed"
        try:
            with self._store.reading(file) as data:
                ends = await self._answer_all(batch, data)
        except asyncio.CancelledError:
            ends = "cancelled"
        except Exception as error:
            found = api_error(error)
            forget_frames(error)
            batch.errors = [_error(found.code or "error", found.message)]
        self._keep(batch)
        batch.become(ends)

    async def _answer_all(self, batch: Batch, data: bytes) -> str:
        """Answer all lines of a file; returns the status to end with. Raises what ends it early."""
        lines, batch.errors = await run_apart(_check_lines, data, batch.endpoint)
        if batch.errors:
            return "failed"
        batch.total = len(lines)
        batch.become("in_progress")
        pending = (data[line] for line in lines)
        count = min(len(lines), max(1, self._service.engine.config.max_num_seqs // 2))
        await run_together(self._answer_lines(batch, pending) for _ in range(count))
        batch.become("finalizing")
        return "completed"

    async def _answer_lines(self, batch: Batch, pending: Iterator[bytes]) -> None:
        for line in pending:
            is_long = len(line) > LONG
            parsed = await self._read(parse_object, line, is_long=is_long)
            response, ended_well = await self._answer(batch, parsed["body"], is_long=is_long)
            answer = {
                "id": f"batch_req_{uuid4().hex}",
                "custom_id": parsed["custom_id"],
                "response": response,
                "error": None,
            }
            text = await run_apart(long_json, answer) + b"\n"
            self._reserve(batch.owner, text)
            if ended_well:
                batch.num_answers += 1
                batch.answers.append(text)
            else:
                batch.num_failures += 1
                batch.failures.append(text)

    def _reserve(self, owner: str, line: bytes) -> None:
        """Count a line of a file that is to be. Raises ApiError where there is no room for it."""
        try:
            self._store.reserve(owner, len(line))
        except ApiError as error:
            error.code = "no_room"
            raise

    async def _read(self, function: Callable[[Any], Read], value: Any, *, is_long: bool) -> Read:
        """Apply `function` to what a line has: of a long one in a thread, and one at a time, as
        all together would keep the GIL."""
        if not is_long:
            return function(value)
        async with self._service.budget.parsing:
            return await run_apart(function, value)

    async def _answer(
        self, batch: Batch, body: Mapping[str, Any], *, is_long: bool
    ) -> tuple[dict[str, Any], bool]:
        """The answer to one request, and whether it is one. Raises EngineClosedError and
        EngineDeadError."""
        read, work = self._kinds[batch.endpoint]
        try:
            ask = await self._read(read, body, is_long=is_long)
            if ask.is_streamed:
                raise wrong("stream", "absent in a batch")
            model = self._service.check_model(ask.model)
            ask = replace(ask, model=model, prompts=tuple(map(batch.salted, ask.prompts)))
            try:
                whole = await work(self._service, ask)
            except InvalidRequestError as error:
                raise ask.in_its_words(error) from error
        except (EngineClosedError, EngineDeadError):  # nor will others be answered
            raise
        except Exception as error:
            found = api_error(error)
            forget_frames(error)
            return _response(found.status, None, found.body), False
        return _response(200, whole.get("id", f"req-{uuid4().hex}"), whole), True

    def _keep(self, batch: Batch) -> None:
        """Make files of the answers, as far as there is room for them."""
        for name, lines in (("output", batch.answers), ("failed", batch.failures)):
            if not lines:
                continue
            data = b"".join(lines)
            self._store.reserve(batch.owner, -len(data))
            lines.clear()
            filename = f"{batch.id}_{name}.jsonl"
            file = StoredFile(owner=batch.owner, name=filename, purpose="batch_output", data=data)
            try:
                self._store.add(file)
            except ApiError as error:
                batch.errors.append(_error("no_room", error.message))
            else:
                setattr(batch, name, file.id)


def generating(kind: type[Answer]) -> Work:
    """Make what answers the lines of an endpoint that generates."""

    async def work(service: Service, ask: Ask) -> dict[str, Any]:
        assert ask.model is not None
        call = partial(_in_turn, service.engine.generate, priority=PRIORITY)

        async def answered(number: int, prompt: Prompt) -> RequestOutput:
            with ask.naming(number):
                return await call(prompt, ask.params)

        outputs = await run_together(starmap(answered, enumerate(ask.prompts)))
        return await kind(ask.model, service.token_texts, ask).complete(outputs)

    return work


async def embedding(service: Service, ask: Ask) -> dict[str, Any]:
    """Answer a line of embeddings."""
    call = partial(_in_turn, service.engine.embed_output, priority=PRIORITY)
    return await answer_embeddings(service, ask, call)


async def _in_turn(call: Callable[..., Awaitable[Read]], *args: Any, **options: Any) -> Read:
    """Return what a call of the engine returns, once the queue has room for it."""
    while True:
        try:
            return await call(*args, **options)
        except OverloadedError:
            await asyncio.sleep(AGAIN_S)


def _check_lines(data: bytes, endpoint: str) -> tuple[list[slice], list[dict[str, Any]]]:
    """Places of a file's lines, and errors of those that are no requests."""
    lines = [*islice(_lines(data), MAX_LINES + 1)]
    if not lines or len(lines) > MAX_LINES:
        return [], [_error("invalid_file", f"a batch has 1 to {MAX_LINES} lines")]
    names: set[str] = set()
    errors: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        reason = _fault(data[line], endpoint, names)
        if reason and len(errors) < MAX_ERRORS:
            errors.append(_error("invalid_line", reason, number))
    return lines, errors


def _lines(data: bytes) -> Iterator[slice]:
    """Find the lines that are not empty, one by one: to split a large file holds the GIL."""
    start = 0
    while start < len(data):
        piece = data[start : start + PIECE]
        text = piece.lstrip()
        start += len(piece) - len(text)
        if text:
            end = data.find(b"\n", start)
            end = len(data) if end < 0 else end
            yield slice(start, end)
            start = end + 1


def _fault(line: bytes, endpoint: str, names: set[str]) -> str:
    """Say what is wrong with a line; `names` are those of the lines before it."""
    try:
        given = parse_object(line)
    except ApiError as error:
        return error.message
    name = given.get("custom_id")
    if not isinstance(name, str) or name in names:
        return "custom_id must be text of its own"
    names.add(name)
    if given.get("method") != "POST" or given.get("url") != endpoint:
        return f"the line must be a POST to {endpoint}"
    return "" if isinstance(given.get("body"), dict) else "body must be an object"


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}


def _response(status: int, name: str | None, body: object) -> dict[str, Any]:
    return {"status_code": status, "request_id": name, "body": body}
