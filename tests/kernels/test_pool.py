"""Memory for pages."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch

from aioengine.kernels.pool import empty_pool

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pool_can_be_written_and_outlives_who_made_it(dtype: torch.dtype) -> None:
    pool = empty_pool(3 << 20, dtype, CPU)
    assert pool.shape == (3 << 20,) and pool.dtype == dtype
    view = pool.as_strided((2, 4), (1 << 20, 1), 5)
    view.copy_(torch.arange(8.0).view(2, 4))
    del pool
    gc.collect()
    assert view.flatten().tolist() == list(range(8))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux has them")
def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, *_: Any) -> None:
            asked.append(option)

    monkeypatch.setattr(mmap, "mmap", Memory)
    assert empty_pool(16, torch.float32, CPU).shape == (16,)
    assert asked == [mmap.MADV_HUGEPAGE]


def test_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert empty_pool(16, torch.float32, CPU).shape == (16,)


def test_what_can_never_be_had_is_torch_s_error() -> None:
    with pytest.raises(RuntimeError):
        empty_pool(1 << 60, torch.float32, CPU)
