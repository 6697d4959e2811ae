"""Which of the parity tests are slow: of prompts' pieces, all but those of one size a family."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

SMALL = 5
"""Tokens of a step; so few make many steps."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the smallest pieces, and for all but a test's first family the larger ones too.

    A family keeps its smallest `budget` above `SMALL`, in which prompts come in pieces.
    """
    grids: dict[tuple[str, str], list[tuple[int, pytest.Item]]] = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        if Path(__file__).parent in item.path.parents and callspec is not None:
            others = {name: each for name, each in callspec.params.items() if name != "budget"}
            if len(others) < len(callspec.params):
                test = item.nodeid.partition("[")[0]
                grids[test, repr(others)].append((callspec.params["budget"], item))
    seen = set[str]()
    for (test, _), grid in grids.items():
        larger = [budget for budget, _ in grid if budget > SMALL]
        for budget, item in grid:
            if budget <= SMALL or (test in seen and budget > min(larger)):
                item.add_marker(pytest.mark.slow)
        seen.add(test)
