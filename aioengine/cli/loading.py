"""An engine of the command line's: its loop, its start with progress shown, its end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from aioengine import AsyncEngine, LoadProgress
from aioengine.cli.options import engine_config
from aioengine.errors import InvalidRequestError
from aioengine.streams.loop_thread import new_runner

__all__ = ["new_engine", "new_runner", "say", "start", "started"]

STAGES = {
    "libraries": "importing torch and transformers",
    "processor": "reading settings and tokenizer",
    "weights": "loading weights",
    "memory": "measuring memory",
    "workers": "starting workers",
}


def say(text: str) -> None:
    """Write it to standard output at once. Raises InvalidRequestError where that is full."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left would fail at the end again
        message = f"standard output cannot be written: {error.strerror}"
        raise InvalidRequestError(message, parameter="stdout") from error


def new_engine(options: argparse.Namespace) -> AsyncEngine:
    """The engine that the flags describe, not started. Raises InvalidRequestError."""
    return AsyncEngine.from_pretrained(options.model, config=engine_config(options))


@asynccontextmanager
async def started(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    """The engine, from its start to its end."""
    try:
        await start(engine)
        yield engine
    finally:
        await engine.aclose()


async def start(engine: AsyncEngine) -> None:
    """Start it, with progress on standard error: a bar on a terminal, and a line at the end."""
    console = Console(stderr=True)
    begin = time.perf_counter()
    with _display(console) as show:
        await engine.start(progress=show)
    took = time.perf_counter() - begin
    console.print(f"loaded in {took:.2f} s", highlight=False)


@contextmanager
def _display(console: Console) -> Iterator[Callable[[LoadProgress], None]]:
    """One line that follows the stages and goes away at the end; nothing where nobody looks."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
    )
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    shown = ""

    def show(progress: LoadProgress) -> None:
        nonlocal shown
        if progress.stage != shown:
            shown = progress.stage
            for task in bars.task_ids:
                bars.remove_task(task)
            bars.add_task(STAGES.get(shown, shown), total=None, counted="")
        done, total = progress.done, progress.total
        if total > 1:
            counted = f"{done}/{total}"
            bars.update(bars.task_ids[-1], completed=done, total=total, counted=counted)

    with bars:
        yield show
