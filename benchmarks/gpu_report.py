"""All that a GPU is asked, in one command: `make gpu`.

    python benchmarks/gpu_report.py [--stages tests,machine,...] [--out FOLDER] [--page docs/gpu.md]

Each stage is a process of its own with a deadline, and leaves OUT/STAGE.json and OUT/STAGE.txt as
it ends: one that fails, or takes the GPU down with it, harms no other, and what is there already
is not lost. All together end within 25 minutes. The tables go to the page, between its two marks.
Nothing is fetched. The tests are those of tests/gpu; the other stages are those of gpu.py; vLLM is
asked for the same where it is installed. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEADLINES_S = {
    "machine": 60,
    "tests": 300,
    "kernels": 180,
    "shapes": 60,
    "steps": 360,
    "engine": 150,
    "encoder": 90,
    "soak": 90,
    "vllm": 210,
}
MARKS = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"


def run_stage(name: str, out: Path, options: argparse.Namespace) -> Any:
    """Run a stage; return what its last line says."""
    here = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", options.device]
    if options.tiny:
        here.append("--tiny")
    commands = {
        "tests": ["sh", str(ROOT / "tests" / "gpu" / "run.sh"), "--maxfail=20"],
        "vllm": [sys.executable, str(ROOT / "benchmarks" / "gpu_vllm.py")],
    }
    if name == "vllm" and find_spec("vllm") is None:
        return "vLLM is not installed"
    text = out / f"{name}.txt"
    environment = {**os.environ, "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONSAFEPATH", None)  # benchmarks import each other by their folder
    with text.open("w") as file:
        try:
            subprocess.run(
                commands.get(name, [*here, "--stages", name]),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                timeout=DEADLINES_S[name],
                check=False,
            )
        except subprocess.TimeoutExpired:
            file.write(f"\nended by its deadline of {DEADLINES_S[name]} s\n")
    lines = text.read_text().strip().splitlines() or ["nothing was printed"]
    if name == "tests":
        return lines[-1]
    try:
        found = json.loads(lines[-1])
    except ValueError:
        return lines[-1]
    return found.get(name, found)


def tables(found: dict[str, Any]) -> str:
    """The page's part: what each stage has found."""
    machine = found.get("machine")
    head = f"{date.today()}"
    if isinstance(machine, dict):
        head += (
            f", {machine['chip']}, torch {machine['torch']}, transformers "
            f"{machine['transformers']}: copies {machine['copy_tb_per_s']} TB/s, a large matmul "
            f"{machine['matmul_tflops']} TFLOP/s, a launch {machine['launch_us']} us."
        )
    parts = [head, f"Tests: {found.get('tests', 'not run')}."]
    parts += [table(rows) for rows in _tables(found)]
    others = {name: each for name, each in found.items() if isinstance(each, str)}
    parts += [f"{name}: {each}" for name, each in others.items() if name != "tests"]
    return "\n\n".join(parts)


def _tables(found: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of stages that have such."""
    tabled = []
    kernels = found.get("kernels")
    if isinstance(kernels, dict):
        worst = kernels["largest_error"]
        bad = len(kernels["not_finite"])
        tabled.append([{"attention, cases": kernels["cases"], **worst, "not finite": bad}])
        tabled.append(kernels["rates"])
    for name in ("steps", "engine", "vllm"):
        rows = found.get(name)
        if isinstance(rows, list) and rows:
            tabled.append([{key: x for key, x in row.items() if key != "most"} for row in rows])
    plain = {name: found.get(name) for name in ("shapes", "encoder", "soak")}
    tabled += [
        [{name: key, "": value} for key, value in rows.items()]
        for name, rows in plain.items()
        if isinstance(rows, dict)
    ]
    return [rows for rows in tabled if rows]


def table(rows: list[dict[str, Any]]) -> str:
    """A table in Markdown, of rows with the same names."""
    names = [*rows[0]]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def write_page(page: Path, found: dict[str, Any]) -> None:
    """Put the tables between the page's marks."""
    begin, end = MARKS
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text = page.read_text()
    assert pattern.search(text), f"{page} has no place for the tables"
    page.write_text(pattern.sub(lambda _: f"{begin}\n{tables(found)}\n{end}", text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default=",".join(DEADLINES_S))
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "gpu")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name in options.stages.split(","):
        begin = time.perf_counter()
        found[name] = run_stage(name, options.out, options)
        (options.out / f"{name}.json").write_text(json.dumps(found[name], indent=1))
        print(f"{name}: {time.perf_counter() - begin:.0f} s, {options.out / name}.json", flush=True)
    if options.page is not None:
        write_page(options.page, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
