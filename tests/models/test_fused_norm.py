"""Norms of one operator: the usual ones of transformers are taken, others are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from aioengine.kernels.cpu import library
from aioengine.models.fusion.fused_norm import FusedLayerNorm, FusedRMSNorm, fuse_norms


def drawn(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    return norm.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, GemmaRMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("dim", [8, 100, 1024])
def test_usual_norms(kind: type[nn.Module], dtype: torch.dtype, dim: int) -> None:
    norm = drawn(kind(dim, 1e-5), dtype)
    plain = copy.deepcopy(norm)
    assert fuse_norms(nn.Sequential(norm)) == 1
    assert isinstance(norm, FusedLayerNorm if kind is nn.LayerNorm else FusedRMSNorm)
    x = torch.randn(1, 7, dim).to(dtype)
    found, wanted = norm(x), plain(x)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    close = (6 if kind is nn.LayerNorm else 2) * torch.finfo(dtype).eps  # which ends in a sum
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    assert torch.equal(norm(x[:, 3:4]), found[:, 3:4]), "a row has no company"
    if library.is_available():
        assert torch.equal(norm(x.mT.contiguous().mT), found), "however it lies"


@pytest.mark.skipif(not library.is_available(), reason="the norms are PyTorch's here")
def test_a_cpu_that_does_not_convert_float16() -> None:
    before = library.instruction_set()
    library.use_instruction_set("generic")
    try:
        test_usual_norms(LlamaRMSNorm, torch.bfloat16, 100)
        norm = drawn(LlamaRMSNorm(100, 1e-5), torch.float16)
        plain, x = copy.deepcopy(norm), torch.randn(1, 7, 100).half()
        fuse_norms(nn.Sequential(norm))
        torch.testing.assert_close(norm(x), plain(x), atol=2e-3, rtol=2e-3)
    finally:
        library.use_instruction_set(before)


class _NormPlus2(GemmaRMSNorm):  # type: ignore[misc]
    """Of a kind that nobody has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self._norm(x.float()) * (2 + self.weight.float())).type_as(x)


_NormPlus2.__name__ = "AnotherRMSNorm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_another_kind_stays(dtype: torch.dtype) -> None:
    norm = drawn(_NormPlus2(64), dtype)
    x = torch.randn(3, 64).to(dtype)
    wanted = norm(x)
    assert fuse_norms(nn.Sequential(norm)) == 0
    assert torch.equal(norm(x), wanted)


def test_what_is_left_alone() -> None:
    hooked = drawn(LlamaRMSNorm(8), torch.float32)
    hooked.register_forward_hook(lambda *_: None)
    double = drawn(LlamaRMSNorm(8), torch.float64)
    others = nn.LayerNorm((2, 8)), nn.LayerNorm(8, bias=False), nn.LayerNorm(8).double()
    assert fuse_norms(nn.Sequential(hooked, double, nn.RMSNorm(8), *others)) == 0
