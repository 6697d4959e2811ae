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
from aioengine.cli.checks import in_flags
from aioengine.cli.options import CommandParser
from aioengine.errors import AioEngineError, did_you_mean

__all__ = ["main", "run"]

COMMANDS = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "batch": batch,
    "bench": bench,
    "demo": demo,
}
FIRST_STEPS = """\
first steps, with the small model that is shipped:
  aioengine demo         describe eight images side by side
  aioengine chat demo    talk to it; /image FILE shows it an image
  aioengine serve demo   OpenAI's API and a status page on http://127.0.0.1:8000

Each command has its own --help; docs/command_line.md tells more."""

INTERRUPTED, BROKEN_PIPE = 130, 141
"""What a shell reports of a program that SIGINT or SIGPIPE has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    given, parser = list(sys.argv[1:] if arguments is None else arguments), _parser()
    if not given:
        parser.print_help(sys.stderr)
        return 2
    known = {*COMMANDS, "-h", "--help", "--version"}
    if given[0] not in known:
        meant = did_you_mean(given[0], known) or f"; the commands are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {given[0]!r:.60}{meant}")
    options = parser.parse_args(given)
    try:
        options.run(options)
    except AioEngineError as error:
        sys.stderr.write(f"aioengine: {in_flags(error)}\n")
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
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aioengine {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for command in COMMANDS.values():
        command.add_parser(commands)
    return parser
