"""Work that cannot be captured is refused before it is."""

from __future__ import annotations

import gc
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from aioengine.execution.graphs import RefusesWaits, WaitError, _TorchCapture, capture_on

NUMBERS = torch.arange(6)
WAITING: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x[2].item(),
    "a truth": lambda x: bool(x[1]),
    "an index by mask": lambda x: x[x > 2],
    "a write by mask": lambda x: x.clone().index_put_((x > 2,), torch.tensor(0)),
    "places": lambda x: x.nonzero(),
    "counts as sizes": lambda x: torch.repeat_interleave(x),
    "different numbers": lambda x: x.unique(),
    "a copy from another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_what_waits(name: str, is_inference: bool) -> None:
    with (
        torch.inference_mode(is_inference),
        pytest.raises(WaitError),
        RefusesWaits(),  # type: ignore[no-untyped-call]
    ):
        WAITING[name](NUMBERS)


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_does_not(is_inference: bool) -> None:
    with torch.inference_mode(is_inference), RefusesWaits():  # type: ignore[no-untyped-call]
        found = torch.where(NUMBERS > 2, NUMBERS[NUMBERS.flip(0)], 0).to(torch.float32)
        copied = torch.empty(6).copy_(found) @ torch.ones(6, 2)
        copied[1:] = 2
    assert copied.shape == (2,) and found.tolist() == [0, 0, 0, 2, 1, 0]


@pytest.mark.parametrize("place", ["capture_begin", "work", "capture_end"])
def test_a_capture_that_fails_leaves_the_collector_on(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    graph = Mock()
    monkeypatch.setattr(torch, "cuda", Mock(CUDAGraph=Mock(return_value=graph)))
    if place != "work":
        getattr(graph, place).side_effect = RuntimeError("refused")
    work = Mock(side_effect=[None, RuntimeError("refused") if place == "work" else None])
    with pytest.raises(RuntimeError, match="refused"):
        _TorchCapture().capture(work)
    assert gc.isenabled()


def test_nothing_is_captured_on_a_cpu() -> None:
    assert capture_on(torch.device("cpu")) is None
