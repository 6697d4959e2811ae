"""Steps of short operators by our team of threads, by oneTBB and by OpenMP, on a busy machine.

    python benchmarks/teams.py --tbb FOLDER [--rows 1,8,32] [--seconds 4] [--rounds 2]

A step is 270 operators of 16 parts each, which read 270 MB: that of SmolLM2-135M in bfloat16, with
`rows` sums of each weight in place of products. Each team does steps for a while, as a process of
its own, beside processes that spin, and so does one thread. Steps a second, and shares of idle; the
last line is JSON. FOLDER: a virtual environment with tbb==2022.3.1 and tbb-devel==2022.3.1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median

from neighbours import processes

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "kernels/cpu/program"
SPINNING = (0, 1, 2, 4)
ALONE = "one thread"


def build(folder: Path, tbb: Path) -> dict[str, Path]:
    """Compile a program for each team; where they are."""
    library, headers = tbb / "lib/libtbb.so.12", tbb / "include"
    flags = {
        "ours": ["-DBY_TEAM", f"-I{PROGRAM}", f"-I{PROGRAM.parent}/include", PROGRAM / "team.cpp"],
        "oneTBB": ["-DBY_TBB", f"-I{headers}", library, f"-Wl,-rpath,{library.parent}"],
        "OpenMP": ["-fopenmp"],
    }
    found = {name: folder / name for name in flags}
    for name, words in flags.items():
        command = ["c++", "-std=c++20", "-O3", "-march=native", "-pthread"]
        command += [ROOT / "benchmarks/teams.cpp", *words, "-o", found[name]]
        subprocess.run([str(word) for word in command], check=True)
    return {**found, ALONE: found["ours"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tbb", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--rows", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 32]
    )
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    rates: dict[str, dict[str, dict[int, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = build(Path(folder), options.tbb)
        for _, rows, count, name in product(
            range(options.rounds), options.rows, SPINNING, programs
        ):
            threads = 1 if name == ALONE else options.threads
            command = [programs[name], threads, options.seconds, rows]
            with processes(count) if count else nullcontext():
                said = subprocess.check_output([str(word) for word in command], text=True)
            own = rates.setdefault(f"{rows} rows", {}).setdefault(name, {})
            own.setdefault(count, []).append(float(said))
            print(f"{rows} rows, beside {count}, {name}: {float(said):.1f}", file=sys.stderr)
    found = {
        rows: {
            name: {
                "idle": round(median(own[0]), 1),
                "share": {count: round(median(own[count]) / median(own[0]), 3) for count in own},
            }
            for name, own in teams.items()
        }
        for rows, teams in rates.items()
    }
    print(json.dumps({"benchmark": "teams", "threads": options.threads, **found}))


if __name__ == "__main__":
    main()
