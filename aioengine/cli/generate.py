"""`aioengine generate`: one prompt, answered on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.cli.checks import check_options
from aioengine.cli.loading import new_engine, new_runner, say, started
from aioengine.cli.options import Commands, add_engine_flags, add_sampling_flags, new_parser
from aioengine.cli.prompts import (
    add_form_flags,
    add_media_flags,
    in_own_words,
    prompt_of,
    sampling_params,
    summary,
)
from aioengine.engine.prompts import PromptLike
from aioengine.errors import InvalidRequestError

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """The flags of the command."""
    parser = new_parser(
        commands,
        "generate",
        "answer one prompt on standard output",
        "A model with a chat template is given a chat message, any other the plain text.",
        "MODEL [PROMPT]",
    )
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="text; without it, or as -, it is read from standard input, unless there are media",
    )
    add_media_flags(parser)
    add_form_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the whole output, as JSON")
    parser.add_argument("--verbose", action="store_true", help="tokens and times, on stderr")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    check_options(options)
    text = options.prompt
    if text == "-" or (text is None and not options.items):
        if sys.stdin.isatty():
            sys.stderr.write("Type the prompt, and end it with Ctrl-D.\n")
        text = sys.stdin.read().removesuffix("\n")
    with new_runner() as runner:
        runner.run(_generate(options, text or ""))


async def _generate(options: argparse.Namespace, text: str) -> None:
    async with started(new_engine(options)) as engine:
        prompt = prompt_of(engine, options, text, options.items)
        params = sampling_params(engine, options)
        try:
            if options.json:
                output = await engine.generate(prompt, params)
                say(json.dumps(asdict(output), ensure_ascii=False) + "\n")
            else:
                output = await _stream(engine, prompt, params)
        except InvalidRequestError as error:
            raise in_own_words(error, options.items, 1 if options.system else 0) from error
        if options.verbose:
            sys.stderr.write(summary(output) + "\n")


async def _stream(engine: AsyncEngine, prompt: PromptLike, params: SamplingParams) -> RequestOutput:
    """Write the text as it comes."""
    async with engine.stream(prompt, params) as stream:
        async for delta in stream:
            say(delta.text)
        output = await stream.result()
    if not output.text.endswith("\n"):
        say("\n")
    return output
