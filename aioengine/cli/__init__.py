"""The command line: serve a model, ask it, talk to it, measure it, or see the demo."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from aioengine import __version__
from aioengine.cli import batch, bench, chat, demo, generate, serve
from aioengine.cli.options import CommandParser
from aioengine.errors import AioEngineError

__all__ = ["main", "run"]

INTERRUPTED, BROKEN_PIPE = 130, 141
"""What a shell reports of a program that SIGINT or SIGPIPE has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except AioEngineError as error:
        sys.stderr.write(f"aioengine: {error}\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has read enough; the interpreter would flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0


def run() -> NoReturn:
    """Run `main` as this process.

    After an interrupt the process leaves without waiting: a load cannot be stopped, and its threads
    would be waited for, or abort the process from native code that finds the interpreter gone.
    """
    try:
        status = main()
    except KeyboardInterrupt:  # a further one, while the first was dealt with
        status = INTERRUPTED
    if status == INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aioengine",
        description="An inference engine for multimodal models.",
        epilog="Each command has its own --help; docs/command_line.md tells more.",
    )
    parser.add_argument("--version", action="version", version=f"aioengine {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for command in (serve, generate, chat, batch, bench, demo):
        command.add_parser(commands)
    return parser
