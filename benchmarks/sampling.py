"""What choosing the tokens costs beside the step that makes their logits.

A decode step of the benchmark model (benchmarks/make_model.py) with 256 sequences, and the sampling
of 256 requests of every kind at once: greedy, temperature, each filter, penalties with 100 tokens
behind them, log probabilities, bias, bad words and a grammar. In pairs, medians. Last line: JSON,
with the share of the step that sampling takes; 5 % is the aim.

    python benchmarks/sampling.py [--pairs 9] [--dtype float32] [--vocab 8000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from growth import BLOCK_SIZE, decode_plan
from make_model import make_model
from transformers import AutoConfig

from aioengine.core.plan import Limits
from aioengine.execution.model_runner import ModelRunner
from aioengine.models.runtime.registry import resolve
from aioengine.sampling.logits_processors import Adjustments
from aioengine.sampling.sampler import Sampler, Sampling

CONTEXT, HISTORY = 300, 100


class AnyBut:
    """A grammar that forbids every third token."""

    def __init__(self, vocab: int) -> None:
        bits = [sum(1 << i for i in range(32) if (w * 32 + i) % 3) for w in range(-(-vocab // 32))]
        signed = [word - (1 << 32) if word >> 31 else word for word in bits]
        self._mask = torch.tensor(signed, dtype=torch.int32)

    def mask(self, token_ids: Any, output_index: int) -> torch.Tensor:
        return self._mask


def kinds(vocab: int) -> list[Callable[[int], Sampling]]:
    def adjusted(**options: Any) -> Sampling:
        return Sampling(temperature=1.0, adjustments=Adjustments(**options))

    bias = tuple((i * 7 % vocab, 1.0) for i in range(50))
    prompt = tuple(range(0, vocab, max(1, vocab // 300)))
    words = ((5,), (6, 7), (8, 9, 10))
    grammar = AnyBut(vocab)
    return [
        lambda seed: Sampling(),
        lambda seed: Sampling(temperature=0.8, seed=seed),
        lambda seed: Sampling(temperature=1.0, top_k=40, seed=seed),
        lambda seed: Sampling(temperature=1.0, top_p=0.9, seed=seed),
        lambda seed: Sampling(temperature=0.7, top_k=50, top_p=0.95, min_p=0.02, seed=seed),
        lambda seed: Sampling(temperature=1.0, min_p=0.05, seed=seed),
        lambda seed: Sampling(logprobs=5),
        lambda seed: adjusted(repetition_penalty=1.2, prompt_token_ids=prompt),
        lambda seed: adjusted(presence_penalty=0.5, frequency_penalty=0.5),
        lambda seed: adjusted(bias=bias, bad_words=words),
        lambda seed: adjusted(allowed=torch.arange(vocab // 2)),
        lambda seed: Sampling(temperature=1.0, seed=seed, constraint=grammar),
    ]


@torch.inference_mode()
def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(folder)
    dtype = getattr(torch, args.dtype)
    model = resolve(config.architectures).load(
        folder, hf_config=config, dtype=dtype, device=torch.device(args.device)
    )
    width = -(-CONTEXT // 32)
    limits = Limits(
        max_num_seqs=args.count,
        max_num_batched_tokens=args.count,
        max_model_len=CONTEXT,
        block_size=BLOCK_SIZE,
        num_blocks=width * args.count,
    )
    runner = ModelRunner(model, limits)
    make = kinds(args.vocab)
    samplings = [make[i % len(make)](i) for i in range(args.count)]
    masks = [s.constraint and s.constraint.mask((), 0) for s in samplings]
    sampler = Sampler()
    logits = torch.randn(args.count, args.vocab, dtype=dtype, device=args.device) * args.spread
    for index in range(HISTORY):  # so that penalties have something to count
        sampler.sample(logits.clone(), samplings, [index] * args.count, masks)
    times: dict[str, list[float]] = {"step": [], "sampling": []}
    for number in range(args.pairs + 1):
        begin = time.perf_counter()
        runner.step(decode_plan(number, args.count, CONTEXT)).read()
        times["step"].append(time.perf_counter() - begin)
        copy = logits.clone()
        begin = time.perf_counter()
        sampler.sample(copy, samplings, [HISTORY + number] * args.count, masks).token_ids.tolist()
        times["sampling"].append(time.perf_counter() - begin)
    return {
        **{f"{name}_ms": round(statistics.median(t[1:]) * 1e3, 2) for name, t in times.items()},
        "share": round(
            statistics.median(
                b / a for a, b in zip(times["step"][1:], times["sampling"][1:], strict=True)
            ),
            4,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--spread", type=float, default=3.0, help="of the logits")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.layers, getattr(torch, args.dtype))
        result = measure(args, Path(folder))
    print(json.dumps({"settings": vars(args), "threads": torch.get_num_threads(), **result}))


if __name__ == "__main__":
    main()
