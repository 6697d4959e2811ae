"""Run tests of a GPU on the simulated one, in a process of its own.

    python tests/simulated/run.py [--mutant NAME] [arguments of pytest; default: tests/gpu]

A process of its own, since what PyTorch then takes for a GPU cannot be taken back. The guard
(guard.cpp) is built once for each version of PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ALL = (
    "tests/gpu/test_engine_cuda.py",
    "tests/simulated/checks.py",
    "tests/simulated/attention.py",
    "tests/simulated/experts.py",
    "tests/simulated/loading.py",
    "tests/simulated/decode_steps.py",
    "tests/simulated/plan_checks.py",
)
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
    if arguments[:1] == ["--mutant"]:
        os.environ["SIMULATED_MUTANT"] = arguments[1]
        arguments = arguments[2:]
    os.environ["SIMULATED_GUARD"] = str(build_guard())
    # Last, so that nothing of the root folders is found in the place of an installed package.
    sys.path.append(str(ROOT))
    os.chdir(ROOT)
    return int(pytest.main([*PLAIN, *(arguments or ALL)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
