"""The tests of a GPU on a simulated one, and faults that have to be found there.

What they show is order, not speed: no operator of the decoder or the encoder reads memory before it
is written, none is given memory that another stream still reads, and the launch thread never waits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run.py")
ENGINE = "tests/gpu/test_engine_cuda.py"
CHOSEN = (
    "64 or preemption or sampling or cancelling or encoder_that_fails or step_that_fails or "
    "lower or half or sizes or memory_is"
)
FAMILIES = "wait_for_nothing and (qwen3-vl or gpt-oss or gemma3n or base)"
pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="NO COMPILER: NO SIMULATED GPU"),
    pytest.mark.timeout(600),
]


def run(*arguments: str) -> tuple[int, str]:
    """The exit status, and what was printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace")


def test_what_the_device_sees() -> None:
    status, text = run("tests/simulated/checks.py")
    assert status == 0, text


@pytest.mark.slow
def test_decoders_run_from_plans() -> None:
    status, text = run("tests/simulated/plan_checks.py")
    assert status == 0, text


@pytest.mark.slow
def test_the_engine_is_ordered_and_never_waits() -> None:
    status, text = run(ENGINE, "-k", CHOSEN)
    assert status == 0, text
    assert text.count("SIMULATED: ") == 16, text


@pytest.mark.slow
def test_operators_of_cuda_and_weights() -> None:
    names = ("attention", "experts", "loading")
    status, text = run(*(f"tests/simulated/{name}.py" for name in names))
    assert status == 0, text


@pytest.mark.slow
def test_steps_of_some_families_wait_for_nothing() -> None:
    status, text = run("tests/simulated/decode_steps.py", "-k", FAMILIES)
    assert status == 0, text
    assert text.count("ENCODER: ") == 4, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        ("no event is waited for", "kind='race'"),
        ("rows are dropped when a step is launched", "kind='freed while read'"),
        ("uploads are pageable", "the launch thread waits"),
    ],
)
def test_faults_are_found(mutant: str, found: str) -> None:
    status, text = run("--mutant", mutant, ENGINE, "-k", "64-True")
    assert status == 1, text
    assert found in text, text
