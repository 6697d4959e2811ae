"""A closed engine frees its tensors, but not while its team may be in the last step."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from aioengine.engine import engine_core
from aioengine.kernels.cpu import library
from tests.support.engines import greedy, running_engine
from tests.support.tiny import save_tiny_llava

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no native operators")


def live_tensors() -> list[torch.Tensor]:
    """All tensors that Python knows."""
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_team_ends_while_everything_it_may_read_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A helper that has lost its core reads weights and pages behind the step's end."""
    alive: list[int] = []
    at_rest: list[weakref.ref[torch.Tensor]] = []

    def end_team() -> None:
        alive.append(sum(ref() is not None for ref in at_rest))
        library.end_team()

    before = {id(each) for each in live_tensors()}
    save_tiny_llava(tmp_path)
    async with running_engine(tmp_path, dtype=dtype) as engine:
        await engine.generate("what?", greedy(8))
        at_rest += [weakref.ref(each) for each in live_tensors() if id(each) not in before]
        monkeypatch.setattr(engine_core, "end_team", end_team)
    assert alive == [len(at_rest)]
    gc.collect()
    assert sum(ref() is not None for ref in at_rest) == 0
