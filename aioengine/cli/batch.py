"""`aioengine batch`: a file of requests, answered into another, and gone on with after a stop."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aioengine import AsyncEngine
from aioengine.cli.batch_lines import MAX_LINE_BYTES, LineForm, digest_of, form_of
from aioengine.cli.checks import check_options
from aioengine.cli.loading import new_engine, new_runner, started
from aioengine.cli.options import (
    Commands,
    add_engine_flags,
    add_sampling_flags,
    checked,
    decimal,
    new_parser,
)
from aioengine.cli.prompts import add_form_flags
from aioengine.engine.bulk import Window, map_bounded, new_window
from aioengine.errors import InvalidRequestError

__all__ = ["add_parser", "run"]

ANSWER_HEAD = b'{"id": "line-'
"""How an answer begins, by which half of one is told from somebody's notes."""
LINE_ID = re.compile(r"line-(\d{1,18})-([0-9a-f]+)")


def add_parser(commands: Commands) -> None:
    """The flags of the command."""
    parser = new_parser(
        commands,
        "batch",
        "answer a file of requests",
        'A line of IN is a request: {"prompt": "What is this?", "images": ["a.png"]}, with '
        "messages in place of a prompt, or with sampling parameters beside it; or a line of "
        "OpenAI's batch files. Files lie in the folder of IN, or in --local-roots. OUT gets one "
        "line for each, in the same order. After a stop the same command goes on where it was.",
        "MODEL IN OUT",
    )
    parser.add_argument("source", metavar="IN", type=Path, help="a file of JSON lines")
    parser.add_argument("target", metavar="OUT", type=Path, help="the file that the answers go to")
    parser.add_argument(
        "--as-completed", action="store_true", help="write answers as they come, in any order"
    )
    parser.add_argument(
        "--max-in-flight",
        type=checked(decimal, lambda number: number > 0, "a number of 1 or more"),
        metavar="N",
        help="requests that are live at once (default: 2 x max_num_seqs)",
    )
    add_form_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    check_options(options)
    source, target = options.source, options.target
    for name, path in (("IN", source), ("OUT", target)):
        if str(path) == "-":
            message = f"{name} must be a file: a command that is stopped goes on where it was"
            raise InvalidRequestError(message, parameter=name)
    if not source.is_file():
        raise InvalidRequestError(f"there is no file {str(source)!r}", parameter="IN")
    if target.exists() and target.samefile(source):
        raise InvalidRequestError("OUT is the file of the requests", parameter="OUT")
    options.local_roots = [*getattr(options, "local_roots", ()), str(source.parent.resolve())]
    engine = new_engine(options)
    with ExitStack() as stack:
        answers = Answers(stack.enter_context(_opened(target)), target)
        work = answers.match(source)
        if not work.num_left:
            sys.stderr.write(f"all {work.num_lines} lines are answered\n")
            return
        if work.num_lines != work.num_left:
            sys.stderr.write(f"going on: {work.num_lines - work.num_left} lines are answered\n")
        with new_runner() as runner:
            runner.run(_answer(engine, options, work, answers))


class Line(NamedTuple):
    """A request of a file: its number, from 1 on, and its bytes."""

    number: int
    text: bytes


class Work(NamedTuple):
    """Requests of a file: how many, how many are left, their form, and which are answered."""

    source: Path
    num_lines: int
    num_left: int
    form: type[LineForm]
    answered: dict[int, str]

    def lines(self) -> Iterator[Line]:
        """Iterate over those that are left."""
        return (line for line in _lines(self.source) if line.number not in self.answered)


class Answers:
    """The file of the answers: whole lines, of which no other process writes any meanwhile."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path

    def match(self, source: Path) -> Work:
        """Find what is left to be done. Raises InvalidRequestError for answers of another file."""
        answered, end = self._read()
        unmatched = dict(answered)
        num_lines, form = 0, None
        for line in _lines(source):
            num_lines += 1
            form = form or form_of(line.text)
            if unmatched.pop(line.number, digest := digest_of(line.text)) != digest:
                unmatched[line.number] = ""
                break
        if unmatched:
            message = (
                f"OUT answers another line {min(unmatched)} than IN has; name another file for the "
                "answers, or remove it"
            )
            raise InvalidRequestError(message, parameter="OUT")
        if form is None:
            raise InvalidRequestError("IN has no requests", parameter="IN")
        self._file.truncate(end)
        return Work(source, num_lines, num_lines - len(answered), form, answered)

    def write(self, line: bytes) -> None:
        """Add an answer; it is in the file when this returns. Raises InvalidRequestError."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise _not_written(self._path, error) from error

    def _read(self) -> tuple[dict[int, str], int]:
        """Number -> digest of the lines that are answered, and where half an answer begins."""
        answered: dict[int, str] = {}
        end = 0
        with open(self._path, "rb") as file:
            for line in file:
                name = None
                if not line.endswith(b"\n") and _begins_alike(line, ANSWER_HEAD):
                    break
                with suppress(ValueError, TypeError, KeyError, RecursionError):
                    name = LINE_ID.fullmatch(json.loads(line)["id"])
                if name is None:
                    message = (
                        "OUT holds other lines than answers of this command; name another file, or "
                        "remove it"
                    )
                    raise InvalidRequestError(message, parameter="OUT")
                answered[int(name[1])] = name[2]
                end += len(line)
        return answered, end


async def _answer(
    engine: AsyncEngine, options: argparse.Namespace, work: Work, answers: Answers
) -> None:
    async with started(engine):
        form = work.form(engine, options)
        window: Window[asyncio.Task[bytes]] = new_window(
            engine.config, None, options.max_in_flight, is_ordered=not options.as_completed
        )
        begin, num_done = time.perf_counter(), 0
        console = Console(stderr=True)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        results = map_bounded(lambda line: form.answer(*line), work.lines(), window)
        try:
            with bar:
                num_before = work.num_lines - work.num_left
                task = bar.add_task("answering", total=work.num_lines, completed=num_before)
                async with aclosing(results):
                    async for _, answered in results:
                        answers.write(answered.result())
                        num_done += 1
                        bar.advance(task)
        finally:
            took = time.perf_counter() - begin
            left = work.num_left - num_done
            text = f"{num_done} lines in {took:.1f} s, {num_done / max(took, 1e-9):.1f} a second"
            failed = f", {form.num_failed} with an error" if form.num_failed else ""
            more = f"; {left} are left for the same command" if left else ""
            sys.stderr.write(f"{text}{failed}{more}\n")


def _opened(path: Path) -> BinaryIO:
    """The file, to be added to without a buffer, by one process at a time."""
    if path.exists() and not path.is_file():
        message = f"OUT must be a file, which {str(path)!r} is not"
        raise InvalidRequestError(message, parameter="OUT")
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise _not_written(path, error) from error
    with suppress(ModuleNotFoundError):  # Windows
        fcntl = import_module("fcntl")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            message = f"another process writes answers to {str(path)!r}"
            raise InvalidRequestError(message, parameter="OUT") from error
    return file


def _not_written(path: Path, error: OSError) -> InvalidRequestError:
    message = f"{str(path)!r} cannot be written: {error.strerror}"
    return InvalidRequestError(message, parameter="OUT")


def _begins_alike(one: bytes, other: bytes) -> bool:
    """Return whether the shorter is how the longer begins."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank; of one that is too long, what shows that it is."""
    with open(path, "rb") as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = text
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
            if text.strip():
                yield Line(number, text)
            del text, rest
