"""A house one can read: short functions, files of a few screens."""

from __future__ import annotations

import ast
import statistics

from tests.architecture.source import ROOT, files, tree

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 450
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


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in files()}
    long = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines >= MAX_FILE_LINES]
    assert not long
