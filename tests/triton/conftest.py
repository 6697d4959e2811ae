"""Kernels in Triton on a machine without a GPU. `make triton-test` brings Triton, and runs them.

With TRITON_INTERPRET=1 programs run in Python, here in random order; without, they are compiled.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

collect_ignore_glob: list[str] = []
if find_spec("triton") is None:
    collect_ignore_glob += ["*.py"]
else:
    from triton import knobs

    is_interpreted = knobs.runtime.interpret
    collect_ignore_glob += ["test_programs.py"] if is_interpreted else ["test_interpreted_*.py"]


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs in random order, and NaN in all memory that nobody has written."""
    if not Path(request.path).name.startswith("test_interpreted"):
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    order: list[tuple[int, int, int]] = []
    set_dim, set_index = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    generator = random.Random(request.node.nodeid)

    def begin(builder: Any, x: int, y: int, z: int) -> None:
        order[:] = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
        generator.shuffle(order)
        set_dim(builder, x, y, z)

    def choose(builder: Any, *_: int) -> None:
        set_index(builder, *order.pop())

    monkeypatch.setattr(InterpreterBuilder, "set_grid_dim", begin)
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", choose)
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills what is empty
    yield
    torch.use_deterministic_algorithms(was_on)
    assert not order, "each program of the last launch has run"


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a GPU has, on a CPU: kernels' plans and sampling, and captures."""
    from aioengine.engine.loading import loader
    from aioengine.kernels.matmul import TorchLinear
    from aioengine.kernels.triton import sample
    from aioengine.kernels.triton.operators import TritonOperators
    from aioengine.models import fusion
    from aioengine.models.fusion import decoder_plan, fuse_activations, fuse_norms
    from aioengine.models.fusion.packed_linear import pack_layers
    from aioengine.sampling import sampler
    from tests.triton.recording import Recording

    found = Recording()
    monkeypatch.setattr(loader, "capture_on", lambda _: found)
    monkeypatch.setattr(sampler, "draws_on", lambda _: True)
    monkeypatch.setattr(sampler, "draws", lambda _: True)
    monkeypatch.setattr(sampler, "draw", sample.draw)
    device = TorchLinear, TritonOperators, decoder_plan.ROUNDINGS
    monkeypatch.setattr(decoder_plan, "_device", lambda _: device)
    passes = partial(pack_layers, pack=TorchLinear), fuse_activations, fuse_norms
    monkeypatch.setattr(fusion, "PASSES", passes)
    return found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Kernels that were launched, each with what another program would be compiled for."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__
    found: set[Any] = set()

    def noted(grid: Any, *args: Any, **kwargs: Any) -> None:
        dtypes = tuple(each.dtype for each in args if isinstance(each, torch.Tensor))
        found.add((grid.fn.__name__, dtypes, tuple(sorted(kwargs.items()))))
        run(grid, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    return found
