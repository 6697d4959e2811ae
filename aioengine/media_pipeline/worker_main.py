"""A process that decodes and processes media for an engine in another process.

Run as `python -m aioengine.media_pipeline.worker_main <descriptor>` by `worker_process`. Standard
input and output are the channel: frames of four bytes, their length, and JSON. Contents and results
lie in a memory file that both processes have open, the only argument; one job at a time uses it
from its start. Nothing that comes over is ever executed or unpickled.

The process ends as soon as its input does, so it outlives nobody, however its parent died.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from aioengine import errors
from aioengine.streams.thread_priority import step_back

if TYPE_CHECKING:
    from aioengine.config import MediaConfig
    from aioengine.processors.cache.serialization import Readable
    from aioengine.processors.processor import BaseMultiModalProcessor

__all__ = [
    "MAGIC",
    "MAX_FRAME_BYTES",
    "MemoryFile",
    "describe_error",
    "encode_frame",
    "main",
    "rebuild_error",
]

MAGIC = b"\0aioengine worker 1\n"
"""Written first; what an interpreter's start-up may have printed before it is passed over."""

MAX_FRAME_BYTES = 1 << 24

PARENT_CHECK_S = 5.0
GRACE_S = 10.0
"""Beyond the parent's own limit, before a stuck job ends the process if no parent does."""

# Of the whole engine a worker has nothing to say: such an error of a processor's is an EngineError.
_OF_THE_ENGINE = {"EngineClosedError", "EngineDeadError", "WrongLoopError"}
_ERRORS: dict[str, type[errors.AioEngineError]] = {
    name: getattr(errors, name) for name in errors.__all__ if name not in _OF_THE_ENGINE
}


# ---- what both sides use


def encode_frame(message: dict[str, Any]) -> bytes:
    """A message as it goes over the channel."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">I", len(text)) + text


class MemoryFile:
    """Bytes that two processes see. The system frees them when neither has them open any more.

    Thread-safe: it is not closed under a thread that copies. Raises OSError once it is closed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def write(self, buffers: Iterable[Readable]) -> int:
        """Writes buffers one behind the other, from the start; how many bytes. Raises OSError."""
        position = 0
        with self._lock:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                while view.nbytes:
                    # The system's call, not a mapping: it copies without the GIL.
                    count = os.pwrite(self.fd, view, position)
                    position, view = position + count, view[count:]
        return position

    def read(self, num_bytes: int) -> memoryview:
        """A copy of the first bytes, which may be written to. Raises OSError if there are fewer."""
        import torch

        position = 0
        with self._lock:
            if not 0 <= num_bytes <= os.fstat(self.fd).st_size:
                raise OSError("the memory file is shorter than announced")
            # Not a bytearray, which would be cleared first, with the GIL held.
            data = torch.empty(num_bytes, dtype=torch.uint8).numpy().data
            while position < num_bytes:
                count = os.preadv(self.fd, [data[position:]], position)
                if count == 0:
                    raise OSError("the memory file became shorter")
                position += count
        return data

    def trim(self) -> None:
        """Gives the memory back, until something is written again."""
        with self._lock:
            os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Lets go of the bytes, once no other thread is at them. May be called more than once."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as JSON; one that is not ours becomes what `errors.typed` makes of it.

    Of such a one the places in the code are reported as well, and never its text.
    """
    from aioengine.processors.item_work import pack_value

    known = errors.typed(error)
    name = next(kind.__name__ for kind in type(known).__mro__ if kind.__name__ in _ERRORS)
    described: dict[str, Any] = {"error": name, "message": str(known)}
    if isinstance(known, errors.InvalidRequestError):
        try:
            value = pack_value(known.value, "value")
        except errors.InvalidRequestError:
            value = type(known.value).__name__
        described |= {"parameter": known.parameter, "value": value}
    if known is not error:
        described["trace"] = errors.trace_of(error)
    return described


def rebuild_error(described: dict[str, Any]) -> errors.AioEngineError:
    """The inverse of `describe_error`; KeyError for a class that is not on the list."""
    from aioengine.processors.item_work import unpack_value

    kind, message = _ERRORS[described["error"]], str(described["message"])
    if issubclass(kind, errors.InvalidRequestError):
        value = unpack_value(described["value"])
        return kind(message, parameter=described["parameter"], value=value)
    error = kind(message)
    if "trace" in described:
        error.__cause__ = RuntimeError(f"in a worker process:\n{described['trace']}")
    return error


# ---- the process


def main() -> None:
    """Serve the parent on standard input and output until it goes away."""
    receive, send = _take_channel()
    _write_all(send, MAGIC)
    inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(receive, inbox), daemon=True).start()
    setup = inbox.get()
    step_back(setup["niceness"])
    if not sys.warnoptions:  # what libraries warn of is a client's file, and nobody reads it here
        warnings.simplefilter("ignore")
    try:
        worker = _Worker(setup, int(sys.argv[1]))
    except Exception as error:
        _write_all(send, encode_frame(describe_error(error)))
        return
    _write_all(send, encode_frame({"ready": os.getpid()}))
    while True:
        job = inbox.get()
        _write_all(send, encode_frame({"began": True}))
        _write_all(send, encode_frame(worker.work(job)))


def _take_channel() -> tuple[int, int]:
    """Standard input and output for the channel alone; what libraries print goes to the errors."""
    receive, send = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # the host has none
        os.dup2(null, 1)
    os.close(null)
    return receive, send


def _listen(fd: int, inbox: SimpleQueue[dict[str, Any]]) -> None:
    """Pass messages on, and end the process, whatever it is doing, when there are no more.

    A copy of the other end may live on in a process that the host forked: so the parent itself is
    looked for too.
    """
    parent = os.getppid()
    try:
        while True:
            while not select.select([fd], [], [], PARENT_CHECK_S)[0]:
                if os.getppid() != parent:
                    return
            head = _read_exactly(fd, 4)
            inbox.put(json.loads(_read_exactly(fd, struct.unpack(">I", head)[0])))
    except (OSError, EOFError):
        pass
    finally:
        # No clean-up: the main thread may be deep in a decoder.
        os._exit(0)


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class _Worker:
    """A processor of its own, and what jobs need beside it."""

    def __init__(self, setup: dict[str, Any], memory: int) -> None:
        from aioengine.config import MediaConfig
        from aioengine.processors.item_work import keep_to_one_thread, unpack_value

        # Behind this process's own: the host may find its classes where only it looks.
        sys.path += [entry for entry in setup["path"] if entry not in sys.path]
        self._memory = MemoryFile(memory)
        self._limit_s = float(setup["limit_s"])
        self._config: MediaConfig = MediaConfig(**unpack_value(setup["media"]))
        keep_to_one_thread()
        self._processor = _make_processor(setup)

    def work(self, job: dict[str, Any]) -> dict[str, Any]:
        """Build the answer: how many bytes the result has and how long it took, or the error."""
        # A watchdog that needs no GIL, for a job that is stuck with it when the parent dies.
        with open(os.devnull, "w") as null:
            faulthandler.dump_traceback_later(self._limit_s + GRACE_S, exit=True, file=null)
            try:
                return self._work(job)
            except Exception as error:
                return describe_error(error)
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _work(self, job: dict[str, Any]) -> dict[str, Any]:
        from dataclasses import replace

        from aioengine.processors.cache.serialization import item_parts
        from aioengine.processors.item_work import (
            Described,
            Promise,
            WorkItem,
            rebuild,
            unpack_value,
            work_item,
        )

        promise = job["promise"]
        work = WorkItem(
            source=None,
            modality=job["modality"],
            index=job["index"],
            parameter=job["parameter"],
            mm_kwargs=unpack_value(job["mm_kwargs"]),
            promise=None if promise is None else Promise.unpack(promise),
        )
        content = self._memory.read(job["num_bytes"])
        described = Described(job["kind"], job["meta"], [content])
        source = rebuild(described, work, self._config, self._processor)
        worked = work_item(self._processor, replace(work, source=source))
        num_bytes = self._memory.write(item_parts(worked.item))
        return {"num_bytes": num_bytes, "process_s": time.perf_counter() - worked.decoded}


def _make_processor(setup: dict[str, Any]) -> BaseMultiModalProcessor:
    """Load as loader.py does, but for the weights, of the very classes the engine has."""
    from transformers import AutoConfig

    from aioengine.processors.info import load_context
    from aioengine.processors.item_work import unpack_value

    processor, info, dummy_inputs = (_find(*names) for names in setup["classes"])
    options = {name: setup[name] for name in ("revision", "trust_remote_code")}
    own = setup["config_class"]
    config_class = AutoConfig if own is None else _find(*own)
    context = load_context(
        setup["source"],
        hf_config=config_class.from_pretrained(setup["source"], **options),
        info=info,
        limit_mm_per_prompt=setup["limit_mm_per_prompt"],
        mm_processor_kwargs=unpack_value(setup["mm_processor_kwargs"]),
        **options,
    )
    context.model = setup["model"]
    family_info = info(context)
    found: BaseMultiModalProcessor = processor(family_info, dummy_inputs(family_info))
    return found


def _find(module: str, qualified_name: str) -> Any:
    return attrgetter(qualified_name)(importlib.import_module(module))


if __name__ == "__main__":
    main()
