"""Memory that steps take beside what the memory profiler claims for them, at models' real sizes.

    python benchmarks/null_memory.py [--models qwen2-7b,...] [--requests 128]

On the device of null_device.py, which counts the bytes that its tensors would have. The claim is
that of `measure_activations`, which runs the largest step; what is taken is measured as an engine
goes on from there: all steps are captured, whose memory stays theirs, and then steps of prompts and
of single tokens run, captured and launched. An allocator's own losses are not in either. Needs
Triton. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from null_device import MODELS, install, install_triton, plan_of, runner_of

from aioengine.core.plan import StepPlan
from aioengine.execution import captured_steps
from aioengine.execution.memory_profiler import measure_activations
from aioengine.execution.model_runner import ModelRunner

MIB = 1 << 20


class PoolCapture:
    """Captures nothing, and keeps account of the memory that all captures share."""

    def __init__(self) -> None:
        self.pool_bytes = 0

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """See `aioengine.execution.graphs.Capture`."""
        torch.ops.null_device.peak_bytes()
        before = torch.ops.null_device.live_bytes()
        found = work()
        self.pool_bytes = max(self.pool_bytes, torch.ops.null_device.peak_bytes() - before)
        return SimpleNamespace(replay=lambda: None), found


def stand_in() -> None:
    """Have PyTorch's statistics of memory be those of the device."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.reset_peak_memory_stats = lambda *_: torch.ops.null_device.peak_bytes()
    torch.cuda.memory_reserved = lambda *_: torch.ops.null_device.live_bytes()
    torch.cuda.max_memory_reserved = lambda *_: torch.ops.null_device.peak_bytes()


def prompts_of(plan: StepPlan, count: int, size: int) -> StepPlan:
    """The plan's sequences, of which the first `count` have so many tokens."""
    chunks = [replace(s, start=0, end=size, token_ids=(1,) * size) for s in plan.sequences[:count]]
    return StepPlan(0, (*chunks, *plan.sequences[count:]))


def measure(name: str, requests: int) -> dict[str, Any]:
    """Mebibytes claimed and taken."""
    draft, _ = runner_of(name, requests, None)
    model, limits = draft.model, draft._limits
    nothing: dict[str, Any] = {}
    info = SimpleNamespace(
        get_allowed_mm_limits=lambda: nothing,
        get_supported_mm_limits=lambda: nothing,
        get_mm_max_tokens_per_item=lambda *_: nothing,
    )
    capture: Any = PoolCapture()
    processor: Any = SimpleNamespace(info=info)
    backend = draft._backend
    claimed = measure_activations(model, processor, limits, backend, capture=capture)
    runner = ModelRunner(model, limits, backend, capture=capture)
    before = torch.ops.null_device.live_bytes()
    torch.ops.null_device.peak_bytes()
    with patch.object(captured_steps, "is_near", lambda *_: True):
        runner.find_decode_steps()
    singles = plan_of(runner, requests, {"temperature": 0.8, "top_p": 0.9})
    plans = [singles, prompts_of(singles, 6, 300), prompts_of(singles, 1, 40)]
    for plan in plans:
        runner.step(plan).read()
    captured, runner._captured = runner._captured, None
    for plan in plans:
        runner.step(plan).read()
    assert captured is not None
    taken = torch.ops.null_device.peak_bytes() - before + capture.pool_bytes
    found = {"model": name, "requests": requests, "claimed_mib": round(claimed / MIB)}
    found |= {"taken_mib": round(taken / MIB), "pool_mib": round(capture.pool_bytes / MIB)}
    found |= {"share": round(taken / claimed, 2), "replayed": captured.counts.replayed}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--requests", type=int, default=128)
    options = parser.parse_args()
    install()
    install_triton()
    stand_in()
    results = []
    for name in options.models.split(","):
        results.append(measure(name, options.requests))
        print(results[-1], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
