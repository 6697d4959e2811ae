"""Tokens per second of the engine and of its peers on a busy machine, as shares of idle.

    python benchmarks/busy_peers.py FOLDER [--against vllm,openvino,llama.cpp] [--requests 1,8]
        [--llama BIN --gguf FILE] [--rounds 2]

FOLDER holds a text model. In a turn so many requests come at once, each with a short prompt of its
own, and all tokens are made from the prompts on. Of each contender a turn beside processes that
spin lies between two on the idle machine; contenders wait while another computes. llama.cpp is
`llama-batched-bench` in BIN (docs/benchmarks.md), whose load is not in its times. Medians of the
rounds; the last line is JSON. How the other peers are installed: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from contenders import prepare, report
from contenders.crew import ContenderError, Settings, Worker, alone, crew
from contenders.rounds import PAUSE_S
from neighbours import processes

ROOT = Path(__file__).parents[1]
OURS, LLAMA = "aioengine", "llama.cpp"
PEERS = ("vllm", "openvino", LLAMA)
SPINNING = (1, 2, 4)
PROMPT = "The history of the lighthouse begins with fires on hills, and goes on with number"
PROMPT_TOKENS = 16
"""Of `PROMPT`, about: llama.cpp makes its own of this length."""
Turn = Callable[[int], float]
"""Tokens per second of so many requests."""


def ask(worker: Worker, numbers: itertools.count[int], tokens: int, requests: int) -> float:
    """One turn of a contender that waits in a process."""
    texts = [f"{PROMPT} {next(numbers)}" for _ in range(requests)]
    asked = [{"text": text, "images": []} for text in texts]
    answer = worker.ask("batch", requests=asked, max_tokens=tokens, is_cold=False)
    made = answer.get("num_tokens") or [len(each) for each in answer["tokens"]]
    if sum(made) != requests * tokens:
        raise ContenderError(f"{worker.name}: {sum(made)} tokens of {requests * tokens}")
    return sum(made) / float(answer["seconds"])


def run_llama(binaries: Path, file: Path, threads: int, tokens: int, requests: int) -> float:
    """One turn of llama.cpp, in a process that it takes for itself."""
    words = ["-m", file, "-t", threads, "-npp", PROMPT_TOKENS, "-ntg", tokens, "-npl", requests]
    command = [binaries / "llama-batched-bench", *words, "-c", 4096, "--output-format", "jsonl"]
    done = subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True
    )
    (row,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return requests * tokens / (float(row["t_pp"]) + float(row["t_tg"]))


def measure(turns: dict[str, Turn], options: argparse.Namespace) -> dict[str, Any]:
    """Rates on the idle machine, and shares of them beside processes, by requests and contender."""
    found: dict[str, Any] = {}
    for requests, name in itertools.product(options.requests, turns):
        rates: dict[int, list[float]] = {count: [] for count in (0, *SPINNING)}
        shares: dict[int, list[float]] = {count: [] for count in SPINNING}

        def timed(count: int, turn: Turn = turns[name], requests: int = requests) -> float:
            with alone(options.lock), processes(count) if count else nullcontext():
                time.sleep(PAUSE_S)
                return turn(requests)

        timed(0)
        idle = timed(0)
        for count in SPINNING * options.rounds:
            busy, after = timed(count), timed(0)
            rates[count].append(busy)
            rates[0].append(after)
            shares[count].append(2 * busy / (idle + after))
            idle = after
            print(f"{requests} requests, {name}, {count}: {busy:.1f} {after:.1f}", file=sys.stderr)
        found.setdefault(f"{requests} requests", {})[name] = {
            "idle": round(median(rates[0]), 1),
            "beside": {count: round(median(rates[count]), 1) for count in SPINNING},
            "share": {count: round(median(shares[count]), 3) for count in SPINNING},
        }
    return found


def export(source: Path, target: Path, python: Path) -> None:
    """Write OpenVINO's files of the text model, in float16."""
    older = target.with_name(f"{target.name}-older")
    prepare.write_older(source, older)
    program = [python, "-c", "from optimum.commands.optimum_cli import main; main()"]
    task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    prepare.run(*program, "export", "openvino", "--model", older, *task, target)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = parser.add_argument
    listed("model", type=Path, metavar="FOLDER")
    listed("--against", default=",".join(PEERS), help="peers, by comma")
    listed("--requests", type=lambda text: [*map(int, text.split(","))], default=[1, 8])
    listed("--tokens", type=int, default=64)
    listed("--rounds", type=int, default=2)
    listed("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for peer in ("vllm", "openvino"):
        default = ROOT / ".cache" / "peers" / peer / "bin" / "python"
        path = os.environ.get(f"{peer.upper()}_PYTHON", str(default))
        listed(f"--{peer}-python", type=Path, default=Path(path))
    listed("--llama", type=Path, default=None, metavar="BIN")
    listed("--gguf", type=Path, default=None, help="the model in bfloat16, for llama.cpp")
    listed("--lock", type=Path, default=None, help="held while something is measured")
    options = parser.parse_args()
    options.against = [name for name in options.against.split(",") if name]
    if LLAMA in options.against and (options.llama is None or options.gguf is None):
        parser.error("llama.cpp needs --llama and --gguf, or leave it out of --against")
    return options


def main() -> None:
    options = options_of()
    pythons = {OURS: Path(sys.executable)}
    pythons |= {"vllm": options.vllm_python, "openvino": options.openvino_python}
    names = [OURS, *(name for name in options.against if name != LLAMA)]
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = dict.fromkeys(names, options.model)
        if "openvino" in names:
            models["openvino"] = Path(folder) / "openvino"
            export(options.model, models["openvino"], options.openvino_python)
        threads = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[: options.threads])
        settings = Settings(
            names=names,
            pythons=pythons,
            models=models,
            dtype="bfloat16",
            threads=options.threads,
            logs=Path(folder),
            environment={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": threads},
        )
        with crew(names, settings, "text", failures) as workers:
            numbers = itertools.count(1)
            turns: dict[str, Turn] = {
                name: partial(ask, worker, numbers, options.tokens)
                for name, worker in workers.items()
            }
            if LLAMA in options.against:
                turns[LLAMA] = partial(
                    run_llama, options.llama, options.gguf, options.threads, options.tokens
                )
            found = measure(turns, options)
    about = {"benchmark": "busy_peers", "machine": report.machine("bfloat16", options.threads)}
    print(json.dumps({**about, "failures": failures, **found}))


if __name__ == "__main__":
    main()
