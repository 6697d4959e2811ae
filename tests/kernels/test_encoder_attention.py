"""Attention of all to all by the operator for pages, against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.encoder_attention import attend_to_all, is_faster

needs_kernels = pytest.mark.skipif(not library.is_available(), reason="not built")


def rows(count: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """As models make them: heads side by side in a row."""
    return torch.randn(count, length, heads, dim).to(dtype).transpose(1, 2)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("length", [1, 7, 16, 65, 257, 700])
@pytest.mark.parametrize("dims", [(64, 64), (96, 48), (32, 80), (24, 40)], ids=str)
def test_all_see_all(dims: tuple[int, int], length: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query = rows(2, 2 * group, length, dims[0], dtype)
    key, value = rows(2, 2, length, dims[0], dtype), rows(2, 2, length, dims[1], dtype)
    wanted = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), scale=0.3, enable_gqa=True
    )
    found = attend_to_all(query, key, value, 0.3)
    assert found.shape == (2, length, 2 * group, dims[1]) and found.dtype == dtype
    bound = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), wanted.transpose(1, 2), atol=bound, rtol=0)
    for order in ("contiguous", "alone"):
        parts = [x.contiguous() if order == "contiguous" else x[1:] for x in (query, key, value)]
        again = attend_to_all(parts[0], parts[1], parts[2], 0.3)
        assert torch.equal(again, found if order == "contiguous" else found[1:]), order


@needs_kernels
def test_other_keys_than_queries() -> None:
    query, key = rows(1, 2, 30, 32, torch.bfloat16), rows(1, 2, 90, 32, torch.bfloat16)
    wanted = scaled_dot_product_attention(query.double(), key.double(), key.double(), scale=0.2)
    found = attend_to_all(query, key, key, 0.2)
    torch.testing.assert_close(found.double(), wanted.transpose(1, 2), atol=3e-2, rtol=0)


def test_who_is_faster() -> None:
    query = rows(1, 2, 40, 64, torch.bfloat16)
    found = library.instruction_set() if library.is_available() else "none"
    assert is_faster(query, query, query) == (found in ("avx512_bf16", "amx_bf16"))
    for other in (
        query.float(),
        query[..., :40],
        query[:, :, :0],
        rows(1, 2, 64, 40, torch.bfloat16).transpose(-1, -2),
        query.to("meta"),
    ):
        assert not is_faster(other, other, other)
    assert not is_faster(rows(1, 3, 40, 64, torch.bfloat16), query, query)
