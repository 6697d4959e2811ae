"""Attention and routed experts by the kernels of a real GPU, against the reference on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.kernels.experts import lay_out_experts
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.reference import ReferenceBackend
from tests.kernels.paging import NEARNESS, PagedBatch, make_batch
from tests.kernels.test_backends import CHUNKS, MIXED, with_blocks

# A chunk of 129: the memory-efficient kernel gets the last query wrong where heads share keys.
LONG = [(299, 300), (1000, 1001), (63, 64), (0, 130), (70, 200), (511, 640), (7, 8)]


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.inference_mode():
        yield


def assert_right(batch: PagedBatch, **options: Any) -> None:
    """The gather backend on the GPU says what the reference says."""
    expected = batch.attend(ReferenceBackend(), **options)
    found = batch.attend_there(GatherBackend(), Tensor.cuda, **options)
    tolerance = NEARNESS[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def batch_of(chunks: Any, **options: Any) -> PagedBatch:
    return make_batch(chunks, backend=ReferenceBackend(), **options)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_windows(dtype: torch.dtype, window: int | None) -> None:
    for chunks in (*CHUNKS.values(), LONG):
        assert_right(batch_of(chunks, dtype=dtype), window=window)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("dims", [(8, 8), (6, 12), (64, 64), (80, 80), (128, 128), (256, 256)])
def test_heads_and_their_sizes(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    for num_heads, num_kv_heads in ((4, 4), (4, 2), (7, 1), (3, 3)):
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        made = batch_of(LONG, dtype=dtype, key_dim=dims[0], value_dim=dims[1], **sizes)
        assert_right(made)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("extras", ["softcap", "sinks", "distance_bias", "blocks", "cross"])
def test_what_fused_kernels_do_not_know(dtype: torch.dtype, extras: str) -> None:
    batch, generator = batch_of(MIXED, dtype=dtype), torch.Generator().manual_seed(3)
    options: dict[str, Any] = {}
    match extras:
        case "softcap":
            options["softcap"] = 1.5
        case "sinks":
            options["sinks"] = torch.linspace(-2, 2, 4, dtype=dtype)
        case "distance_bias":
            options["distance_bias"] = torch.randn(4, 7, generator=generator).to(dtype)
        case "blocks":
            ids = [[0], [-1, 0, 0, 0, -1, 1, 1], [-1] * 7, [0, 0, -1, 0, 0, 0, -1]]
            chunks = [(9, 10), (0, 7), (0, 7), (5, 12)]
            batch = with_blocks(batch_of(chunks, dtype=dtype), ids)
        case "cross":
            batch = replace(batch, meta=replace(batch.meta, scratch={}, is_causal=False))
    assert_right(batch, **options)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("spread", ["even", "one expert"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (2048, 768), (12, 20)])
def test_experts(dtype: torch.dtype, spread: str, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weight = (draw(16, outputs, inputs) / inputs**0.5).mT
    for num_tokens in (1, 5, 90, 700):
        scores = torch.rand(num_tokens, 16, generator=generator)
        if spread == "one expert":
            scores[:, 3] = 2
        chosen = scores.topk(2).indices
        hidden, shares = draw(num_tokens, inputs), torch.rand(num_tokens, 2, generator=generator)
        layout = lay_out_experts(chosen.cuda(), [weight.cuda()])
        bias = draw(16, outputs)
        out = layout.linear(layout.take(hidden.cuda()), weight.cuda(), bias.cuda())
        found = layout.combine(out, shares.cuda()).double().cpu()
        rows = torch.zeros(num_tokens, outputs, dtype=torch.float64)
        for expert in range(16):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            product = hidden[tokens].double() @ weight[expert].double() + bias[expert].double()
            rows.index_add_(0, tokens, product * shares[tokens, place, None].double())
        bound = max(NEARNESS[dtype], 1e-5 if dtype != torch.float64 else 0)
        torch.testing.assert_close(found, rows, atol=bound, rtol=bound)
