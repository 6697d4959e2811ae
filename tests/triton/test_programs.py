"""Kernels compiled ahead for three kinds of chips: what programs take, and are made of."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.layer_plan import NormPlan
from aioengine.kernels.metadata import GroupTables, stage_metadata
from aioengine.kernels.transfer import StepBuffer
from aioengine.kernels.triton.angles import angles_of
from aioengine.kernels.triton.backend import TritonBackend
from aioengine.kernels.triton.operators import TritonOperators
from aioengine.kernels.triton.sample import draw
from tests.kernels.paging import make_batch
from tests.triton.compiling import CHIPS, Launch, compiled, launches_of, recorded
from tests.triton.decoders import Decoder

MAX_SHARED_BYTES = 99 << 10
"""What a program may have on cards for consumers too."""
SHAPES = {
    "Qwen2 0.5B": (14, 2, 64),
    "Qwen2 7B": (28, 4, 128),
    "Llama 8B": (32, 8, 128),
    "Phi 2": (32, 32, 80),
    "Phi 3": (32, 32, 96),
    "Falcon": (71, 1, 64),
    "DeepSeek VL2": (16, 16, 192),
    "Gemma 3": (8, 4, 256),
}
"""Query heads, key heads, numbers in a head."""
STEPS = {"decode": [(299, 300)] * 8, "prefill": [(100, 200), (0, 50)]}


def launches(
    heads: tuple[int, int, int], step: str, dtype: torch.dtype, **options: object
) -> list[Launch]:
    batch = make_batch(
        STEPS[step],
        backend=GatherBackend(),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        key_dim=heads[2],
        value_dim=heads[2],
        block_size=32,
        dtype=dtype,
    )
    found = launches_of(partial(batch.attend, TritonBackend(), **options))
    assert [each.name for each in found] == ["attend", "combine"][: 2 if step == "decode" else 1]
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_fits(shape: str, step: str) -> None:
    for launch in launches(SHAPES[shape], step, torch.bfloat16):
        for chip in CHIPS:
            program = compiled(launch, chip)
            assert program.registers <= 255 and program.shared_bytes <= MAX_SHARED_BYTES
            if SHAPES[shape][2] <= 128:
                assert program.spilled == 0, (launch.name, chip)
            if launch.name == "attend":
                assert "LDGSTS" in program.code, "keys are copied while others are computed with"
                assert "MMA" in program.code, "by tensor cores"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_fit(step: str, dtype: torch.dtype) -> None:
    for shape in ("Qwen2 0.5B", "Llama 8B"):
        for launch in launches(SHAPES[shape], step, dtype):
            program = compiled(launch, 90)
            assert program.spilled == 0 and program.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.parametrize("step", STEPS)
def test_masks_fit(step: str) -> None:
    bias, sinks = torch.zeros(32, 128), torch.zeros(32)
    for options in (
        {"window": 100, "softcap": 30.0},
        {"window": 128, "sinks": sinks},
        {"distance_bias": bias},
    ):
        for launch in launches(SHAPES["Llama 8B"], step, torch.bfloat16, **options):
            program = compiled(launch, 90)
            assert program.spilled == 0 and program.shared_bytes <= MAX_SHARED_BYTES


def test_steps_of_all_sizes_are_few_programs() -> None:
    """What varies from step to step is no constant of theirs: all can be made at the start."""
    programs = set()
    for count in (1, 2, 3, 7, 16, 64):
        for lengths in (20, 300, 513):
            chunks = [(lengths + i, lengths + i + 1) for i in range(count)]
            for more in ([], [(0, 17)], [(30, 30 + 16)], [(0, 5), (9, 90)]):
                batch = make_batch(chunks + more, backend=GatherBackend(), dtype=torch.float16)
                for launch in launches_of(partial(batch.attend, TritonBackend(), window=40)):
                    programs.add(launch.specialised()[-1])
    kinds = [name for name, *_ in programs]
    assert kinds.count("attend") <= 3, "decode, decode in splits, and prompts"
    assert kinds.count("combine") <= 6, "one for each power of two of splits"


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("has_norms", [False, True])
def test_operators_fit(head_dim: int, has_norms: bool) -> None:
    """Ten launches a layer: five kernels of ours beside the keys' splits, and four matmuls."""
    decoder = Decoder(torch.bfloat16, head_dim=head_dim, has_head_norms=has_norms)
    with recorded() as found:
        decoder.run(TritonOperators, None)
    names = [each.name for each in found]
    layer = ["norm", "rope", "attend", "combine", "attend", "norm", "gate"]
    assert names == [*layer, *layer, "norm"], "a step of prompts and of single tokens"
    for launch in found:
        for chip in CHIPS:
            program = compiled(launch, chip)
            assert program.shared_bytes <= MAX_SHARED_BYTES
            assert program.spilled == 0 or (launch.name == "attend" and head_dim > 128)


@pytest.mark.parametrize("dim", [896, 4096, 8192, 16384])
def test_norms_fit(dim: int) -> None:
    rows = torch.empty(3, dim, dtype=torch.bfloat16)
    for bias in (None, rows[0]):
        plan = NormPlan(rows[0], 1e-6, bias)
        (launch,) = launches_of(partial(TritonOperators([]).normalize, rows, plan))
        assert compiled(launch, 90).spilled == 0


def test_sampling_fits_and_is_one_program() -> None:
    programs = set()
    for count, vocab in ((1, 151936), (3, 32000), (16, 262208)):
        logits, choices = torch.empty(count, vocab), torch.empty(count, 5, dtype=torch.float64)
        bans = (torch.empty(9, dtype=torch.int32), torch.empty(count + 1, dtype=torch.int32))
        for given in ((), bans):
            (launch,) = launches_of(partial(draw, logits, choices, *given))
            programs.add(launch.specialised()[-1])
        for chip in CHIPS:
            program = compiled(launch, chip)
            assert program.spilled == 0 and program.shared_bytes <= MAX_SHARED_BYTES
    assert len(programs) == 1


@pytest.mark.parametrize("has_axes", [False, True])
def test_angles_are_one_program(has_axes: bool) -> None:
    programs = set()
    for count in (1, 5, 16, 300):
        positions = torch.zeros(3 * count + 1, dtype=torch.int64)[1:]
        positions = positions.view(3, count) if has_axes else positions[:count]
        axes = torch.zeros(64, dtype=torch.int64) if has_axes else None
        given = positions, torch.ones(64), 1.0, torch.bfloat16, axes
        (launch,) = launches_of(partial(angles_of, *given))
        programs.add(launch.specialised()[-1])
        for chip in CHIPS:
            assert compiled(launch, chip).shared_bytes <= MAX_SHARED_BYTES
    assert len(programs) == 1


def test_a_step_lies_at_any_address() -> None:
    """Parts of the step buffer begin where others end, in each step elsewhere."""
    decoder, programs = Decoder(torch.float16), set()
    for shift in range(5):
        buffer = StepBuffer("cpu", is_fixed=True)
        buffer.put([0] * shift, torch.int32)
        is_open = shift % 2 > 0
        groups = [GroupTables([[3, 7], [0, 2], [1, 8]])]
        sizes = {"block_size": 4, "starts": [6, 4, 0], "ends": [7, 8, 5]}
        (staged,) = stage_metadata(buffer, groups, is_captured=is_open, is_open=is_open, **sizes)
        buffer.send()
        with recorded() as found:
            decoder.run(TritonOperators, None, staged())
        programs |= {each.specialised()[-1] for each in found if each.name != "attend"}
        programs |= {
            each.specialised()[-1] for each in found if each.name == "attend" and shift % 2 == 0
        }
    kinds = [name for name, *_ in programs]
    assert kinds.count("rope") == 1 and kinds.count("attend") == 2
