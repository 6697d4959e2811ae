"""The wheel: what it is called, what is in it, and that it works where no compiler is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
LIBRARY = "aioengine/kernels/cpu/libaioengine_cpu.so"
NOT_SOURCE = (".git", ".venv", ".cache", "build", "dist", "out", "*.egg-info", "*.so", ".*_cache")
USE_IT = """if True:
    import asyncio, sys, torch
    from aioengine import AsyncEngine, SamplingParams, demo_model
    from aioengine.kernels.attention import select_backend
    from aioengine.kernels.cpu import library
    assert str(library.LIBRARY).startswith(sys.prefix), library.LIBRARY

    async def main():
        async with AsyncEngine.from_pretrained(demo_model()) as engine:
            return await engine.generate("hello", SamplingParams(temperature=0, max_tokens=4))

    assert len(asyncio.run(main()).token_ids) == 4
    print(select_backend("auto", "cpu").name)
"""


def run(words: list[object], **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(source: Path, folder: Path, **environment: str) -> Path:
    words = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-index"]
    words += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    said = run(list(words), **environment)
    (wheel,) = folder.glob("*.whl")
    if "-none-any" in wheel.name:
        notices = [line for line in said.splitlines() if "C++ kernels are left out" in line]
        assert notices, "whoever builds it is told"
    return wheel


def use(wheel: Path, folder: Path) -> str:
    """Install the wheel into a new environment, without a compiler; which backend it takes.

    What it depends on is lent by this one: the folder is on the path, but no link in it is
    followed, so the package under test is not there.
    """
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    lent = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site,) = folder.glob("lib/python*/site-packages")
    words = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run([*words, wheel])
    (site / "lent.pth").write_text("\n".join(dict.fromkeys(lent)))
    return run([python, "-c", USE_IT], PATH=str(folder / "bin"), CXX="", CC="").strip()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy, so that what a build leaves behind is left neither here nor for another build."""
    folder = tmp_path / "source" / "aioengine"
    ignored = shutil.ignore_patterns(*NOT_SOURCE)
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored))


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_a_wheel_of_the_platform_works_without_a_compiler(source: Path, tmp_path: Path) -> None:
    wheel = build(source, tmp_path / "made")
    assert re.fullmatch(r"aioengine-[\d.]+-py3-none-manylinux_\d+_\d+_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert LIBRARY in names
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert use(wheel, tmp_path / "clean") == "cpu"


def test_without_a_compiler_the_wheel_is_pure(source: Path, tmp_path: Path) -> None:
    wheel = build(source, tmp_path / "made", CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    backend, *notices = use(wheel, tmp_path / "clean").splitlines()
    assert backend == "gather"
    assert len(notices) == 1 and "plain PyTorch" in notices[0]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_a_compiler_that_fails_costs_the_kernels_only(source: Path, tmp_path: Path) -> None:
    wheel = build(source, tmp_path / "made", CXX=shutil.which("false") or "false")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert use(wheel, tmp_path / "clean").splitlines()[0] == "gather"
