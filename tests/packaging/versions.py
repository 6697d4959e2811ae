"""Run the core tests under the oldest and the newest torch and transformers that are supported.

    python tests/packaging/versions.py FOLDER [--only NAME] [options of pytest]

Each environment is made once in FOLDER/NAME, of several gigabytes through the package registry, and
kept: pip changes in it what the requirements of today ask for. The package is installed from an
export of HEAD, whose C++ library is built against that environment's torch; the tree's own library
is left alone. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUBJECTS = ("torch>", "transformers>")
TESTS = (
    "tests/core",
    "tests/laws",
    "tests/kernels",
    "tests/sampling",
    "tests/streams",
    "tests/execution",
    "tests/models",
    "tests/parity",
)
LATER = ("transformers.models.molmo2",)
"""What the oldest transformers lacks: our modules for these families are not imported there."""
IMPORT_ALL = """if True:
    import importlib, json, pkgutil, sys, torch, transformers
    import aioengine
    from aioengine.kernels.cpu import library

    for name in dir(aioengine):
        getattr(aioengine, name)
    for module in pkgutil.walk_packages(aioengine.__path__, "aioengine."):
        if module.name.endswith((".__main__", ".libaioengine_cpu")):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in sys.argv[2:]:
                raise
    assert str(library.LIBRARY).startswith(sys.argv[1]), library.LIBRARY
    assert library.is_available(), "the C++ library does not load"
    print(json.dumps({each.__name__: each.__version__ for each in (torch, transformers)}))
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of one environment's tests, with a line for each that did not pass."""

    versions: Mapping[str, str]
    counts: Mapping[str, int]
    remarks: tuple[str, ...]
    seconds: float
    is_good: bool


def supported_ranges() -> list[str]:
    """The requirements of torch and transformers as the package declares them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [each for each in declared if each.startswith(SUBJECTS)]


def oldest(requirement: str) -> str:
    """The requirement that only the lowest version of this one meets."""
    lowest, *_ = requirement.split(",")
    return lowest.replace(">=", "==")


ENVIRONMENTS: Mapping[str, Callable[[str], str]] = {"oldest": oldest, "newest": str}
"""How each environment narrows a requirement of the package; pip takes the newest by itself."""


def make_environment(folder: Path, requirements: list[str]) -> Path:
    """Make or update an environment with the package from an export of HEAD; its Python."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "--extract"], cwd=source, input=archive.stdout, check=True)
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-cache-dir", "--upgrade"]
    # torch goes first: the C++ library is built with its headers.
    subprocess.run([*pip, *requirements], check=True)
    subprocess.run([*pip, *requirements, "--editable", f"{source}[dev]"], check=True)
    return python


def run_tests(python: Path, folder: Path, options: list[str]) -> Result:
    """Import every module, and if that goes well run the core tests."""
    source = folder / "source"
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    imported = subprocess.run(
        [python, "-c", IMPORT_ALL, source, *LATER],
        cwd=source,
        env=environment,
        stdout=subprocess.PIPE,
        check=False,
    )
    if imported.returncode != 0:
        remark = "failed before the tests: a module or the C++ library (`pip install -v` says why)"
        return Result({}, {"failed": 1}, (remark,), 0.0, False)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}", *options]
    begin = time.monotonic()
    done = subprocess.run([*command, *TESTS], cwd=source, env=environment, check=False)
    seconds = time.monotonic() - begin
    counts, remarks = read_report(report)
    return Result(json.loads(imported.stdout), counts, remarks, seconds, done.returncode == 0)


def read_report(report: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Counts by outcome, and a line for each test that did not pass, of a JUnit report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    remarks = []
    for case in ElementTree.parse(report).iter("testcase"):
        found = [each for each in case if each.tag in ("failure", "error", "skipped")]
        outcome = "passed" if not found else "skipped" if found[0].tag == "skipped" else "failed"
        counts[outcome] += 1
        for each in found:
            (reason, *_) = each.get("message", "").splitlines() or [""]
            remarks.append(f"{outcome} {case.get('classname')}::{case.get('name')}: {reason}")
    return counts, tuple(remarks)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the core tests under other versions.")
    parser.add_argument("folder", type=Path, help="where the environments are kept")
    parser.add_argument("--only", choices=ENVIRONMENTS, help="one environment instead of all")
    chosen, options = parser.parse_known_args()
    results = {}
    for name in [chosen.only] if chosen.only else ENVIRONMENTS:
        folder = chosen.folder.resolve() / name
        requirements = [ENVIRONMENTS[name](each) for each in supported_ranges()]
        python = make_environment(folder, requirements)
        results[name] = run_tests(python, folder, options)
    write = sys.stdout.write
    for name, result in results.items():
        write("".join(f"{name}: {remark}\n" for remark in result.remarks))
    for name, result in results.items():
        versions = ", ".join(f"{subject} {found}" for subject, found in result.versions.items())
        counts = ", ".join(f"{count} {outcome}" for outcome, count in result.counts.items())
        write(f"{name:8} {versions:40} {counts:40} {result.seconds:5.0f} s\n")
    return 0 if all(result.is_good for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
