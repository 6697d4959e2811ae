"""Whether requests keep every bit while other processes take the cores and threads stop at random.

    python benchmarks/same_bits.py MODEL [MODEL ...] --seconds 3600

`MODEL` is a folder with weights; `FOLDER:int4` and `FOLDER:int8` make weights of few bits of them.
Each prompt runs alone on an idle machine first. Then come waves of random company beside one to
four spinning processes, and one thread of ours after another loses its share of the cores to
these, whatever part of a product it holds. The last line is JSON; exit status 1 where bits differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from neighbours import processes

from aioengine import AsyncEngine, RequestOutput, SamplingParams

WORDS = ("the", "a", "of", "river", "stone", "light", "under", "because", "seven", "12", "(", ",")
COMPANY = (1, 2, 5, 16, 32)
NUM_PROMPTS, NUM_TOKENS, WAVES_PER_ENGINE = 12, 24, 4


def bits(output: RequestOutput) -> Any:
    return output.token_ids, output.outputs[0].logprobs


@contextlib.asynccontextmanager
async def threads_that_stop(chance: random.Random, counts: dict[str, int]) -> AsyncIterator[None]:
    """Meanwhile, a thread at a time gets only what other processes leave of the cores."""

    async def stop() -> None:
        while True:
            thread = int(chance.choice(os.listdir("/proc/self/task")))
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                counts["stops"] += 1
            try:
                await asyncio.sleep(chance.uniform(0.001, 0.1))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))

    task = asyncio.create_task(stop())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def soak(model: str, until: float, chance: random.Random, counts: dict[str, int]) -> None:
    """One engine's waves."""
    folder, _, method = model.partition(":")
    options: dict[str, Any] = {"max_num_batched_tokens": chance.choice((64, 2048))}
    if method:
        options["quantization"] = method
    lengths = [int(3 * 100 ** chance.random()) for _ in range(NUM_PROMPTS)]
    texts = [" ".join(chance.choices(WORDS, k=length)) for length in lengths]
    async with AsyncEngine.from_pretrained(folder, max_model_len=2048, **options) as engine:

        async def ask(number: int, max_tokens: int) -> Any:
            params = SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2
            )
            return bits(await engine.generate(texts[number], params))

        alone = []
        for number in range(NUM_PROMPTS):
            alone.append(await ask(number, NUM_TOKENS))
            await engine.reset_caches()
        with processes(chance.randint(1, 4)):
            async with threads_that_stop(chance, counts):
                for _ in range(WAVES_PER_ENGINE):
                    asked = [
                        (chance.randrange(NUM_PROMPTS), chance.randint(1, NUM_TOKENS))
                        for _ in range(chance.choice(COMPANY))
                    ]
                    found = await asyncio.gather(*(ask(*each) for each in asked))
                    for (number, count), (ids, logprobs) in zip(asked, found, strict=True):
                        if (ids, logprobs) != tuple(each[:count] for each in alone[number]):
                            counts["different"] += 1
                            print("different:", model, options, texts[number], file=sys.stderr)
                        counts["requests"] += 1
                        counts["tokens"] += len(ids)
                    if time.monotonic() > until:
                        break


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, until = random.Random(options.seed), time.monotonic() + options.seconds
    counts = dict.fromkeys(("requests", "tokens", "stops", "different"), 0)
    while time.monotonic() < until:
        asyncio.run(soak(chance.choice(options.models), until, chance, counts))
        print(counts, file=sys.stderr, flush=True)
    print(json.dumps(counts))
    sys.exit(counts["different"] > 0)


if __name__ == "__main__":
    main()
