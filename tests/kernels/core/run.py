"""Build the kernels' core with its checks, without torch's headers, and run them.

    python tests/kernels/core/run.py FOLDER [--compiler c++] [--emulator "qemu-aarch64 -cpu max"]
        [--posix-only] [what core_checks is told]

FOLDER takes what is made. The compiler may be one for another machine, whose emulator runs what it
makes. Warnings are errors. `--posix-only` leaves out what only Linux has.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "tests/kernels/core"
SOURCES = ROOT / "kernels/cpu"
POSIX_ONLY = "-DAIOENGINE_POSIX_ONLY"


def read_setup() -> ModuleType:
    """The package's setup.py, which says how each kernel is compiled."""
    spec = importlib.util.spec_from_file_location("aioengine_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, compiler: str, *flags: str) -> Path:
    """Compile and link the checks; where the program is."""
    setup = read_setup()
    folder.mkdir(parents=True, exist_ok=True)
    objects = setup.core_objects(compiler, folder, SOURCES)
    folders = setup.folders(setup.CORE_FOLDERS, SOURCES)
    objects |= {folder / f"{each.stem}.o": [*folders, "-O1", each] for each in HERE.glob("*.cpp")}
    setup.compile_objects(compiler, objects, "-Werror", *flags)
    return link(folder, compiler)


def link(folder: Path, compiler: str) -> Path:
    """Link the objects in the folder. All of C++ is in the program, as an emulator has none."""
    program = folder / "core_checks"
    words = [compiler, "-static", "-pthread", *sorted(folder.glob("*.o")), "-o", program]
    read_setup().run(words)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the kernels' core and check it.")
    parser.add_argument("folder", type=Path, help="takes what is made")
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--emulator", default="", help="runs the program")
    parser.add_argument("--posix-only", action="store_true", help="leave out what only Linux has")
    parser.add_argument("options", nargs="*", help="SEED and INSTRUCTION_SET")
    chosen = parser.parse_args()
    flags = [POSIX_ONLY] if chosen.posix_only else []
    program = build(chosen.folder, chosen.compiler, *flags)
    command = [*shlex.split(chosen.emulator), str(program), *chosen.options]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
