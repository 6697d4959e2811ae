"""Which of the parity tests are slow: prompts in the smallest pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL = 5
"""Tokens of a step; so few make many steps."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and isinstance(item, pytest.Function):
            callspec = getattr(item, "callspec", None)
            if callspec is not None and callspec.params.get("budget", SMALL + 1) <= SMALL:
                item.add_marker(pytest.mark.slow)
