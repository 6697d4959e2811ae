"""How long a fresh process takes to `import aioengine`, and from there to a model's first token.

Every measurement is a process of its own; medians are printed. Most of the way to the first token
is the import of torch and of the parts of transformers that the model needs, so these imports are
also timed by themselves: what is left is the engine's own (and the loading of weights). The model
is the demo model unless a folder is given. Last line: JSON, in milliseconds; the CPU time of the
whole process stands beside the first token's, for machines that are busy with other things.

    python benchmarks/startup.py [--runs 5] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioengine import demo_model

IMPORT = """
import json, sys, time
start = time.perf_counter()
import aioengine
took = time.perf_counter() - start
print(json.dumps({"ms": took * 1e3, "has_torch": "torch" in sys.modules}))
"""

FIRST_TOKEN = """
import json, sys, time
start = time.perf_counter()
import asyncio
from aioengine import AsyncEngine, SamplingParams

async def main():
    async with AsyncEngine.from_pretrained(sys.argv[1]) as engine:
        started = time.perf_counter()
        async with engine.stream("Hello", SamplingParams(temperature=0, max_tokens=4)) as stream:
            assert (await stream.receive()).token_ids
            first_token = time.perf_counter()
            cpu = time.process_time()
        return started - start, first_token - start, cpu

started, first_token, cpu = asyncio.run(main())
names = [name for name in sys.modules if name.partition(".")[0] == "transformers"]
times = {"started_ms": started * 1e3, "ms": first_token * 1e3, "cpu_ms": cpu * 1e3}
print(json.dumps({**times, "modules": names}))
"""

IMPORTS = """
import importlib, json, sys, time
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
ms = (time.perf_counter() - torch_done) * 1e3
print(json.dumps({"torch_ms": (torch_done - start) * 1e3, "transformers_ms": ms}))
"""


def run(code: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a fresh interpreter prints for `code`."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", **environment}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=variables, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def median(results: list[dict[str, Any]], key: str) -> float:
    return round(statistics.median(result[key] for result in results), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", type=Path, default=demo_model())
    arguments = parser.parse_args()
    model = str(arguments.model)
    # Once without measuring: byte code is compiled and files come into the page cache.
    modules = json.dumps(run(FIRST_TOKEN, model)["modules"])
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "import": lambda: run(IMPORT),
        "first token": lambda: run(FIRST_TOKEN, model),
        "imports alone": lambda: run(IMPORTS, modules),
    }
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(arguments.runs):  # in turns, so that a busy minute hits all of them
        for kind, measure in kinds.items():
            results[kind].append(measure())
        print(f"round {number + 1} of {arguments.runs}", file=sys.stderr)
    torch_ms = median(results["imports alone"], "torch_ms")
    transformers_ms = median(results["imports alone"], "transformers_ms")
    first_token_ms = median(results["first token"], "ms")
    summary = {
        "benchmark": "startup",
        "model": arguments.model.name,
        "runs": arguments.runs,
        "import_ms": median(results["import"], "ms"),
        "import_loads_torch": any(result["has_torch"] for result in results["import"]),
        "started_ms": median(results["first token"], "started_ms"),
        "first_token_ms": first_token_ms,
        "first_token_cpu_ms": median(results["first token"], "cpu_ms"),
        "torch_import_ms": torch_ms,
        "transformers_import_ms": transformers_ms,
        "imports_share": round((torch_ms + transformers_ms) / first_token_ms, 2),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
