"""Grids of parameters, of which `make test` runs a part and `make slow` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rest_is_slow(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All of `values` for `pytest.mark.parametrize`, those marked as slow that are not `kept`."""
    values = list(values)
    assert all(each in values for each in kept), "what is kept is one of the values"
    return [each if each in kept else pytest.param(each, marks=pytest.mark.slow) for each in values]
