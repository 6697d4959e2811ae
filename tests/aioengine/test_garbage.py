"""The collector is back as the host had it, whoever else is loading."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from aioengine.garbage import collection_paused


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_pauses_that_overlap() -> None:
    first, second = collection_paused(), collection_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_load_that_fails() -> None:
    with pytest.raises(OSError, match="no such folder"), collection_paused():
        raise OSError("no such folder")
    assert gc.isenabled()


def test_a_host_without_collections() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()
