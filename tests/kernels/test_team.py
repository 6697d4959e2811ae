"""The team of threads, built alone: random programs, threads that stop at random, and mutants.

What the operators of a model come to on several threads, `test_same_bits` tells. `team_soak.cpp`
says how it is run for an hour.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEAM = ROOT / "kernels/cpu/program/team.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++")
SECONDS = "1.5"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")

MUTANTS = {
    "a part is committed by everybody who has computed it": (
        "if (!parts_[part.index].compare_exchange_strong(taken, word(epoch, COMMITTING))) "
        "return false;",
        "",
    ),
    "an operator begins before the one before has ended": (
        "if (progress == all) {",
        "if (progress + 1 >= all) {",
    ),
    "memory is used again while somebody is inside": (
        "if (program->num_inside_.load()) continue;",
        "",
    ),
}


def build(source: str, folder: Path, *flags: str) -> Path:
    """A soak test with `source` for the team."""
    assert COMPILER is not None
    team, program = folder / "team.cpp", folder / "soak"
    team.write_text(source)
    soak = Path(__file__).with_name("team_soak.cpp")
    options = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    folders = ["-I", str(TEAM.parent), "-I", str(TEAM.parents[1] / "include")]
    subprocess.run(
        [COMPILER, *options, *folders, str(soak), str(team), "-o", str(program)], check=True
    )
    return program


def run(program: Path, threads: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(threads), SECONDS, "7"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20)


def test_threads_that_stop_at_random(tmp_path: Path) -> None:
    program = build(TEAM.read_text(), tmp_path)
    for threads in (1, 2, 5):
        found = run(program, threads)
        assert found.returncode == 0, found.stderr
        assert "programs" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path) -> None:
    old, new = MUTANTS[name]
    source = TEAM.read_text()
    assert source.count(old) == 1
    program = build(source.replace(old, new), tmp_path, "-Wno-unused")
    with suppress(subprocess.TimeoutExpired):  # or it waits for ever
        assert run(program, 5).returncode != 0


@pytest.mark.slow
def test_the_sanitizer_of_threads_finds_nothing(tmp_path: Path) -> None:
    try:
        program = build(TEAM.read_text(), tmp_path, "-fsanitize=thread", "-g", "-O1")
    except subprocess.CalledProcessError:
        pytest.skip("no sanitizer here")
    found = run(program, 4)
    assert found.returncode == 0, found.stderr[-3000:]
