"""Heads that are tied to the embeddings: one packed weight, which both read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.models.fusion.packed_linear import Packed, pack_layers
from aioengine.models.fusion.tied_head import PackedRows, pack_tables
from tests.support.tiny import tiny_llama

HAS_KERNELS = library.is_available() and library.instruction_set() != "generic"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def model(is_tied: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny_llama(dtype, hidden_size=64, tie_word_embeddings=is_tied)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_tied_head(dtype: torch.dtype) -> None:
    hf = model(True, dtype)
    plain = copy.deepcopy(hf)
    wanted = plain(input_ids=torch.arange(9)[None]).logits
    pack_layers(hf)
    assert type(hf.lm_head) is nn.Linear, "it is not packed"
    assert pack_tables(hf) == HAS_KERNELS
    assert isinstance(hf.lm_head, Packed) == HAS_KERNELS
    embeddings = hf.get_input_embeddings()
    assert isinstance(embeddings, PackedRows) == HAS_KERNELS
    ids = torch.tensor([[3, 0, 98], [7, 7, 1]], dtype=torch.int32)
    rows = embeddings(ids)
    assert torch.equal(rows, plain.get_input_embeddings()(ids)), "rows are what they were"
    found = hf(input_ids=torch.arange(9)[None]).logits
    bound = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, wanted, atol=bound * float(wanted.abs().max()), rtol=0)


def test_a_head_of_its_own() -> None:
    hf = model(False)
    assert pack_tables(hf) == 0 and type(hf.lm_head) is nn.Linear
    assert type(hf.get_input_embeddings()) is nn.Embedding


@pytest.mark.skipif(not HAS_KERNELS, reason="no wide vectors here")
@torch.inference_mode()
def test_rows_that_are_scaled() -> None:
    """A class of embeddings goes on with what it does to rows."""

    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3

    hf = model(True, torch.float32)
    scaled = Scaled(*hf.get_input_embeddings().weight.shape)
    scaled.weight = hf.lm_head.weight
    hf.set_input_embeddings(scaled)
    wanted = scaled(torch.arange(5))
    assert pack_tables(hf) == 1
    assert isinstance(scaled, PackedRows) and isinstance(scaled, Scaled)
    assert torch.equal(scaled(torch.arange(5)), wanted)


class ReadsItself(nn.Module):
    """Computes with the weight of its embeddings, instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.table.weight)


class LooksUpItself(nn.Embedding):
    """Does not leave that to its base class."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input, self.weight)


class HasSuchATable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = LooksUpItself(40, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.table.weight


class HasAnotherUse(nn.Module):
    """Has a weight in a third role."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.table.weight
        self.kept = self.table.weight


@pytest.mark.parametrize(
    "make", [ReadsItself, HasSuchATable, HasAnotherUse, lambda: nn.Embedding(40, 64)]
)
def test_what_is_left_alone(make: Any) -> None:
    assert pack_tables(make()) == 0


@pytest.mark.skipif(not library.is_available(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 64), (70, 33), (1, 32)])
def test_outputs_of_packed_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    ids = torch.tensor([0, shape[0] - 1, 0])
    assert torch.equal(NativeLinear(weight).rows(ids).to(dtype), weight[ids])
    operator = torch.ops.aioengine_cpu.read_outputs
    assert torch.equal(operator(weight, None, shape[0], ids).to(dtype), weight[ids])
    for wrong in (-1, shape[0]):
        with pytest.raises(RuntimeError, match="row"):
            operator(weight, None, shape[0], torch.tensor([wrong]))
    with pytest.raises(RuntimeError, match="outputs"):
        operator(weight, None, shape[0] + 1, ids)
    with pytest.raises(RuntimeError, match="float32"):
        operator(weight.double(), None, shape[0], ids)
