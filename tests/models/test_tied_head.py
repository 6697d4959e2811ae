"""Heads that are tied to the embeddings, multiplied in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.linear import NativeLinear, PlainLinear, reads_plain
from aioengine.models.fusion.packed_linear import pack_layers
from aioengine.models.fusion.tied_head import TiedLinear, read_tables
from tests.support.tiny import tiny_llama

HAS_KERNELS = library.is_available() and library.instruction_set() != "generic"
HAS_BFLOAT16 = library.is_available() and library.instruction_set() in ("avx512_bf16", "amx_bf16")
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="not multiplied here")


def model(is_tied: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny_llama(dtype, hidden_size=64, tie_word_embeddings=is_tied)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_a_tied_head(dtype: torch.dtype) -> None:
    hf = model(True, dtype)
    wanted = copy.deepcopy(hf)(input_ids=torch.arange(9)[None]).logits
    pack_layers(hf)
    assert type(hf.lm_head) is nn.Linear, "it is not packed"
    assert read_tables(hf) == HAS_KERNELS
    assert isinstance(hf.lm_head, TiedLinear) == HAS_KERNELS
    assert hf.lm_head.weight is hf.get_input_embeddings().weight, "there is one weight still"
    found = hf(input_ids=torch.arange(9)[None]).logits
    bound = 3e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, atol=bound * float(wanted.abs().max()), rtol=0)


def test_a_head_of_its_own() -> None:
    hf = model(False)
    assert read_tables(hf) == 0 and type(hf.lm_head) is nn.Linear


@needs_bfloat16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 32, 33, 70, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (33, 64), (100, 96), (320, 2048)])
def test_the_bits_of_a_packed_weight(outputs: int, inputs: int, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(torch.bfloat16)
    shift = torch.randn(outputs).to(torch.bfloat16) if bias else None
    wide = torch.randn(rows, 1, inputs + 5).to(torch.bfloat16)
    x = wide[..., 3:-2]
    found = PlainLinear(weight, shift)(x)
    assert found.shape == (rows, 1, outputs)
    assert torch.equal(found, NativeLinear(weight, shift)(x))
    assert torch.equal(PlainLinear(weight, shift)(x[:1]), found[:1]), "a row has no company"


@pytest.mark.skipif(not HAS_KERNELS, reason="no wide vectors here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 3), (33, 64), (100, 97), (71, 300), (40, 16)])
def test_the_sums_of_a_plain_weight(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and HAS_BFLOAT16:
        inputs = -(-inputs // 32) * 32
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    shift = torch.randn(outputs).to(dtype)
    x = torch.randn(13, inputs + 5).to(dtype)[:, 3:-2]
    plain = PlainLinear(weight, shift)
    found = plain(x)
    exact = nn.functional.linear(x.double(), weight.double(), shift.double())
    bound = 2 * torch.finfo(dtype).eps * float(exact.abs().max())
    torch.testing.assert_close(found.double(), exact, atol=bound, rtol=0)
    for count in (1, 2, 3, 5, 8):
        assert torch.equal(plain(x[:count]), found[:count]), "a row has no company"


def test_which_weights_are_read() -> None:
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert reads_plain(weight) == reads_plain(weight.float()) == HAS_KERNELS
    assert reads_plain(weight[:, :48].contiguous()) == (HAS_KERNELS and not HAS_BFLOAT16)
    for other in (weight.double(), weight[:, :40], weight[:0], weight[0]):
        assert not reads_plain(other)
    assert not reads_plain(weight.to("meta"))


@needs_bfloat16
def test_others_are_refused() -> None:
    operator, x = torch.ops.aioengine_cpu.linear, torch.zeros(2, 64, dtype=torch.bfloat16)
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="fit"):
        operator(x, weight, None, None, 40)
    with pytest.raises(RuntimeError, match="plain"):
        operator(x, weight, None, None, 64, 1, True)
