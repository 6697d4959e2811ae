"""Run tests of a GPU on the simulated one, in processes of their own.

    python tests/simulated/run.py [arguments of pytest; default: ALL]
    python tests/simulated/run.py --orders N

Of their own, since what PyTorch then takes for a GPU cannot be taken back. The guard (guard.cpp) is
built once for each version of PyTorch. Operators run when they are launched, or with the variable
SIMULATED_ORDER in an order that it is the seed of. `--orders` runs all in the first way, and then a
part in each of N orders, as many side by side as there are processors; the seeds are printed, and
the parts chosen so that five orders run everything that PARTS names, and every family once.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ENGINE = "tests/gpu/test_engine_cuda.py"
CHECKS = "tests/simulated/checks.py"
LAWS = "tests/simulated/laws.py"
FAMILIES = "tests/gpu/test_families_cuda.py"
OTHERS = (
    *("attention", "experts", "loading", "plan_checks", "encoder_waits", "decode_steps"),
    "mutants",
)
ALL = (ENGINE, CHECKS, LAWS, FAMILIES, *(f"tests/simulated/{name}.py" for name in OTHERS))
EVERY = "64-True or preemption or encoder_that_fails or random_company"
"""What each order runs."""
PARTS = (
    "sampling or step_that_fails",
    "half or lower or few_items",
    "cancelling or every_tick or decode_goes_on",
    "rows_are_not_reused or left_after",
    "cancelled_at_every_point or memory_is or sizes",
)
"""What they run in turn, beside a fifth of the families."""
PLAIN = (
    *(
        "-p",
        "tests.simulated.plugin",
        "-p",
        "no:xdist",
        "-p",
        "no:rerunfailures",
        "-p",
        "no:cacheprovider",
        "-q",
        "-s",
    ),
    *("--timeout", "900"),
    *("--import-mode=importlib", "--override-ini=addopts=", "--rootdir", str(ROOT)),
)


def build_guard() -> Path:
    """Build guard.cpp, unless it was built before. Raises OSError or CalledProcessError."""
    library = ROOT / ".cache" / "simulated" / f"guard-{torch.__version__}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        parts = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / "guard.so"
            command = [
                *("c++", "-std=c++20", "-shared", "-fPIC", "-isystem", parts / "include"),
                *(Path(__file__).with_name("guard.cpp"), "-o", made, "-L", parts / "lib", "-lc10"),
            ]
            subprocess.run(command, check=True)
            made.rename(library)
    return library


def main(arguments: list[str]) -> int:
    """Run pytest with the plugin; its exit status."""
    os.environ["SIMULATED_GUARD"] = str(build_guard())
    os.chdir(ROOT)
    if arguments[:1] == ["--orders"]:
        return run_orders(int(arguments[1]))
    # Last, so that nothing of the root folders is found in the place of an installed package.
    sys.path.append(str(ROOT))
    return int(pytest.main([*PLAIN, *(arguments or ALL)]))


def run_orders(num_orders: int) -> int:
    """Run everything at once, and parts in so many orders; the number of runs that failed."""
    first = random.SystemRandom().randrange(1 << 20)
    others = [each for each in ALL if each != ENGINE]
    jobs = [("at once, the engine", dict[str, str](), [ENGINE]), ("at once, the rest", {}, others)]
    jobs += [order_job(seed) for seed in range(first, first + num_orders)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(lambda job: _run_job(*job), jobs))


def order_job(seed: int) -> tuple[str, dict[str, str], list[str]]:
    """The name, the environment and the arguments of a run in one order."""
    part = seed % len(PARTS)
    environment = {"SIMULATED_ORDER": str(seed), "SIMULATED_PART": f"{part}/{len(PARTS)}"}
    chosen = f"{EVERY} or {PARTS[part]} or checks or families"
    return f"order {seed}", environment, [ENGINE, CHECKS, LAWS, FAMILIES, "-k", chosen]


def _run_job(name: str, environment: Mapping[str, str], arguments: list[str]) -> bool:
    """Whether a run of its own process failed; prints its end, or all if it did."""
    # One thread each: they run side by side.
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(
        command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    text = done.stdout.decode(errors="replace").rstrip()
    shown = text if done.returncode else text.rpartition("\n")[2]
    sys.stdout.write(f"{name}: exit status {done.returncode}\n{shown}\n")
    sys.stdout.flush()
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
