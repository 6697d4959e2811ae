"""Seconds from `from_pretrained` to the error, for every architecture that the engine refuses.

Those of `docs/sweep.jsonl`, or that are named: each with the sweep's tiny model, and with a config
of its class's own sizes beside files that have headers and no numbers. Reading weights is an
error of its own here, which tells a refusal before them from one behind them. Imports are
done before: what is measured is the median of three refusals behind one that is not. Last line:
JSON; CPU time stands beside the worst, for machines that are busy with other things.

    HF_HUB_OFFLINE=1 PYTHONPATH=. python benchmarks/refusals.py [--runs 3] [ARCHITECTURE ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from aioengine import AsyncEngine
from aioengine.errors import ModelLoadError
from aioengine.models.runtime import transformers_model
from tests.parity.families import save_folder
from tests.parity.sweep import make
from tests.parity.sweep_models import OPTIONS
from tests.processors.conftest import make_tokenizer

SWEEP = Path(__file__).parent.parent / "docs" / "sweep.jsonl"
MAX_S = 1.0
READ = "weights were read"


def save_tiny(architecture: str, folder: Path) -> None:
    """The folder that the sweep makes."""
    model, processor, _ = make(architecture)
    save_folder(model, processor, folder)


def save_large(architecture: str, folder: Path) -> None:
    """A folder of the class's own sizes, with weights that are holes in a file."""
    model_class = getattr(hf, architecture)
    config = model_class.config_class(**OPTIONS.get(architecture, {}).get("config", {}))
    config.architectures = [architecture]
    with torch.device("meta"):
        model = model_class(config)
    try:
        _, processor, _ = make(architecture)
    except Exception:  # no rule of the sweep makes one
        processor = make_tokenizer("bytes")
    processor.save_pretrained(folder)
    model.config.save_pretrained(folder)
    header: dict[str, Any] = {}
    end = 0
    for name, weight in model.state_dict().items():
        start, end = end, end + 2 * weight.numel()
        places = [start, end]
        header[name] = {"dtype": "BF16", "shape": [*weight.shape], "data_offsets": places}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def refuse(folder: Path) -> tuple[float, float, str]:
    """Seconds to the error, the process's CPU time meanwhile, and what it says; nothing where the
    model is served."""

    async def start() -> None:
        async with AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=200):
            pass

    said, begin, cpu = "", time.perf_counter(), time.process_time()
    try:
        asyncio.run(start())
    except ModelLoadError as error:
        said = str(error)
    return time.perf_counter() - begin, time.process_time() - cpu, said


def measure(architecture: str, save: Callable[[str, Path], None], runs: int) -> dict[str, Any]:
    """The median of some refusals of one folder."""
    with tempfile.TemporaryDirectory() as name:
        try:
            save(architecture, Path(name))
        except Exception as error:  # whatever a class raises that is given such sizes
            return {"unbuilt": f"{type(error).__name__}: {error!s:.100}"}
        *_, said = refuse(Path(name))
        took, cpu, _ = zip(*(refuse(Path(name)) for _ in range(runs)), strict=True)
    seconds = {"s": round(statistics.median(took), 3), "cpu_s": round(statistics.median(cpu), 3)}
    return {**seconds, "said": said.replace(name, "")[:160]}


def refused_architectures() -> list[str]:
    """Those of the last sweep."""
    rows = map(json.loads, SWEEP.read_text().splitlines()[1:])
    return [row["architecture"] for row in rows if row["verdict"] == "refused"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    hf.logging.set_verbosity_error()

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError(READ)

    transformers_model.load_pretrained = read
    sizes = {"tiny": save_tiny, "large": save_large}
    results: dict[str, dict[str, Any]] = {}
    for architecture in arguments.names or refused_architectures():
        for size, save in sizes.items():
            result = measure(architecture, save, arguments.runs)
            results[f"{architecture} {size}"] = result
            print(architecture, size, json.dumps(result), file=sys.stderr, flush=True)
    measured = {name: result for name, result in results.items() if "s" in result}
    worst = max(measured, key=lambda name: measured[name]["s"])
    summary = {
        "benchmark": "refusals",
        "runs": arguments.runs,
        "measured": len(measured),
        "unbuilt": len(results) - len(measured),
        "worst": worst,
        "worst_s": measured[worst]["s"],
        "worst_cpu_s": max(each["cpu_s"] for each in measured.values()),
        "over_a_second": [name for name, each in measured.items() if each["s"] > MAX_S],
        "behind_weights": [name for name, each in measured.items() if READ in each["said"]],
        "served": [name for name, each in measured.items() if not each["said"]],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
