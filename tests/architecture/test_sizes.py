"""A house one can read: short functions, files of a few screens."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from pathlib import Path

from tests.architecture.source import ROOT, files, tree

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 450
MAX_FOLDER_FILES = 16
MAX_MEDIAN_FUNCTION_LINES = 15


def functions() -> list[tuple[str, int]]:
    """Every function with its length in lines, decorators not counted."""
    found = []
    for path in files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                found.append((where, node.end_lineno - node.lineno + 1))
    return found


def test_functions_are_short() -> None:
    lengths = functions()
    long = [f"{where}: {lines} lines" for where, lines in lengths if lines > MAX_FUNCTION_LINES]
    assert not long
    assert statistics.median(lines for _, lines in lengths) <= MAX_MEDIAN_FUNCTION_LINES


def cpp_files() -> list[Path]:
    """The kernels' C++ sources and headers."""
    found = sorted((ROOT / "kernels").rglob("*.cpp")) + sorted((ROOT / "kernels").rglob("*.h"))
    assert found
    return found


def test_files_are_short() -> None:
    paths = [*files(), *cpp_files()]
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in paths}
    long = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines >= MAX_FILE_LINES]
    assert not long


def test_folders_have_few_files() -> None:
    counts = Counter(path.relative_to(ROOT).parent for path in [*files(), *cpp_files()])
    full = [f"{path}: {count} files" for path, count in counts.items() if count > MAX_FOLDER_FILES]
    assert not full
