"""Count the rooms of a folder and the arrows between them, and hold both within bounds.

A room is a top-level Python file or package of a folder, `__init__` too; the links to other folders
are none. An arrow is an import of one room by another, counted once however often it stands there;
imports inside functions and for types count too. Exit status 1 where a bound is broken.

    python docs/count_rooms.py [ROOT]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

BOUNDS = {"aioengine": (17, 57, 0), "models": (25, 41, 0)}
"""Folder -> the most rooms, arrows and rooms of a circle that it may have."""
WHAT = ("rooms", "arrows", "rooms in a circle")
LINKS = ("kernels", "models", "processors", "streams")
Arrows = Mapping[str, frozenset[str]]


def find_arrows(root: Path, folder: str) -> Arrows:
    """Each room of `root / folder` with the rooms that it imports."""
    package = "aioengine" if folder == "aioengine" else f"aioengine.{folder}"
    rooms = {
        entry.stem: entry
        for entry in sorted((root / folder).iterdir())
        if not entry.is_symlink() and (entry.suffix == ".py" or (entry / "__init__.py").is_file())
    }
    return {
        name: frozenset(
            other
            for file in ([entry] if entry.is_file() else sorted(entry.rglob("*.py")))
            for other in _imported(file, package, rooms)
            if other != name
        )
        for name, entry in rooms.items()
    }


def find_circle(arrows: Arrows) -> list[str]:
    """Rooms of which each is imported by the next, and the last by the first; empty if none are."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1][1:])
    return []


def _imported(file: Path, package: str, rooms: Collection[str]) -> Iterator[str]:
    """Those of a package's rooms that a file imports; what is in no room is of `__init__`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith(f"{package}."):
                room = name.removeprefix(f"{package}.").partition(".")[0]
                if room in rooms:
                    yield room
                elif "." not in name.removeprefix(f"{package}.") and room not in LINKS:
                    yield "__init__"


def main() -> int:
    """Print what is counted; return the exit status."""
    root = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1]
    is_within = True
    for folder, bounds in BOUNDS.items():
        arrows = find_arrows(root, folder)
        circle = find_circle(arrows)
        counted = (len(arrows), sum(map(len, arrows.values())), len(circle))
        said = ", ".join(
            f"{count} {what} (at most {most})"
            for count, most, what in zip(counted, bounds, WHAT, strict=True)
        )
        sys.stdout.write(f"{folder}/: {said} {' '.join(circle)}".rstrip() + "\n")
        is_within &= all(count <= most for count, most in zip(counted, bounds, strict=True))
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
