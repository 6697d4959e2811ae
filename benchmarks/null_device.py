"""Host time of a decode step on a CUDA device of which every operator does nothing.

    python benchmarks/null_device.py [--models qwen2-0.5b,...] [--requests 1,8,32] [--triton]

Without a GPU, and without CUDA: null_device.cpp gives a build of PyTorch for CPUs a device "cuda"
with real dispatch and no arithmetic. So models have their real shapes and take no memory, and what
a step takes is what the host takes to launch it: the engine's Python, and PyTorch's for each
operator, which is about what the launch of a kernel takes. A step is a decode step of the runner,
from the plan to the tokens read back, of requests with 300 tokens or so each.

Measured alone, and beside a thread that runs pure Python all the time, with which every operator
competes for the interpreter's lock. With `--triton`, where Triton is installed, the engine's own
kernels are counted as operators; what Triton's launcher takes of the host is not. And steps are
captured: then the host stages their numbers, and launches a graph.

Beside the counts stand estimates of a step on an H200: the floor, which is the bytes of weights,
keys and values at the rate of its memory; and with a graph of the same launches, each of which
takes a moment even if it computes next to nothing. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from neighbours import python_threads
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from aioengine.core.plan import Limits, SequencePlan, StepPlan
from aioengine.execution import captured_steps
from aioengine.execution.model_runner import ModelRunner
from aioengine.models.runtime.hf_loading import build_on_meta
from aioengine.models.runtime.registry import resolve
from aioengine.sampling.sampler import Sampling

ROOT = Path(__file__).parents[1]
BLOCK = 32
CONTEXT = 300
BYTES_PER_S = 4.3e12
"""Of an H200's memory, as copies of large tensors were measured there."""
GRAPHED_LAUNCH_S = 3e-6
"""A kernel's share of a replayed graph beyond its bytes, as docs/gpu.md has it: 1.6 ms for 456."""

TEXT: dict[str, Any] = {"max_position_embeddings": 32768, "tie_word_embeddings": False}


def shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Any:
    """A text config's sizes."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **TEXT,
    }


QWEN2_VL = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
QWEN3_VL = {
    "rope_type": "default",
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
    "rope_theta": 5e6,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2-0.5b": ("Qwen2ForCausalLM", "qwen2", shape(896, 4864, 24, 14, 2, 151936)),
    "qwen2-1.5b": ("Qwen2ForCausalLM", "qwen2", shape(1536, 8960, 28, 12, 2, 151936)),
    "qwen3-1.7b": (
        "Qwen3ForCausalLM",
        "qwen3",
        {**shape(2048, 6144, 28, 16, 8, 151936), "head_dim": 128},
    ),
    "qwen2-7b": ("Qwen2ForCausalLM", "qwen2", shape(3584, 18944, 28, 28, 4, 152064)),
    "llama-8b": ("LlamaForCausalLM", "llama", shape(4096, 14336, 32, 32, 8, 128256)),
    "gemma3-4b": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**shape(2560, 10240, 34, 8, 4, 262208), "head_dim": 256, "sliding_window": 1024},
    ),
    "qwen2-vl-7b": (
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {"text_config": {**shape(3584, 18944, 28, 28, 4, 152064), "rope_parameters": QWEN2_VL}},
    ),
    "qwen3-vl-4b": (
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {
            "text_config": {
                **shape(2560, 9728, 36, 32, 8, 151936),
                "head_dim": 128,
                "rope_parameters": QWEN3_VL,
            }
        },
    ),
}
"""Name -> architecture, transformers' name of its config, and what is said in it."""


def install() -> None:
    """Build and load the device, and put stand-ins in the place of what asks for a driver."""
    library = ROOT / ".cache" / "null" / f"null-{torch.__version__}.so"
    source = Path(__file__).with_suffix(".cpp")
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        parts = Path(torch.__file__).parent
        includes = parts / "include", parts / "include" / "torch" / "csrc" / "api" / "include"
        command = ["c++", "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        command += [word for each in includes for word in ("-isystem", str(each))]
        command += ["-L", str(parts / "lib"), "-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run(command, check=True)
    torch.ops.load_library(library)
    stream = SimpleNamespace(record_event=lambda event: event)
    event = SimpleNamespace(synchronize=lambda: None)
    stand_ins: dict[str, Any] = {
        "Event": lambda **_: event,
        "current_stream": lambda _device=None: stream,
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_properties": lambda _device=None: SimpleNamespace(multi_processor_count=132),
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    empty = torch.empty
    _device_constructors()  # remembers the functions that a device context applies to

    def not_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    torch.empty = not_pinned
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment, method-assign]


LAUNCHES = [0]
"""Of kernels in Triton, so far."""


def install_triton() -> None:
    """Have the engine launch its kernels in Triton, which are counted and not run."""
    from triton.runtime.jit import JITFunction

    from aioengine.kernels import triton

    def run(*_: Any, **__: Any) -> None:
        LAUNCHES[0] += 1

    JITFunction.run = run
    triton.are_right_on = lambda _: True  # type: ignore[assignment]


class NullCapture:
    """Captures what does nothing, and replays it as one launch."""

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """See `aioengine.execution.graphs.Capture`."""

        def replay() -> None:
            LAUNCHES[0] += 1

        return SimpleNamespace(replay=replay), work()


def runner_of(name: str, num_requests: int, capture: NullCapture | None) -> tuple[ModelRunner, int]:
    """A runner of a model that has its shapes and no numbers, and the bytes that a step reads of
    its weights. Its trials compare nothing with nothing, so structure alone says what is fused."""
    architecture, kind, sizes = MODELS[name]
    config = AutoConfig.for_model(kind, architectures=[architecture], **sizes)
    config.dtype = torch.bfloat16
    family = resolve([architecture])
    specs = family.probe(config)
    module = build_on_meta(family.hf_class(config), config).to(torch.bfloat16)
    decoder, head = module.get_decoder(), module.get_output_embeddings().weight
    table = decoder.get_input_embeddings().weight
    weights = sum(each.nbytes for each in decoder.parameters()) - table.nbytes + head.nbytes
    with torch.no_grad():
        module.to_empty(device="cuda")
    model = family(module, specs=specs)
    with torch.inference_mode():
        model.pack()
    limits = Limits(
        max_num_seqs=num_requests,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        block_size=BLOCK,
        num_blocks=num_requests * (CONTEXT // BLOCK + 2) * len(model.kv_groups),
        num_groups=len(model.kv_groups),
    )
    runner = ModelRunner(model, limits, capture=capture)
    if capture is not None:
        with patch.object(captured_steps, "is_near", lambda *_: True):  # of no numbers
            runner.find_decode_steps()
    return runner, weights


def plan_of(
    runner: ModelRunner, num_requests: int, sampling: dict[str, Any], context: int = CONTEXT
) -> StepPlan:
    """A decode step of requests with so many tokens, or a few more."""
    width = context // BLOCK + 2
    inputs = runner.model.prompt_inputs((0,) * context)

    def sequence(number: int) -> SequencePlan:
        length = context + number % 20
        blocks = tuple(range(number * width, number * width + width))
        return SequencePlan(
            request_id=str(number),
            epoch=0,
            start=length,
            end=length + 1,
            token_ids=(number,),
            block_tables=(blocks,) * len(runner.model.kv_groups),
            rows=(),
            samples=True,
            output_index=3,
            inputs=inputs,
            sampling=Sampling(seed=number, **sampling),
        )

    return StepPlan(0, tuple(sequence(number) for number in range(num_requests)))


class Counted(TorchDispatchMode):
    """Counts the operators that launch something on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        returned = found if isinstance(found, Tensor) else None
        is_there = returned is None or returned.device.type == "cuda"
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in func._schema.returns
        )
        is_empty = "empty" in func.name() or "promote_types" in func.name()
        self.count += is_there and not is_view and not is_empty
        return found


def estimates(runner: ModelRunner, weights: int, requests: int, launches: int) -> dict[str, float]:
    """The floor and a graph's replay of a decode step, in ms."""
    row = sum(
        2 * spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in runner.model.specs
    )
    floor = (weights + requests * CONTEXT * row) / BYTES_PER_S
    return {"floor_ms": floor * 1e3, "graph_ms": (floor + launches * GRAPHED_LAUNCH_S) * 1e3}


def milliseconds(step: Callable[[], Any], count: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def measure(name: str, num_requests: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model and so many requests."""
    runner, weights = runner_of(name, num_requests, NullCapture() if options.triton else None)
    captured, runner._captured = runner._captured, None
    found: dict[str, Any] = {"model": name, "requests": num_requests}
    found["layers"] = len(runner.model.specs)
    samplings: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    }
    for kind, sampling in samplings.items():
        plan = plan_of(runner, num_requests, sampling)
        before = LAUNCHES[0]
        with Counted() as counted:
            runner.step(plan).read()
        found[f"{kind}_operators"] = counted.count + LAUNCHES[0] - before
        found[f"{kind}_triton"] = LAUNCHES[0] - before
        for _ in range(5):
            runner.step(plan).read()
        found[f"{kind}_ms"] = milliseconds(
            lambda plan=plan: runner.step(plan).read(), options.steps
        )
    found |= estimates(runner, weights, num_requests, found["greedy_operators"])
    plan = plan_of(runner, num_requests, {})
    with python_threads(1):
        found["beside_python_ms"] = milliseconds(lambda: runner.step(plan).read(), 3)
    if captured is None:
        return found
    runner._captured = captured
    for kind, sampling in samplings.items():
        plan = plan_of(runner, num_requests, sampling)
        with Counted() as counted:
            runner.step(plan).read()
        found[f"captured_{kind}_launches"] = counted.count + 1
        found[f"captured_{kind}_ms"] = milliseconds(
            lambda plan=plan: runner.step(plan).read(), 5 * options.steps
        )
    assert captured.counts.replayed and not captured.counts.launched
    with python_threads(1):
        found["captured_beside_python_ms"] = milliseconds(lambda: runner.step(plan).read(), 20)
    return found


def captured_columns(found: dict[str, Any]) -> str:
    """Figures of captured steps, if there are such."""
    if "captured_greedy_ms" not in found:
        return ""
    return (
        f"{found['captured_greedy_ms']:10.2f}{found['captured_sampled_ms']:9.2f}"
        f"{found['captured_beside_python_ms']:14.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--requests", default="32", help="numbers of requests, with commas")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--triton", action="store_true")
    options = parser.parse_args()
    install()
    if options.triton:
        install_triton()
    results = []
    print("ms of a decode step on the host, operators launched, and estimates for an H200")
    print(
        f"{'model':13}{'requests':>9}{'layers':>7}{'greedy':>8}{'ops':>5}{'sampled':>9}{'ops':>5}"
        f"{'beside Python':>14}{'floor':>7}{'graph':>7}"
        + (f"{'captured':>10}{'sampled':>9}{'beside Python':>14}" if options.triton else "")
    )
    for name in options.models.split(","):
        for requests in map(int, options.requests.split(",")):
            found = measure(name, requests, options)
            results.append(found)
            print(
                f"{name:13}{requests:9}{found['layers']:7}{found['greedy_ms']:8.2f}"
                f"{found['greedy_operators']:5}{found['sampled_ms']:9.2f}"
                f"{found['sampled_operators']:5}{found['beside_python_ms']:14.0f}"
                f"{found['floor_ms']:7.2f}{found['graph_ms']:7.2f}" + captured_columns(found),
                flush=True,
            )
    print(json.dumps({"triton": options.triton, "steps": results}))


if __name__ == "__main__":
    main()
