"""The kernels' core, built without torch by each compiler that is here, and checked.

`core/main.cpp` says what is checked. The emulator's CPU has all that 64-bit ARM has kernels for.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kernels.core.run import POSIX_ONLY, SOURCES, build, link, read_setup

COMPILER = shutil.which("c++") or shutil.which("g++")
CLANG = shutil.which("clang++")
ARM_COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64")
ON_ARM = (str(EMULATOR), "-cpu", "max")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
needs_arm = pytest.mark.skipif(
    ARM_COMPILER is None or EMULATOR is None,
    reason="no g++-aarch64-linux-gnu or no qemu-user here",
)

# A file, what breaks it, and the kernels that are broken then.
MUTANTS = {
    "a window is one key too wide": (
        "arithmetic/attention_tile.h",
        "position - a.window + 1 : 0;\n    const int64_t first",
        "position - a.window : 0;\n    const int64_t first",
        "attention",
    ),
    "a segment is not brought to the new maximum": (
        "arithmetic/attention.cpp",
        "s.sum_total[r] * old_factor",
        "s.sum_total[r]",
        "attention",
    ),
    "the last row of a matmul has one input too few": (
        "matmul/linear.cpp",
        "multiply_tile<1>(x, stride, weights, depth, next, s);",
        "multiply_tile<1>(x, stride, weights, depth - 1, next, s);",
        "linear",
    ),
    "inputs are cut off where they should be rounded": (
        "matmul/int8_gemm.cpp",
        "const Ints n = nearest(v * turn);",
        "const Ints n = __builtin_convertvector(v * turn, Ints);",
        "int8_gemm",
    ),
    "a norm forgets its epsilon": (
        "arithmetic/norm.cpp",
        " + a.epsilon",
        "",
        "norm",
    ),
    "a rotation goes the other way": (
        "arithmetic/rotary.cpp",
        "low * load(cos + i) - high",
        "low * load(cos + i) + high",
        "rotary",
    ),
    "the last of equal logits is taken": (
        "arithmetic/argmax.cpp",
        "if (high > top) {",
        "if (high >= top) {",
        "argmax",
    ),
    "weights of tokens know no temperature": (
        "arithmetic/weights.cpp",
        "exp_negative((load(x + i) - top) / temperature)",
        "exp_negative(load(x + i) - top)",
        "weights",
    ),
}


def check(program: Path, *, on: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run all checks, on an emulator if there is one."""
    return subprocess.run([*on, str(program)], capture_output=True, text=True, check=False)


def assert_sets(found: subprocess.CompletedProcess[str], *names: str) -> None:
    """Hold that these instruction sets were checked, and that nothing failed."""
    assert found.returncode == 0, found.stdout + found.stderr
    checked = [line.partition(":")[0] for line in found.stdout.splitlines()]
    assert set(names) <= set(checked), found.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(CLANG is None, reason="no clang here")
def test_clang_without_what_only_linux_has(tmp_path: Path) -> None:
    """Other POSIX systems get this core, from this compiler."""
    assert_sets(check(build(tmp_path, str(CLANG), POSIX_ONLY)))


@needs_arm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_emulated_arm(tmp_path: Path) -> None:
    program = build(tmp_path, str(ARM_COMPILER))
    assert_sets(check(program, on=ON_ARM), "neon", "neon_dotprod", "neon_bf16")
    oldest = check(program, on=(str(EMULATOR), "-cpu", "cortex-a53"))
    assert_sets(oldest, "neon")
    assert "neon_" not in oldest.stdout, "a CPU is not given what it lacks"


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_core_of_this_machine_and_broken_ones(tmp_path: Path) -> None:
    setup, whole, sources = read_setup(), tmp_path / "whole", tmp_path / "sources"
    assert_sets(check(build(whole, str(COMPILER))))
    missed = []
    for name, (file, old, new, part) in MUTANTS.items():
        broken = tmp_path / "broken"
        shutil.copytree(whole, broken)
        shutil.copytree(SOURCES, sources)
        text = (sources / file).read_text()
        assert text.count(old) == 1, f"{file} has changed"
        (sources / file).write_text(text.replace(old, new))
        objects = setup.core_objects(str(COMPILER), broken, sources)
        plainest = next(iter(setup.parts_for(str(COMPILER))[part]))  # which every such CPU has
        target = broken / f"{part}_{plainest}.o"
        setup.compile_objects(str(COMPILER), {target: objects[target]})
        if check(link(broken, str(COMPILER))).returncode == 0:
            missed.append(name)
        shutil.rmtree(broken)
        shutil.rmtree(sources)
    assert not missed
