"""Attention in Triton on a GPU: how near it comes to the reference there, and how fast it reads.

A stage of gpu.py. Errors are those of the reference in float32 over the same numbers, as a part of
the largest of its results. A rate is the bytes of all keys and values by the time of a launch, of
which twenty are captured together, so that the host's part is not in it.
"""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from aioengine.execution.graphs import capture_on
from aioengine.kernels.attention import AttentionArgs, AttentionMetadata
from aioengine.kernels.metadata import build_metadata
from aioengine.kernels.reference import ReferenceBackend

__all__ = ["measure_kernels"]

PAGE = 32
HEADS = {"Llama 8B": (32, 8, 128), "Qwen2 7B": (28, 4, 128), "Qwen2 0.5B": (14, 2, 64)}
HEADS |= {"Gemma 3 4B": (8, 4, 256), "Phi 2": (32, 32, 80)}
CHUNKS = {
    "decode": [(n, n + 1) for n in (0, 31, 299, 1500, 4000)],
    "prefill": [(0, 700), (64, 200), (0, 1), (1000, 1300)],
    "mixed": [(299, 300), (1200, 1201), (0, 513), (77, 90)],
}
MASKS: dict[str, dict[str, Any]] = {"": {}, "window": {"window": 100}, "softcap": {"softcap": 30.0}}
CALLS = 20


def batch(
    heads: tuple[int, int, int], chunks: list[tuple[int, int]], device: torch.device
) -> tuple[Tensor, tuple[Tensor, Tensor], AttentionMetadata]:
    """Queries, pages with all keys and values, and the metadata, in float32."""
    num_heads, kv_heads, dim = heads
    counts = [-(-end // PAGE) for _, end in chunks]
    order = iter(torch.randperm(sum(counts)).tolist())
    tables = [[next(order) for _ in range(count)] for count in counts]
    meta = build_metadata(
        block_size=PAGE,
        block_tables=tables,
        starts=[start for start, _ in chunks],
        ends=[end for _, end in chunks],
        device=device,
    )
    size = sum(counts), PAGE, kv_heads, dim
    keys, values = (torch.randn(size, device=device) for _ in range(2))
    query = torch.randn(meta.num_tokens, num_heads, dim, device=device)
    return query, (keys, values), meta


def errors(device: torch.device, *, is_tiny: bool) -> list[dict[str, Any]]:
    """The largest error of each case, in bfloat16 and float16."""
    from aioengine.kernels.triton.backend import TritonBackend

    found = []
    names = [*HEADS][:1] if is_tiny else [*HEADS]
    for name, step, mask in itertools.product(names, CHUNKS, MASKS):
        chunks = [(a // 50, a // 50 + max(1, (b - a) // 50)) for a, b in CHUNKS[step]]
        query, pages, meta = batch(HEADS[name], chunks if is_tiny else CHUNKS[step], device)
        args = AttentionArgs(HEADS[name][2] ** -0.5, **MASKS[mask])
        for dtype in (torch.bfloat16, torch.float16):
            given = query.to(dtype), (pages[0].to(dtype), pages[1].to(dtype))
            # Of the rounded numbers, in float32.
            exact = given[0].float(), (given[1][0].float(), given[1][1].float())
            expected = ReferenceBackend().attend(*exact, meta, args)
            got = TritonBackend().attend(*given, meta, args).float()
            error = ((got - expected).abs().max() / expected.abs().max()).item()
            error = error if math.isfinite(error) else math.inf
            row = {"model": name, "step": step, "mask": mask, "dtype": str(dtype)[6:]}
            found.append({**row, "error": error, "is_finite": bool(got.isfinite().all())})
    return found


def rates(device: torch.device, bytes_per_s: float, *, is_tiny: bool) -> list[dict[str, Any]]:
    """Decode steps' attention: microseconds, and the share of a copy's rate."""
    from aioengine.kernels.triton.backend import TritonBackend

    found = []
    sizes = [(1, 64)] if is_tiny else [*itertools.product((1, 8, 32, 128), (1024, 4096, 16384))]
    for name, (requests, context) in itertools.product([*HEADS][: 1 if is_tiny else 3], sizes):
        _, kv_heads, dim = HEADS[name]
        total = 2 * 2 * requests * context * kv_heads * dim
        if total > 4 << 30:
            continue
        chunks = [(context - 1, context)] * requests
        query, pages, meta = batch(HEADS[name], chunks, device)
        query, keys, values = (each.to(torch.bfloat16) for each in (query, *pages))
        backend, args = TritonBackend(), AttentionArgs(dim**-0.5)

        def calls(given: Any = (query, (keys, values), meta, args)) -> None:
            for _ in range(CALLS):
                backend.attend(*given)  # noqa: B023 - called below

        seconds = time_of(device, calls) / CALLS
        row = {"model": name, "requests": requests, "context": context}
        row |= {"us": round(seconds * 1e6, 1), "tb_per_s": round(total / seconds / 1e12, 2)}
        found.append({**row, "of_copy": round(total / seconds / bytes_per_s, 2)})
        print(found[-1], flush=True)
        del query, keys, values, pages, calls
    return found


def time_of(device: torch.device, calls: Any) -> float:
    """The median of a replay's seconds; on a CPU, of a call's."""
    import time

    capture = capture_on(device)
    if capture is None:
        begin = time.perf_counter()
        calls()
        return time.perf_counter() - begin
    times = []
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.inference_mode():
        calls()
        graph, _ = capture.capture(calls)
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def measure_kernels(report: Any) -> None:
    """See above."""
    if find_spec("triton") is None:
        report.found["kernels"] = "Triton is not installed"
        print(report.found["kernels"], flush=True)
        return
    found = errors(report.device, is_tiny=report.is_tiny)
    worst = {
        dtype: max(row["error"] for row in found if row["dtype"] == dtype)
        for dtype in ("bfloat16", "float16")
    }
    print("largest errors:", worst, flush=True)
    bad = [row for row in found if not row["is_finite"]]
    report.found["kernels"] = {
        "cases": len(found),
        "largest_error": worst,
        "not_finite": bad,
        "rates": rates(report.device, report.bytes_per_s, is_tiny=report.is_tiny),
    }
