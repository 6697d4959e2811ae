"""Grids of parameters, of which `make test` runs a part and `make slow` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rest_is_slow(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All of `values` for `pytest.mark.parametrize`, those marked as slow that are not `kept`.

    A tuple is of several parameters.
    """
    values = list(values)
    assert all(each in values for each in kept), "what is kept has to be one of the values"
    return [each if each in kept else _slow(each) for each in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
