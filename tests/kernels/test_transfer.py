"""The step buffer: what is put, where it lies, and how long it holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.kernels.transfer import StepBuffer

NUMBERS = {
    torch.float64: st.floats(allow_nan=False),
    torch.int64: st.integers(-(2**63), 2**63 - 1),
    torch.int32: st.integers(-(2**31), 2**31 - 1),
    torch.bool: st.booleans(),
}
parts = st.sampled_from([*NUMBERS]).flatmap(
    lambda dtype: st.tuples(st.just(dtype), st.lists(NUMBERS[dtype], max_size=9))
)


@given(st.lists(st.lists(parts, max_size=8), min_size=1, max_size=4))
@settings(deadline=None)
def test_what_is_put_is_there_after_it_is_sent(steps: list[list[tuple[torch.dtype, list]]]) -> None:
    buffer = StepBuffer("cpu")
    for step in steps:
        staged = [buffer.put(values, dtype) for dtype, values in step]
        buffer.send()
        for (dtype, values), each in zip(step, staged, strict=True):
            assert each.tensor.dtype == dtype and each.tensor.tolist() == values


def test_tensors_keep_their_shape() -> None:
    buffer = StepBuffer("cpu")
    positions = torch.arange(12).view(3, 4)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int64).T
    staged = buffer.put(positions), buffer.put(table, torch.int32), buffer.put([], torch.bool)
    buffer.send()
    assert torch.equal(staged[0].tensor, positions)
    assert staged[1].tensor.tolist() == [[1, 3], [2, 4]]
    assert staged[1].tensor.dtype == torch.int32
    assert staged[2].tensor.shape == (0,)


def test_equal_sizes_lie_at_equal_addresses() -> None:
    """A captured graph reads from the addresses that it was captured with."""
    buffer = StepBuffer("cpu")
    buffer._is_here = False  # as if it were another device's

    def addresses(number: int) -> list[int]:
        staged = [
            buffer.put([number] * 3, torch.int32),
            buffer.put([number] * 5),
            buffer.put([math.pi], torch.float64),
        ]
        buffer.send()
        assert staged[0].tensor.tolist() == [number] * 3
        return [each.tensor.data_ptr() for each in staged]

    assert addresses(1) == addresses(2)


def test_numbers_out_of_range_are_refused() -> None:
    buffer = StepBuffer("cpu")
    with pytest.raises(OverflowError):
        buffer.put([2**31], torch.int32)


def test_it_may_be_used_in_inference_mode_and_outside_it() -> None:
    buffer = StepBuffer("cpu")
    for mode in (True, False):
        with torch.inference_mode(mode):
            staged = buffer.put([1, 2])
            buffer.send()
            assert staged.tensor.tolist() == [1, 2]
