"""How much faster one attention backend is than another, on shapes of a small served model.

    python benchmarks/attention.py [--backend cpu] [--against gather] [--pairs 15] [--dtype float32]
                                   [--heads 16 --kv-heads 8 --dim 64] [--pages int8]

Both backends run in turn in one process, so a busy machine slows both: the ratios hold where the
milliseconds do not. The last line is JSON; times are medians in milliseconds, ratios are medians
over the pairs of the other's time / the backend's. `--dtype bfloat16 --against gather` tells what
an application would get from PyTorch alone; `--against cpu --pages int8` what keys and values in 8
bits cost, which only the first backend has then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata, select_backend
from aioengine.kernels.metadata import build_metadata
from aioengine.kernels.pool import pack_rows

BLOCK_SIZE = 32
CASES: dict[str, list[tuple[int, int]]] = {
    "decode_16x300": [(299, 300)] * 16,
    "decode_16x100to500": [(100 + 25 * i, 101 + 25 * i) for i in range(16)],
    "prefill_512_of_1536": [(1024, 1536)],
    "prefill_512_first": [(0, 512)],
    "mixed": [(299, 300)] * 8 + [(0, 256)],
    "decode_1x8000": [(7999, 8000)],
    "decode_64x1000": [(999, 1000)] * 64,
}


def make_step(
    chunks: Sequence[tuple[int, int]], args: argparse.Namespace
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, Tensor, Tensor]:
    """Query, new keys, new values, metadata and the caches of one layer, shuffled blocks."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    counts = [-(-end // BLOCK_SIZE) for _, end in chunks]
    blocks = list(range(sum(counts)))
    random.Random(0).shuffle(blocks)
    numel = BLOCK_SIZE * args.kv_heads * args.dim
    # Four layers in a page, as in a pool: a layer's blocks are not next to each other.
    pool = torch.randn(len(blocks), 8 * numel).to(dtype).to(device)
    shape = (len(blocks), args.kv_heads, BLOCK_SIZE, args.dim)
    meta = build_metadata(
        block_size=BLOCK_SIZE,
        block_tables=[[blocks.pop() for _ in range(count)] for count in counts],
        starts=[start for start, _ in chunks],
        ends=[end for _, end in chunks],
        device=device,
    )
    new = torch.randn(3, meta.num_tokens, args.heads, args.dim).to(dtype).to(device)
    return (
        new[0],
        new[1, :, : args.kv_heads].contiguous(),
        new[2, :, : args.kv_heads].contiguous(),
        meta,
        pool[:, :numel].view(shape).transpose(1, 2),
        pool[:, numel : 2 * numel].view(shape).transpose(1, 2),
    )


def in_bytes(caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same rows in 8 bits, four layers in a page likewise."""
    rows = [pack_rows(each.transpose(1, 2).contiguous()) for each in caches]
    count, kv_heads, block_size, size = rows[0].shape
    numel = kv_heads * block_size * size
    pool = torch.zeros(count, 8 * numel, dtype=rows[0].dtype)
    for index, each in enumerate(rows):
        pool[:, index * numel : (index + 1) * numel] = each.flatten(1)
    key, value = (
        pool[:, index * numel : (index + 1) * numel]
        .view(count, kv_heads, block_size, size)
        .transpose(1, 2)
        for index in range(2)
    )
    return key, value


def elapsed_ms(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def compare(chunks: Sequence[tuple[int, int]], args: argparse.Namespace) -> dict[str, float]:
    """One case: layers of a step through both backends, in alternating order."""
    query, key, value, meta, key_cache, value_cache = make_step(chunks, args)
    layer = AttentionArgs(args.dim**-0.5)

    def step(name: str, caches: tuple[Tensor, Tensor]) -> Callable[[], None]:
        backend = select_backend(name)

        def run() -> None:
            # What is derived once a step is derived again, for four layers.
            fresh = replace(meta, scratch={})
            for _ in range(4):
                backend.attend(query, caches, fresh, layer, new=(key, value))

        return run

    plain = key_cache, value_cache
    own = plain if args.pages == "auto" else in_bytes(plain)
    own_name = args.backend if args.pages == "auto" else f"{args.backend}_{args.pages}"
    runs = {own_name: step(args.backend, own), args.against: step(args.against, plain)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(-2, args.pairs):
        for name in sorted(runs, reverse=pair % 2 == 0):
            spent = elapsed_ms(runs[name], args.device) / 4
            if pair >= 0:
                times[name].append(spent)
    ratios = [other / own for other, own in zip(times[args.against], times[own_name], strict=True)]
    return {
        f"{own_name}_ms": round(statistics.median(times[own_name]), 3),
        f"{args.against}_ms": round(statistics.median(times[args.against]), 3),
        "ratio": round(statistics.median(ratios), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--against", default="gather")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--pages", choices=("auto", "int8"), default="auto")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        results = {name: compare(chunks, args) for name, chunks in CASES.items()}
    for name, result in results.items():
        print(f"{name:22s} {result}")
    print(json.dumps({"settings": vars(args), "per_layer": results}))


if __name__ == "__main__":
    main()
