"""OpenAI's client for an engine in this process: its requests reach the ASGI app without a port.

The client is the `openai` package's own class, made faster: what that does in Python for each
message of a conversation and each field of an answer takes longer than an engine's step, and holds
the event loop. Below it stands a transport for whichever HTTP library the package uses, httpx or
httpx2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, update_wrapper
from importlib import import_module
from inspect import isclass, signature
from operator import attrgetter
from typing import Any

from cachetools import LRUCache, cachedmethod
from starlette.types import ASGIApp, Message

from aioengine.asgi.app import client_app
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import AioEngineError, WrongLoopError, refuse_names, trace_of
from aioengine.streams.loop_bridge import check_running

try:
    import openai
    from openai.resources.chat import AsyncChat, AsyncCompletions
    from openai.resources.responses import AsyncResponses
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'{error.name} is not installed: pip install "aioengine[client]"', name=error.name
    ) from error

__all__ = ["InProcessClient", "openai_client"]

MOUNT = "/v1"
URL = f"http://aioengine{MOUNT}"
"""Shown in the client's errors; nothing looks it up."""
OWN = ("base_url", "http_client")
"""Arguments of the client's class that are not the caller's."""
MODEL: Any = openai.BaseModel.__base__
"""Pydantic's."""
ABSENT = (openai.Omit, openai.NotGiven)
MAX_WAITING = 4
"""Parts of a response that wait for its reader."""
PLAIN = {"headers", "content"}
"""Options of a request to which the HTTP library adds nothing that the app reads."""
FINAL = (b"x-should-retry", b"false")
"""Header by which OpenAI's clients try no second time, whatever the status."""

logger = logging.getLogger(__name__)


def openai_client(
    engine: AsyncEngine, *, model_names: str | Sequence[str] | None = None, **options: Any
) -> openai.AsyncOpenAI:
    """Return OpenAI's client for an engine in this process. `AsyncEngine.openai_client` calls this.

    `model_names`: as in `openai_app`; `options`: arguments of `openai.AsyncOpenAI`. Raises
    InvalidRequestError for an option that the class does not take, `base_url` or `http_client`.
    """
    known = signature(openai.AsyncOpenAI).parameters.keys() - set(OWN)
    refuse_names("openai_client() has no option {}", options, known)
    app = client_app(engine, model_names=model_names)
    http_client = InProcessClient(engine, app, app.state.batches)
    given = {"api_key": "none", **options}
    return _Client(base_url=URL, http_client=http_client, **given)


class _Listed:
    """A list that is read by its indices alone.

    The package walks what is iterable, and tries all types that a message may have on each message:
    0.2 to 0.4 ms each. Where the caller's arguments are traced, they can still be read.
    """

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __repr__(self) -> str:
        return repr(self._items)


def _not_walked(arguments: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Arguments of a call whose lists the package sends as they are, by way of `extra_body`."""
    extra = arguments.get("extra_body")
    lists = {name: arguments[name] for name in names if isinstance(arguments.get(name), list)}
    if not isinstance(extra, Mapping | None):
        return dict(arguments)
    try:
        sent = {name: _plain(items) for name, items in lists.items()}
    except RecursionError:  # it may be circular, which the package says
        return dict(arguments)
    shown = {name: _Listed(items) for name, items in lists.items()}
    return {**arguments, **shown, "extra_body": {**sent, **(extra or {})}}


def _plain(value: Any) -> Any:
    """A copy of JSON's own types, of what the package makes such a copy of."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, MODEL):
        left_out = getattr(value, "__api_exclude__", None)
        return value.model_dump(mode="json", exclude_unset=True, exclude=left_out)
    if isinstance(value, Mapping):
        given = ((name, each) for name, each in value.items() if not isinstance(each, ABSENT))
        return {name: _plain(each) for name, each in given}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_plain(each) for each in value]
    return value


class _Completions(AsyncCompletions):
    async def create(self, **arguments: Any) -> Any:
        """See `AsyncCompletions.create`."""
        return await super().create(**_not_walked(arguments, "messages", "tools"))


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        """See `AsyncChat.completions`."""
        return _Completions(self._client)


class _Responses(AsyncResponses):
    async def create(self, **arguments: Any) -> Any:
        """See `AsyncResponses.create`."""
        return await super().create(**_not_walked(arguments, "input", "tools"))


# The package's own signatures, for those who read them.
update_wrapper(_Completions.create, AsyncCompletions.create)
update_wrapper(_Responses.create, AsyncResponses.create)


class _Client(openai.AsyncOpenAI):
    """OpenAI's client, which lets pydantic read an answer that is as the package's types say.

    Its own reading, field by field in Python, gives an equal object and takes far longer.
    """

    @cached_property
    def chat(self) -> AsyncChat:
        """See `AsyncOpenAI.chat`."""
        return _Chat(self)

    @cached_property
    def responses(self) -> AsyncResponses:
        """See `AsyncOpenAI.responses`."""
        return _Responses(self)

    @cached_property
    def _urls(self) -> LRUCache[Any, Any]:
        return LRUCache(maxsize=64)

    @cachedmethod(attrgetter("_urls"), key=lambda self, url: (self.base_url, url))
    def _prepare_url(self, url: str) -> Any:
        return super()._prepare_url(url)

    def platform_headers(self) -> dict[str, str]:
        """Tell nobody of this machine: there is nobody to tell."""
        return {}

    def _process_response_data(self, *, data: object, cast_to: Any, response: Any) -> Any:
        if isclass(cast_to) and issubclass(cast_to, openai.BaseModel):
            with suppress(ValueError):  # pydantic's ValidationError is one
                return cast_to.model_validate(data)
        return super()._process_response_data(data=data, cast_to=cast_to, response=response)


class InProcessClient(openai.DefaultAsyncHttpxClient):
    """HTTP client of the `openai` package's kind, whose requests an app of the engine's answers."""

    def __init__(
        self, engine: AsyncEngine, app: ASGIApp, work: Collection[asyncio.Future[None]] = ()
    ) -> None:
        """`work`: of the app's, beside its requests; it ends with the client."""
        self._library = _http_library()
        transport: Any = _Transport(app, self._library, work)
        # No proxies and no passwords of the environment's: nothing leaves the process.
        super().__init__(transport=transport, trust_env=False)
        self._engine = engine

    def build_request(self, method: str, url: Any, **options: Any) -> Any:
        """Make a request. Raises WrongLoopError on another event loop than the engine's.

        Here and not where it is sent, as OpenAI's clients may try again whatever that raises.
        """
        try:
            self._engine.check_room(0)
        except WrongLoopError:
            raise
        except AioEngineError:
            pass  # the app says so, in OpenAI's words
        given = {name: value for name, value in options.items() if value is not None}
        timeout = given.pop("timeout", None)
        if given.keys() != PLAIN or not isinstance(timeout, self._library.Timeout):
            return super().build_request(method, url, **options)
        # What the library would add to it tells a server how to write to a socket.
        extensions = {"timeout": timeout.as_dict()}
        url = _parsed(self._library.URL, url)
        return self._library.Request(method, url, **given, extensions=extensions)


def _http_library() -> Any:
    """Return the module, httpx or httpx2, that the package's HTTP clients are classes of."""
    base = openai.DefaultAsyncHttpxClient.__mro__[1]
    return import_module(base.__module__.partition(".")[0])


@lru_cache(maxsize=64)
def _parsed(url_class: Any, url: str) -> Any:
    return url_class(url)


class _Exchange:
    """One request, which the app answers in a task of its own, in the caller's context.

    What it has sent waits for the reader, and the app for room. Constructed on the event loop.
    """

    def __init__(self, app: ASGIApp, scope: dict[str, Any], request: Any, library: Any) -> None:
        self.head: Message | None = None
        self._request_parts: AsyncIterator[bytes] = aiter(request.stream)
        self._is_whole = isinstance(request.stream, library.ByteStream)
        self._is_requested = False
        self._read_timeout: float | None = request.extensions.get("timeout", {}).get("read")
        self._library = library
        self._waiting: list[bytes] = []
        self._is_complete = self._is_late = False
        self._changed, self._has_room, self._is_left = (asyncio.Event() for _ in range(3))
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self.task.add_done_callback(self._app_ends)

    async def _receive(self) -> Message:
        if not self._is_requested:
            part = await anext(self._request_parts, None)
            self._is_requested = part is None or self._is_whole
            more = not self._is_requested
            return {"type": "http.request", "body": part or b"", "more_body": more}
        await self._is_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_left.is_set():
            raise OSError("the client has left")  # as ASGI 2.4 has it
        if message["type"] == "http.response.start":
            self.head = message
        else:
            while len(self._waiting) >= MAX_WAITING:
                self._has_room.clear()
                await self._has_room.wait()
            if message.get("body"):
                self._waiting.append(message["body"])
            self._is_complete = not message.get("more_body", False)
        self._changed.set()

    def _app_ends(self, task: asyncio.Future[None]) -> None:
        self._changed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None and self._is_complete:  # else the reader gets it
            logger.error("an app failed behind its response\n%s", trace_of(error))

    async def begin(self) -> Message:
        """Wait for the head of the response. Raises the library's ReadTimeout and ReadError."""
        while self.head is None:
            await self._change()
        return self.head

    async def read(self) -> bytes:
        """Read all that waits; b"" at the end. Raises as `begin` does, and WrongLoopError."""
        self._check_loop()
        while not self._waiting and not self._is_complete:
            await self._change()
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._has_room.set()
        return data

    async def _change(self) -> None:
        if self.task.done():
            cause = None if self.task.cancelled() else self.task.exception()
            raise self._library.ReadError("the app ended before its response") from cause
        self._changed.clear()
        # `asyncio.timeout` takes longer than all else here does for a token.
        limit = self._read_timeout
        timer = None if limit is None else self._loop.call_later(limit, self._end_wait)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
        if self._is_late:
            raise self._library.ReadTimeout("nothing has come from the engine in time")

    def _end_wait(self) -> None:
        self._is_late = True
        self._changed.set()

    def _check_loop(self) -> None:
        check_running(self._loop, "a response is read and closed on its own event loop")

    def leave_nowait(self) -> None:
        """Begin to end the app's work, unless its response is complete. Idempotent."""
        if not self._is_left.is_set():
            self._is_left.set()
            if not self._is_complete:
                self.task.cancel()  # once: a second time would break off its own end

    async def leave(self) -> None:
        """End the app's work, unless its response is complete, and wait for its end. Idempotent.

        Raises WrongLoopError where there is an end to wait for.
        """
        if not self.task.done():
            self._check_loop()
            self.leave_nowait()
            await asyncio.wait([self.task])

    def drop(self) -> None:
        """Begin to end what an app does for a response that nobody can read; from any thread."""
        if not (self._is_complete or self.task.done()):
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.leave_nowait)


class _Body:
    """A response's body, read as it comes. Closed or dropped before its end, it ends the app's."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._is_over = False
        """Read to its end, behind which no reader need wait for the app's; or given up."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while data := await self._exchange.read():
                yield data
            self._is_over = True
        except GeneratorExit:
            # Garbage mostly. The library's generators around this one are garbage too, and each is
            # closed by a task of its own, none of which may find another waiting.
            self._is_over = True
            self._exchange.leave_nowait()
            raise
        finally:  # a reader that is cancelled may not close what it reads
            await self.aclose()

    async def aclose(self) -> None:
        if not self._is_over:
            await self._exchange.leave()

    def __del__(self) -> None:
        self._exchange.drop()


class _Transport:
    """Transport of a client's requests to an app of the engine's."""

    def __init__(
        self, app: ASGIApp, library: Any, work: Collection[asyncio.Future[None]] = ()
    ) -> None:
        self._app = app
        self._work = work
        self._library = library
        # The library knows its streams by their class.
        self._body_class = type("_Body", (_Body, library.AsyncByteStream), {})
        self._live: set[_Exchange] = set()

    async def __aenter__(self) -> _Transport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def handle_async_request(self, request: Any) -> Any:
        """Return the response once it begins. Raises the library's ReadTimeout and ReadError."""
        exchange = _Exchange(self._app, _scope(request), request, self._library)
        self._live.add(exchange)
        exchange.task.add_done_callback(lambda _: self._live.discard(exchange))
        try:
            head = await exchange.begin()
        except BaseException:
            await exchange.leave()
            raise
        # What has ended an engine in this process is not over in a second.
        headers = [*head["headers"], *([FINAL] if head["status"] >= 500 else [])]
        body = self._body_class(exchange)
        return self._library.Response(head["status"], headers=headers, stream=body)

    async def aclose(self) -> None:
        """End all that is under way."""
        for exchange in tuple(self._live):
            await exchange.leave()
        for each in (ending := tuple(self._work)):
            each.cancel()
        if ending:
            await asyncio.wait(ending)


def _scope(request: Any) -> dict[str, Any]:
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "root_path": MOUNT,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": None,
        "server": None,
    }
