"""One worker process as its parent sees it: its channel, its memory, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread

from aioengine.errors import EngineError, MediaError, ModelLoadError
from aioengine.media_pipeline.worker_main import (
    MAGIC,
    MAX_FRAME_BYTES,
    MemoryFile,
    encode_frame,
    rebuild_error,
)
from aioengine.processors.cache.serialization import load_item
from aioengine.processors.item_work import Worked, WorkItem, describe, pack_value
from aioengine.types import Embeddings

__all__ = ["START_LIMIT_S", "WorkerDiedError", "WorkerProcess"]

START_LIMIT_S = 300.0
"""How long a worker may take to import and load its processor."""

EXIT_LIMIT_S = 5.0
"""After a worker's channel has ended, until its exit status is waited for no more."""

# One core each: the workers are what runs side by side.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ENVIRONMENT = {"PYTHONSAFEPATH": "1", **dict.fromkeys(_THREADS, "1")}

Result = TypeVar("Result")


class WorkerDiedError(Exception):
    """A worker is dead or was killed; `has_begun`: after it had taken up the item."""

    def __init__(self, reason: str, *, has_begun: bool = False) -> None:
        super().__init__(reason)
        self.has_begun = has_begun


class _Channel(asyncio.SubprocessProtocol):
    """A worker's messages as they come, and its end."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.has_ended = False
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self._on_end = on_end
        self._buffer = bytearray()
        self._is_greeted = False
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None after the last."""
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)  # for who asks again
        return message

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by the loop."""
        self._buffer += data
        if not self._is_greeted:
            _, found, after = self._buffer.partition(MAGIC)
            if not found:
                return
            self._is_greeted, self._buffer = True, after
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from(">I", self._buffer)
            if length > MAX_FRAME_BYTES:
                return self._end()
            if len(self._buffer) < 4 + length:
                return
            try:
                self._messages.put_nowait(json.loads(self._buffer[4 : 4 + length]))
            except ValueError:
                return self._end()
            del self._buffer[: 4 + length]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Called by the loop."""
        if fd == 1:
            self._end()

    def process_exited(self) -> None:
        """Called by the loop, perhaps before the last message was read."""
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop, once both pipes are closed and the process is gone."""
        self.closed.set()
        self._end()

    def _end(self) -> None:
        self.has_ended = True
        self._messages.put_nowait(None)
        self._on_end()


class WorkerProcess:
    """A worker process with its channel and its memory. Has one item at a time."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        channel: _Channel,
        memory: MemoryFile,
        limit_s: float,
        threads: anyio.CapacityLimiter,
    ) -> None:
        self.process_id = transport.get_pid()
        self.wake = asyncio.Event()
        self._transport = transport
        self._channel = channel
        self._memory = memory
        self._limit_s = limit_s
        self._threads = threads

    @classmethod
    async def spawn(
        cls, limit_s: float, threads: anyio.CapacityLimiter, on_end: Callable[[], None]
    ) -> WorkerProcess:
        """A new process, which waits for `prepare`. Raises ModelLoadError."""
        # A frozen application is its own executable, and would start itself again.
        if sys.platform == "win32" or not sys.executable or hasattr(sys, "frozen"):
            raise ModelLoadError(
                'processor_workers="process:N" needs a POSIX system and a Python interpreter; use '
                '"thread:N"'
            )
        try:
            memory = MemoryFile(_open_memory())
        except OSError as error:
            raise ModelLoadError(f"no memory file for a processor worker: {error}") from error
        try:
            transport, channel = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Channel(on_end),
                *(sys.executable, "-m", "aioengine.media_pipeline.worker_main", str(memory.fd)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=(memory.fd,),
                # A Ctrl-C in the host's terminal is the host's to handle.
                start_new_session=True,
            )
        except BaseException as error:
            memory.close()
            if isinstance(error, OSError):
                raise ModelLoadError(f"a processor worker could not start: {error}") from error
            raise
        return cls(transport, channel, memory, limit_s, threads)

    @property
    def has_ended(self) -> bool:
        """Return whether it will answer no more."""
        return self._channel.has_ended

    async def prepare(self, setup: bytes) -> None:
        """Has it make its processor. Raises ModelLoadError."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                self._post(setup)
                answer = await self._receive()
        except TimeoutError:
            message = f"a processor worker did not start within {START_LIMIT_S:g} s"
            raise ModelLoadError(message) from None
        except WorkerDiedError as death:
            message = f"a processor worker could not start: {death}; see its standard error"
            raise ModelLoadError(message) from None
        if "ready" not in answer:
            error = rebuild_error(answer)
            raise ModelLoadError(f"a processor worker could not start: {error}") from error

    async def work(self, work: WorkItem) -> Worked:
        """One item. Raises its errors, and WorkerDiedError."""
        began, has_begun = time.perf_counter(), False
        job = await self._in_thread(self._hand_over, work)
        try:
            async with asyncio.timeout(self._limit_s):
                self._post(job)
                await self._receive()
                has_begun = True
                answer = await self._receive(has_begun=True)
        except TimeoutError:
            self.kill()
            reason = f"it took longer than {self._limit_s:g} s"
            raise WorkerDiedError(reason, has_begun=has_begun) from None
        try:
            return await self._in_thread(self._take_back, answer, began)
        except (KeyError, TypeError, ValueError, OSError) as error:
            self.kill()
            raise EngineError("a worker process gave an answer that cannot be read") from error

    def kill(self) -> None:
        """Ends it at once; may be called at any time, more than once."""
        with suppress(ProcessLookupError):
            self._transport.kill()

    async def aclose(self) -> None:
        """Ends it, and waits until nothing of it is left."""
        self.kill()
        try:
            await self._channel.exited.wait()
            self._transport.close()
            await self._channel.closed.wait()
        finally:
            self._transport.close()
            self._memory.close()

    def _hand_over(self, work: WorkItem) -> bytes:
        """Puts the content into the memory; the message that goes with it."""
        try:
            kind, meta, buffers = describe(work.source)
            num_bytes = self._memory.write(buffers)
            if not isinstance(work.source, Embeddings):
                # What the application may change is a copy from here on.
                work.source.verify()
        except BaseException as error:
            self._memory.trim()
            if isinstance(error, MediaError):
                raise error.for_parameter(work.parameter) from error
            raise
        job: dict[str, Any] = {"kind": kind, "meta": meta, "num_bytes": num_bytes}
        job |= {"modality": work.modality, "index": work.index, "parameter": work.parameter}
        job["mm_kwargs"] = pack_value(dict(work.mm_kwargs), "mm_processor_kwargs")
        job["promise"] = None if work.promise is None else work.promise.pack()
        return encode_frame(job)

    def _take_back(self, answer: dict[str, Any], began: float) -> Worked:
        """The result, or the error that is the answer."""
        try:
            if "error" in answer:
                raise rebuild_error(answer)
            item = load_item(self._memory.read(int(answer["num_bytes"])))
        finally:
            self._memory.trim()
        processed = time.perf_counter()
        decoded = max(began, processed - float(answer["process_s"]))
        return Worked(item=item, began=began, decoded=decoded, processed=processed)

    def _post(self, frame: bytes) -> None:
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
        pipe.write(frame)

    async def _receive(self, *, has_begun: bool = False) -> dict[str, Any]:
        message = await self._channel.receive()
        if message is not None:
            return message
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self._channel.exited.wait()
        code = self._transport.get_returncode()
        how = "closed its channel" if code is None else f"ended with exit status {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code}"
        raise WorkerDiedError(f"its worker process {how}", has_begun=has_begun)

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)


def _open_memory() -> int:
    """Open a file in memory, without a name."""
    if sys.platform == "linux":
        fd = os.memfd_create("aioengine", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="aioengine-")
        os.unlink(path)
    return fd
