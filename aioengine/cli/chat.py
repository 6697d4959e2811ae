"""`aioengine chat`: a conversation on the terminal.

The loop runs while an answer is written, and rests while a line is typed: `input()` stays on the
main thread, where line editing and Ctrl-C work. Each answer is a run of its own, whose first Ctrl-C
cancels it and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, RequestOutput
from aioengine.cli.checks import check_items, check_options, in_flags
from aioengine.cli.loading import new_engine, new_runner, say, start
from aioengine.cli.options import (
    Commands,
    add_engine_flags,
    add_sampling_flags,
    media_item,
    new_parser,
)
from aioengine.cli.prompts import (
    MODALITIES,
    chat_message,
    in_own_words,
    sampling_params,
    summary,
    takes_messages,
)
from aioengine.errors import InvalidRequestError

__all__ = ["add_parser", "run"]

PROMPT = "> "
HELP = """\
/image FILE   an image for the next message (also /video, /audio); may be given again
/clear        forget the conversation
/save FILE    write the conversation as JSON
/help         this list
/quit         leave; so do Ctrl-D and Ctrl-C, which stops an answer while there is one
"""


def add_parser(commands: Commands) -> None:
    """The flags of the command."""
    parser = new_parser(
        commands, "chat", "talk to a model on the terminal", "/help lists what else can be typed."
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before all others")
    parser.add_argument(
        "--verbose", action="store_true", help="tokens and times of each answer, on stderr"
    )
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    check_options(options)
    engine = new_engine(options)
    with new_runner() as runner:
        try:
            _converse(runner, runner.run(_begin(engine, options)))
        finally:
            runner.run(engine.aclose())


async def _begin(engine: AsyncEngine, options: argparse.Namespace) -> Conversation:
    await start(engine)
    return Conversation(engine, options)


def _converse(runner: asyncio.Runner, conversation: Conversation) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with suppress(ImportError):  # not on every platform
            import_module("readline")
        sys.stdout.write("/help lists the commands.\n")
    while True:
        try:
            line = input(PROMPT if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            break
        if line.startswith("/"):
            if not conversation.obey(line):
                return
        elif line.strip() or conversation.items:
            runner.run(conversation.answer(line))
    if is_terminal:
        sys.stdout.write("\n")


class Conversation:
    """Conversation so far, and the media that go with the next message."""

    def __init__(self, engine: AsyncEngine, options: argparse.Namespace) -> None:
        """Raises InvalidRequestError where there is nobody to talk to."""
        if not takes_messages(engine):
            message = "the model has no chat template to talk to it with; use `aioengine generate`"
            raise InvalidRequestError(message, parameter="model")
        self.items: list[tuple[str, str | Path]] = []
        self._engine = engine
        self._params = sampling_params(engine, options)
        self._is_verbose = options.verbose
        self._system = [{"role": "system", "content": options.system}] if options.system else []
        self._messages: list[dict[str, Any]] = [*self._system]
        self._commands: dict[str, Callable[[str], object]] = {
            "/clear": self._clear,
            "/save": self._save,
            "/help": lambda _: sys.stdout.write(HELP),
        }

    def obey(self, line: str) -> bool:
        """Do what a line that begins with a slash says; False to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name[1:] in MODALITIES:
            self._attach(name[1:], rest.strip())
        elif name in self._commands:
            self._commands[name](rest.strip())
        else:
            sys.stdout.write(f"there is no {name}; /help lists the commands\n")
        return True

    def _attach(self, modality: str, text: str) -> None:
        if not text:
            sys.stdout.write(f"name a file or a URL: /{modality} FILE\n")
            return
        try:
            item = modality, media_item(text)
            check_items([item], self._engine.config.media)
        except (argparse.ArgumentTypeError, InvalidRequestError) as error:
            sys.stdout.write(f"{error}\n")
        else:
            self.items.append(item)

    def _clear(self, _: str) -> None:
        self._messages = [*self._system]
        self.items.clear()

    def _save(self, text: str) -> None:
        try:
            Path(text).expanduser().write_text(json.dumps(self._messages, default=str, indent=2))
        except OSError as error:
            sys.stdout.write(f"{text!r} cannot be written: {error.strerror}\n")

    async def answer(self, line: str) -> None:
        """One turn. What cannot be answered is reported and forgotten; what was stopped is kept as
        far as it came."""
        items, self.items = self.items, []
        messages = [*self._messages, chat_message(line, items)]
        try:
            text, output = await self._stream(messages)
        except InvalidRequestError as error:
            reason = in_flags(in_own_words(error, items, len(self._messages)))
            sys.stdout.write(f"{reason}\nThe message is not part of the conversation.\n")
            return
        if text or output is not None:  # else it was stopped before it began
            self._messages = [*messages, {"role": "assistant", "content": text}]
        if self._is_verbose and output is not None:
            sys.stderr.write(summary(output) + "\n")

    async def _stream(self, messages: list[dict[str, Any]]) -> tuple[str, RequestOutput | None]:
        """The answer, written as it comes, and its output if it was not stopped."""
        text, output = "", None
        try:
            async with self._engine.stream(messages, self._params) as stream:
                async for delta in stream:
                    text += delta.text
                    say(delta.text)
                output = await stream.result()
        except asyncio.CancelledError:  # Ctrl-C; leaving the stream has ended the request
            sys.stdout.write(" ...")
        say("\n")
        return text, output
