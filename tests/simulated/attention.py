"""The gather backend on the simulated device, by the operators that it takes on CUDA.

The reference, on the CPU, says what is right; operators.py holds the rules of the operators.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.kernels import gather
from aioengine.kernels.dense import KEY_MULTIPLE, dense_attention
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.reference import ReferenceBackend
from tests.kernels.paging import NEARNESS, PagedBatch, make_batch
from tests.kernels.test_backends import CHUNKS, MIXED, with_blocks
from tests.simulated import operators
from tests.simulated.device import DEVICE, LAUNCH_THREAD, SimulatedMode, SimulatedTensor

CUDA = torch.device("cuda", 0)
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _on_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits of this thread are counted, and fail the test."""
    monkeypatch.setattr(threading.current_thread(), "name", LAUNCH_THREAD)
    with SimulatedMode(), torch.inference_mode():
        yield


def run_there(batch: PagedBatch, **options: Any) -> Tensor:
    """The batch through the gather backend, on the device, strides and all."""
    found = batch.attend_there(GatherBackend(), SimulatedTensor, **options)
    assert isinstance(found, SimulatedTensor)
    return found.elem


def assert_right(batch: PagedBatch, **options: Any) -> None:
    expected = batch.attend(ReferenceBackend(), **options)
    tolerance = NEARNESS[expected.dtype]
    torch.testing.assert_close(
        run_there(batch, **options), expected, atol=tolerance, rtol=tolerance
    )


def batch_of(chunks: Any, **options: Any) -> PagedBatch:
    return make_batch(chunks, backend=ReferenceBackend(), **options)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("window", [None, 1, 5])
def test_windows(dtype: torch.dtype, name: str, window: int | None) -> None:
    assert_right(batch_of(CHUNKS[name], dtype=dtype), window=window)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("dims", [(8, 8), (16, 8), (6, 12)])
@pytest.mark.parametrize("strided", [True, False])
def test_shapes(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], strided: bool
) -> None:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    made = batch_of(
        MIXED, dtype=dtype, strided=strided, key_dim=dims[0], value_dim=dims[1], **sizes
    )
    assert_right(made)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [256, 2])
@pytest.mark.parametrize("extras", ["", "softcap", "sinks"])
def test_biases_caps_and_sinks(
    dtype: torch.dtype,
    window: int | None,
    queries: int,
    extras: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "MAX_EXPLICIT_QUERIES", queries)
    options: dict[str, Any] = {
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": torch.linspace(-2, 2, 4, dtype=dtype)},
    }.get(extras, {})
    batch = batch_of(MIXED, dtype=dtype)
    assert_right(batch, window=window, **options)
    table = torch.randn(4, 7, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert_right(batch, window=window, distance_bias=table, **options)


@pytest.mark.parametrize("dtype", NEARNESS)
def test_cross_attention(dtype: torch.dtype) -> None:
    batch = batch_of(MIXED, dtype=dtype)
    assert_right(replace(batch, meta=replace(batch.meta, scratch={}, is_causal=False)))


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("in_window", [False, True])
def test_blocks(dtype: torch.dtype, window: int | None, in_window: bool) -> None:
    ids = [[0], [-1, 0, 0, 0, -1, 1, 1], [-1] * 7, [0, 0, -1, 0, 0, 0, -1]]
    batch = batch_of([(9, 10), (0, 7), (0, 7), (5, 12)], dtype=dtype)
    assert_right(with_blocks(batch, ids, in_window=in_window), window=window)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("start", [0, 7])
def test_one_query_more_than_whole_blocks(dtype: torch.dtype, start: int) -> None:
    for count in (33, 65, 129):
        assert_right(batch_of([(start, start + count)], dtype=dtype))


def test_a_growing_context_makes_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, ...]] = set()
    efficient = operators.efficient_attention

    def noted(query: Tensor, key: Tensor, *others: Any, **options: Any) -> Any:
        shapes.add((*query.shape, key.shape[2]))
        return efficient(query, key, *others, **options)

    monkeypatch.setattr(operators, "efficient_attention", noted)
    for length in range(1, 4 * KEY_MULTIPLE, 7):
        chunks = [(length, length + 1), (length // 2, length // 2 + 1), (length, length + 16)]
        run_there(batch_of(chunks, dtype=HALF, block_size=16))
    decodes = {shape for shape in shapes if shape[0] != 2}
    # Of one or two sequences, and chunks of two key heads, over 64, 128, 192 and more keys.
    assert {shape[-1] % KEY_MULTIPLE for shape in shapes} == {0}
    assert len(shapes) <= 3 * 5 and decodes


@pytest.mark.parametrize("kind", ["bool", "numbers"])
@pytest.mark.parametrize("dtype", [HALF, torch.float64])
def test_masks_of_odd_lengths(dtype: torch.dtype, kind: str) -> None:
    query, key, value = (torch.randn(2, 3, n, 16, device=CUDA, dtype=dtype) for n in (5, 13, 13))
    mask = torch.ones(5, 13, dtype=torch.bool, device=CUDA).tril(4)
    given = mask if kind == "bool" else torch.zeros(5, 13, device=CUDA).masked_fill(~mask, -1e9)
    found = dense_attention(query, key, value, given, scale=0.3)
    rows = (each.elem.float() for each in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *rows, attn_mask=mask.elem, scale=0.3
    )
    torch.testing.assert_close(found.elem.float(), expected, atol=4e-2, rtol=4e-2)


def test_rows_that_lie_badly_are_moved() -> None:
    for shape in ((1, 2, 6, 33), (1, 1, 1, 33)):
        odd = torch.randn(*shape, device=CUDA, dtype=HALF)
        for rows in (odd[..., 1:], odd[..., :-1]):
            assert dense_attention(rows, rows, rows, scale=0.2).shape == rows.shape


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v, b: (q.double(), k, v, b), "one dtype"),
        (lambda q, k, v, b: (q, k[:, :1], v[:, :1], b), "as many heads"),
        (lambda q, k, v, b: (q[..., 1:], k[..., 1:], v, b), "aligned rows"),
        (lambda q, k, v, b: (q[..., :4], k[..., :4], v, b), "whole 16 bytes"),
        (lambda q, k, v, b: (q, k, v, b.float()), "the query's dtype"),
        (lambda q, k, v, b: (q, k, v, b[:, :1]), "the scores' shape"),
        (lambda q, k, v, b: (q, k[:, :, :7], v[:, :, :7], b[..., :7].contiguous()), "aligned rows"),
        (lambda q, k, v, b: (q, k, v, b - float("inf")), "each query sees"),
        (
            lambda q, k, v, b: (
                q.expand(1, 2, -1, -1).repeat(1, 1, 5, 1)[:, :, :33],
                k[:, :1].expand(-1, 2, -1, -1),
                v[:, :1].expand(-1, 2, -1, -1),
                None,
            ),
            "last block",
        ),
    ],
)
def test_broken_rules_are_found(change: Any, text: str) -> None:
    rows = [torch.randn(1, 2, 8, 16, device=CUDA, dtype=HALF) for _ in range(3)]
    bias = torch.zeros(1, 2, 8, 8, device=CUDA, dtype=HALF)
    call = torch.ops.aten._scaled_dot_product_efficient_attention
    call(*rows, bias, False)
    with pytest.raises(operators.BrokenRuleError, match=text):
        call(*change(*rows, bias), False)


def test_a_kernel_that_pytorch_chooses_is_found() -> None:
    rows = torch.randn(1, 2, 8, 16, device=CUDA, dtype=HALF)
    torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
    assert {what for what, _ in DEVICE.waits} == {operators.CHOSEN}
    DEVICE.waits.clear()
