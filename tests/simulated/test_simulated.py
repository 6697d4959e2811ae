"""The tests of a GPU on a simulated one, and faults that have to be found there.

What they show is order, not speed: no operator of the decoder or the encoder reads memory before it
is written, none is given memory that another stream still reads, and the launch thread never waits.
Operators run as they are launched, and in one random order of their queues: its seed is printed,
and the variable SIMULATED_ORDER sets it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run.py")
ENGINE = "tests/gpu/test_engine_cuda.py"
LAWS = "tests/simulated/laws.py"
FAMILIES = "tests/gpu/test_families_cuda.py"
AT_ONCE = "64-True or encoder_that_fails or step_that_fails or sizes or memory_is"
LATER = "64-True or encoder_that_fails or scarce_memory[0] or [llama] or clip"
PIECES = (
    "checks",
    "plan_checks",
    "attention",
    "experts",
    "loading",
    "encoder_waits",
    "decode_steps",
)
CHOSEN = (
    "simulated/checks.py or bfloat16 or launches or loading or encoder_waits"
    " or (wait_for_nothing and (qwen3-vl or gemma3n))"
)
ORDER = os.environ.get("SIMULATED_ORDER") or str(random.SystemRandom().randrange(1 << 20))
pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="NO COMPILER: NO SIMULATED GPU"),
    pytest.mark.timeout(600),
]


def run(*arguments: str, order: str | None = None) -> tuple[int, str]:
    """The exit status, and what was printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    environment.pop("SIMULATED_ORDER", None)
    if order is not None:
        environment["SIMULATED_ORDER"] = order
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace")


@pytest.mark.slow
def test_what_runs_there_waits_for_nothing() -> None:
    """The device itself; plans, attention, experts, weights, encoders and steps on it."""
    status, text = run(*(f"tests/simulated/{name}.py" for name in PIECES), "-k", CHOSEN)
    assert status == 0, text
    assert text.count("ENCODER: ") == 2, text


@pytest.mark.slow
def test_the_engine_is_ordered_and_never_waits() -> None:
    status, text = run(ENGINE, "-k", AT_ONCE)
    assert status == 0, text
    assert text.count("SIMULATED: ") == 5, text


@pytest.mark.slow
def test_one_order_of_the_queues() -> None:
    print(f"SIMULATED_ORDER={ORDER}")  # noqa: T201
    status, text = run(ENGINE, LAWS, FAMILIES, "-k", LATER, order=ORDER)
    assert status == 0, text
    assert text.count(f"SIMULATED: order {ORDER}, ") == 6, text


@pytest.mark.slow
def test_faults_are_found() -> None:
    status, text = run("tests/simulated/mutants.py", "-k", "device_notes or ring")
    assert status == 0, text
