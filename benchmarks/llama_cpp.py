"""One stream, prefill and many streams of a text model, beside llama.cpp and what memory gives.

    PYTHONPATH=. HF_HUB_OFFLINE=1 python benchmarks/llama_cpp.py FOLDER --llama BIN \
        --gguf bf16=A.gguf --gguf int8=B.gguf --gguf int4=C.gguf [--rounds 3]

BIN holds `llama-bench` and `llama-batched-bench` (docs/benchmarks.md says how they are built); each
form of ours is set beside the file named for it. In each round both run once, one after the other,
ours in a process of its own, each with as many threads as there are processors. `read` is a plain
sum over as many bytes as the weights have in memory, in the same process. `grown_mb` is by how much
a load makes a process larger, with what it maps and its tokenizers: ours once libraries are
imported (few blocks of KV have been written by then), llama.cpp's at the most of one token's run,
less one that loads nothing. The last line is JSON: medians of the rounds, and of the ratios within
a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMS = {"bf16": None, "int8": "int8", "int4": "int4"}
PROMPT, ANSWER, MANY, LONG = 64, 128, 16, 512
RATES = ("one", "many", "prefill", "grown_mb")


def resident_mb() -> float:
    """Memory of this process: its own, and what it has read of mapped files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def own(folder: Path, form: str) -> dict[str, float]:
    """Tokens a second of ours, and milliseconds of a token and of reading the weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import aioengine.engine.loading.loader
    from aioengine import AsyncEngine, SamplingParams

    assert aioengine.engine.loading.loader  # imports what a load needs
    _ = AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(folder))]  # imports it
    before_mb = resident_mb()
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "quantization": FORMS[form]}
    async with AsyncEngine.from_pretrained(
        folder, max_model_len=1024, enable_prefix_caching=False, **options
    ) as engine:
        grown_mb = resident_mb() - before_mb

        async def run(number: int, length: int, count: int) -> list[float]:
            ids = [(i * 7 + number * 13) % 900 + 100 for i in range(length)]
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            began = time.perf_counter()
            return [began, *[time.perf_counter() async for _ in engine.stream(ids, params)]]

        async def rate(number: int) -> float:
            runs = await asyncio.gather(*(run(i, PROMPT, ANSWER) for i in range(number)))
            taken = max(x[-1] for x in runs) - max(x[1] for x in runs)
            return number * (ANSWER - 1) / taken

        await run(0, PROMPT, 8)
        one, many = await rate(1), await rate(MANY)
        began, first = (await run(1, LONG, 1))[:2]
        model = engine._core.loaded.runner.model.model
        num_bytes = weight_bytes(model)
    numbers = torch.ones(num_bytes // 4)
    reads = []
    for _ in range(7):
        before = time.perf_counter()
        numbers.sum()
        reads.append(time.perf_counter() - before)
    read_ms = statistics.median(reads) * 1e3
    return {
        "one": one,
        "many": many,
        "prefill": LONG / (first - began),
        "token_ms": 1e3 / one,
        "read_ms": read_ms,
        "weight_mb": num_bytes / 1e6,
        "grown_mb": grown_mb,
        "read_share": read_ms * one / 1e3,
    }


def weight_bytes(model: Any) -> int:
    """Bytes of all weights, packed ones once."""
    found: dict[int, int] = {}
    for module in model.modules():
        packed = getattr(module, "packed", None) or getattr(module, "matmul", None)
        packed = packed or getattr(getattr(module, "merged", None), "packed", None)
        for each in getattr(packed, "operands", ()):
            if each is not None:
                found[each.data_ptr()] = each.nbytes
        for weight in module._parameters.values():
            if weight is not None and weight.untyped_storage().nbytes() >= weight.nbytes:
                found[weight.data_ptr()] = weight.nbytes
    return sum(found.values())


def run_own(folder: Path, form: str) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, str(folder), "--own", form]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_llama(binaries: Path, file: Path) -> dict[str, float]:
    """Tokens a second of llama.cpp."""
    threads = ["-m", str(file), "-t", str(len(os.sched_getaffinity(0)))]

    def call(name: str, *words: str) -> Any:
        command = [str(binaries / name), *threads, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout

    bench = json.loads(
        call("llama-bench", "-p", str(LONG), "-n", str(ANSWER), "-r", "2", "-o", "json")
    )
    rates = {"one" if each["n_gen"] else "prefill": each["avg_ts"] for each in bench}
    words = ["-npp", str(PROMPT), "-ntg", str(ANSWER), "-npl", str(MANY), "-c", "8192"]
    table = call("llama-batched-bench", *words)
    (row,) = [line for line in table.splitlines() if line.startswith(f"|{PROMPT:6d} |")]
    bench_path = str(binaries / "llama-bench")
    one_token = [bench_path, *threads, "-p", "0", "-n", "1", "-r", "1"]
    grown_mb = most_mb(one_token) - most_mb([bench_path, "--help"])
    return {**rates, "many": float(row.split("|")[8]), "grown_mb": grown_mb}


def most_mb(command: list[str]) -> float:
    """The most memory that a process had, mapped files included."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss * 1024 / 1e6


def compare(folder: Path, binaries: Path, files: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Medians of both and of their ratios, by form."""
    kept: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {form: [] for form in files}
    for _ in range(rounds):
        for form, file in files.items():
            kept[form].append((run_own(folder, form), run_llama(binaries, file)))
            print(form, *kept[form][-1], flush=True)

    def middle(values: Sequence[float]) -> float:
        return round(statistics.median(values), 3)

    found: dict[str, Any] = {}
    for form, pairs in kept.items():
        found[form] = {
            "ours": {key: middle([ours[key] for ours, _ in pairs]) for key in pairs[0][0]},
            "llama.cpp": {key: middle([other[key] for _, other in pairs]) for key in pairs[0][1]},
            "ratio": {key: middle([x[key] / y[key] for x, y in pairs]) for key in RATES},
        }
    return found


def main() -> None:
    """All forms, or one of ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--own", choices=FORMS)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--gguf", action="append", default=[], metavar="FORM=FILE")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.own:
        print(json.dumps(asyncio.run(own(args.folder, args.own))))
        return
    files = {form: Path(file) for form, _, file in (each.partition("=") for each in args.gguf)}
    if not files or not files.keys() <= FORMS.keys() or args.llama is None:
        parser.error(f"--llama and --gguf FORM=FILE with FORM of {', '.join(FORMS)}")
    print(json.dumps(compare(args.folder, args.llama, files, args.rounds)))


if __name__ == "__main__":
    main()
