"""What the peer benchmark and its contenders say to each other: a JSON object a line.

Every contender is a process of its own, in its own environment's Python, asked on standard input
and answering on standard output. It loads once, and between two questions it waits in a read, so
that only one contender computes at a time. Standard library only: all environments import this.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class Contender:
    """One engine behind the benchmark's questions. What it cannot do, it leaves as it is here."""

    async def load(self, **job: Any) -> Answer:
        """Import, load, be ready: `model`, `dtype`, `threads`, `kind`; answers `ready_s`."""
        raise NotImplementedError

    async def batch(self, **job: Any) -> Answer:
        """`requests` (`text`, `images`) all at once, `max_tokens` each, from bytes to tokens."""
        raise NotImplementedError

    async def lag(self, **job: Any) -> Answer:
        """How late the event loop wakes while `streams` run and `requests` arrive."""
        raise NotImplementedError

    async def clips(self, **job: Any) -> Answer:
        """Transcribe audio (`paths` of 16 kHz samples)."""
        raise NotImplementedError

    async def close(self) -> Answer:
        return {}


def serve(make: Callable[[], Contender]) -> None:
    """Answer until asked to close, or until the asker is gone."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print on standard output
    asyncio.run(_serve(make(), answers))
    os._exit(0)  # whatever threads an engine has left


async def _serve(contender: Contender, answers: io.TextIOBase) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        command = job.pop("do")
        try:
            answer = await getattr(contender, command)(**job)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error!s:.500}"}
        answers.write(json.dumps(answer) + "\n")
        if command == "close":
            return
    await contender.close()  # the asker has gone


def read_images(requests: list[dict[str, Any]]) -> list[list[bytes]]:
    """Every request's images as they would come from a client: encoded, in memory."""
    return [[Path(path).read_bytes() for path in each["images"]] for each in requests]


def decode_one(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


def decode(pool: ThreadPoolExecutor, encoded: list[list[bytes]]) -> list[list[Any]]:
    """Decoded on the pool's threads, for those who take images only."""
    flat = iter(list(pool.map(decode_one, [data for each in encoded for data in each])))
    return [[next(flat) for _ in each] for each in encoded]
