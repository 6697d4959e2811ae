"""`aioengine bench`: requests of random tokens and images, and how fast they are answered."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from operator import le
from typing import Any

from rich.console import Console

from aioengine import AsyncEngine, Prompt, SamplingParams
from aioengine.cli.loading import new_engine, new_runner, started
from aioengine.cli.options import Commands, add_engine_flags, checked, decimal, new_parser
from aioengine.cli.report import Record, Report, make_report, show_report
from aioengine.streams.together import run_together

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """The flags of the command."""
    parser = new_parser(
        commands,
        "bench",
        "measure an engine in this process",
        "Prompts are random tokens, images are random pixels, and answers are as long as they "
        "are asked to be. One request that is not counted goes first.",
    )
    for name, default, least, meaning in (
        ("num-prompts", 32, 1, "requests"),
        ("input-len", 128, 1, "tokens of text in each"),
        ("output-len", 64, 1, "tokens of each answer"),
        ("prefix-len", 0, 0, "how many of the input tokens are the same in all"),
        ("images-per-prompt", 0, 0, "images in each"),
    ):
        parser.add_argument(
            f"--{name}",
            type=checked(decimal, partial(le, least), f"a number of {least} or more"),
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--image-size",
        type=_size,
        default=(336, 336),
        metavar="WIDTHxHEIGHT",
        help="in pixels (default: 336x336)",
    )
    parser.add_argument(
        "--request-rate",
        type=checked(float, lambda rate: rate > 0, "a positive number"),
        default=math.inf,
        metavar="X",
        help="requests a second, at random moments (Poisson); inf: all at once (default)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument("--json", action="store_true", help="the last line is the report as JSON")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 640x480")
    return int(found[1]), int(found[2])


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    with new_runner() as runner:
        report = runner.run(_bench(options))
    show_report(report, Console())
    if options.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")


async def _bench(options: argparse.Namespace) -> Report:
    async with started(new_engine(options)) as engine:
        warm_up, *prompts = _prompts(engine, options)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=options.output_len)
        await engine.generate(warm_up, params)
        await engine.reset_caches()
        before, begin = engine.statistics(), time.perf_counter()
        records = await _send(engine, prompts, params, _moments(options))
        return make_report(records, time.perf_counter() - begin, before, engine.statistics())


def _prompts(engine: AsyncEngine, options: argparse.Namespace) -> list[Prompt]:
    """One to warm up with, and those that count."""
    chance = random.Random(options.seed)
    tokenizer = engine.tokenizer
    # Tokens that are text: what is added to a vocabulary may mean something to the engine.
    added = tokenizer.added_tokens_decoder
    token_ids = sorted(i for i in tokenizer.get_vocab().values() if i not in added)
    prefix = chance.choices(token_ids, k=min(options.prefix_len, options.input_len))
    placeholders: list[int] = []
    if options.images_per_prompt:
        text = engine.processor.dummy_inputs.get_dummy_text({"image": options.images_per_prompt})
        placeholders = engine.processor.tokenize(text) if text else []

    def draw() -> Prompt:
        own = chance.choices(token_ids, k=options.input_len - len(prefix))
        images = [
            _random_image(chance, *options.image_size) for _ in range(options.images_per_prompt)
        ]
        return Prompt(token_ids=[*placeholders, *prefix, *own], media={"image": images})

    return [draw() for _ in range(1 + options.num_prompts)]


def _random_image(chance: random.Random, width: int, height: int) -> Any:
    """Pixels, as a uint8 array [height, width, 3]."""
    import numpy as np  # takes a while, which --help can do without

    pixels = np.frombuffer(chance.randbytes(width * height * 3), np.uint8)
    return pixels.reshape(height, width, 3)


def _moments(options: argparse.Namespace) -> list[float]:
    """Draw when each request is sent, in seconds since the first."""
    chance = random.Random(options.seed)
    gaps = [chance.expovariate(options.request_rate) for _ in range(options.num_prompts - 1)]
    return list(accumulate(gaps, initial=0.0))


async def _send(
    engine: AsyncEngine, prompts: Sequence[Prompt], params: SamplingParams, moments: Sequence[float]
) -> list[Record]:
    first = time.perf_counter()

    async def send(prompt: Prompt, moment: float) -> Record:
        await asyncio.sleep(moment - (time.perf_counter() - first))
        begin = time.perf_counter()
        async with engine.stream(prompt, params) as stream:
            arrivals = [
                (time.perf_counter() - begin, len(delta.token_ids))
                async for delta in stream
                if delta.token_ids
            ]
            output = await stream.result()
        return Record(output.usage.prompt_tokens, arrivals)

    return await run_together(map(send, prompts, moments))
