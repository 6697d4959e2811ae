"""What tests of several files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioengine.kernels.cpu import library


@pytest.fixture(params=library.instruction_sets() if library.is_available() else ())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each that this CPU has, in turn."""
    before = library.instruction_set()
    assert library.use_instruction_set(request.param) == request.param
    yield request.param
    library.use_instruction_set(before)
