"""The package's source files, each once, and what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("kernels", "models", "processors", "streams")


def files(*folders: str) -> list[Path]:
    """The modules in these root folders; `aioengine` alone does not follow its links."""
    found: list[Path] = []
    for folder in folders or ("aioengine", *ROOMS):
        path = ROOT / folder
        links = {path / room for room in ROOMS}
        found += (file for file in path.rglob("*.py") if links.isdisjoint(file.parents))
    return sorted(found)


def module_name(path: Path) -> str:
    """`kernels/attention.py` -> `aioengine.kernels.attention`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "aioengine":
        parts.insert(0, "aioengine")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed."""
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            assert node.module is not None
            yield node.module


def top_level_imports(path: Path) -> set[str]:
    """The distributions (or standard modules) that a file imports."""
    return {name.partition(".")[0] for name in imports(path)}
