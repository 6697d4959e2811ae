"""Weights in groups: rounded well, packed and read back, and multiplied to the bit of each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from aioengine.kernels.cpu.library import (
    instruction_set,
    instruction_sets,
    is_available,
    use_instruction_set,
)
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.grouped import (
    GroupedWeight,
    TorchGroupedLinear,
    can_group,
    e4m3_weight,
    pack_grouped,
    round_inputs,
    round_weight,
)
from aioengine.kernels.matmul import FORMULAS, Activation

needs_kernels = pytest.mark.skipif(not is_available(), reason="the C++ kernels were not built")
SETS = instruction_sets() if is_available() else ()
FORMS = [
    *((4, 32, "zeros"), (4, 64, "leasts"), (4, 128, "middle"), (4, 128, "zeros")),
    *((8, 32, "middle"), (8, 128, "middle"), (8, 16, "middle"), (8, 32, "leasts")),
    (4, 16, "leasts"),
]
SHAPES = [(70, 48), (64, 576), (96, 201), (1, 3), (33, 128)]


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    before = instruction_set()
    use_instruction_set(request.param)
    yield request.param
    use_instruction_set(before)


def draw(
    outputs: int, inputs: int, bits: int, group: int, lowest: str, *, is_full: bool = False
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = (
        torch.randn(outputs, inputs, generator=generator) * torch.logspace(-3, 2, outputs)[:, None]
    )
    found = replace(round_weight(weight, bits, group), has_full_inputs=is_full)
    if lowest == "leasts":
        leasts = torch.randn(found.scales.shape, generator=generator).half()
        return replace(found, lowest=leasts)
    return replace(found, lowest=None) if lowest == "middle" else found


@needs_kernels
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(("bits", "group", "lowest"), FORMS)
def test_matmul(
    instructions: str,
    bits: int,
    group: int,
    lowest: str,
    outputs: int,
    inputs: int,
    is_full: bool,
) -> None:
    weight = draw(outputs, inputs, bits, group, lowest, is_full=is_full)
    bias = torch.randn(outputs)
    packed, twin = pack_grouped(weight, bias), TorchGroupedLinear(weight, bias)
    assert isinstance(packed, NativeLinear) and packed.is_grouped
    x = torch.randn(131, inputs) * 3
    found, wanted = packed(x), twin(x)
    bound = 2e-6 * wanted.abs().amax(0).clamp_min(1)
    assert ((found - wanted).abs() <= bound).all()
    for count in (1, 2, 3, 5, 7, 49):
        assert torch.equal(packed(x[:count]), found[:count]), "a row has no company"
    rows = torch.tensor([0, outputs - 1])
    torch.testing.assert_close(packed.rows(rows), weight.floats()[rows], atol=0, rtol=1e-6)
    assert torch.equal(packed.rows(rows).half(), twin.rows(rows).half())


@needs_kernels
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(("bits", "group", "lowest"), FORMS)
def test_bfloat16_is_multiplied_in_full(
    instructions: str, bits: int, group: int, lowest: str, outputs: int, inputs: int
) -> None:
    weight = draw(outputs, inputs, bits, group, lowest, is_full=True)
    packed, twin = pack_grouped(weight), TorchGroupedLinear(weight)
    x = (torch.randn(211, inputs + 3) * 3).bfloat16()[:, 1 : inputs + 1]
    found, wanted = packed(x), twin(x.float())
    bound = wanted.abs() * 2**-8 + 4e-6 * wanted.abs().amax(0).clamp_min(1)
    assert bool(((found.float() - wanted).abs() <= bound).all())
    for count in (1, 2, 3, 4, 5, 13, 97):
        assert torch.equal(packed(x[:count]), found[:count]), "a row has no company"


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_every_cpu_comes_to_the_same_numbers(bits: int) -> None:
    """What is added up as integers is exact; floats may be added in one instruction or two."""
    packed = pack_grouped(draw(64, 256, bits, 32, "zeros" if bits == 4 else "middle"))
    x, before, found = torch.randn(9, 256), instruction_set(), []
    for name in SETS:
        use_instruction_set(name)
        found.append(packed(x))
    use_instruction_set(before)
    for each in found:
        torch.testing.assert_close(each, found[0], atol=1e-6 * float(found[0].abs().max()), rtol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_narrow_inputs_gates_and_activations(bits: int, is_full: bool, dtype: torch.dtype) -> None:
    weight = draw(128, 96, bits, 32, "zeros" if bits == 4 else "middle", is_full=is_full)
    packed, twin = pack_grouped(weight), TorchGroupedLinear(weight)
    assert isinstance(packed, NativeLinear) and packed.can_gate
    wide = torch.randn(50, 101).to(dtype)
    x = wide[:, 3:-2]  # rows apart
    for activation in (Activation.SILU, Activation.GELU_TANH):
        gates, others = twin(x.float()).chunk(2, -1)
        wanted = FORMULAS[activation](gates) * others
        found = packed(x, activation, is_gated=True)
        assert found.dtype is dtype
        bound = torch.finfo(dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(found.float(), wanted, atol=bound, rtol=0)


@pytest.mark.parametrize("pack", [pack_grouped, TorchGroupedLinear])
@pytest.mark.parametrize("bits", [4, 8])
def test_nothing_and_what_is_no_number(bits: int, pack: type[TorchGroupedLinear]) -> None:
    zeros = pack(round_weight(torch.zeros(8, 40), bits))
    assert torch.equal(zeros(torch.zeros(2, 40)), torch.zeros(2, 8))
    assert zeros(torch.zeros(0, 40)).shape == (0, 8)
    packed = pack(round_weight(torch.full((8, 512), -3.0), bits))
    found = packed(torch.full((3, 512), 7.0))
    torch.testing.assert_close(found, torch.full((3, 8), -3.0 * 7 * 512), rtol=1e-3, atol=0)
    for wrong in (torch.nan, torch.inf):
        x = torch.ones(2, 512)
        x[1, 77] = wrong
        found = packed(x)
        assert found[0].isfinite().all() and not found[1].isfinite().any()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.1)])
def test_rounding(bits: int, most: float) -> None:
    weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(0))
    found = round_weight(weight, bits).floats()
    assert ((found - weight).norm() / weight.norm()) < most


def test_the_search_for_scales_is_worth_it() -> None:
    weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(0))
    groups = weight.view(64, 10, 32)
    least = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - least) / 15
    plain = (((groups - least) / step).round() * step + least - groups).norm()
    assert (round_weight(weight, 4).floats() - weight).norm() < 0.94 * plain


def test_rounding_again_changes_nothing() -> None:
    for bits in (4, 8):
        # Of some draws in thousands a group's search ends elsewhere the second time.
        weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(0))
        once = round_weight(weight, bits).floats()
        torch.testing.assert_close(round_weight(once, bits).floats(), once, rtol=1e-3, atol=1e-4)


def test_rounded_inputs_are_near() -> None:
    x = torch.randn(5, 70) * torch.logspace(-3, 3, 5)[:, None]
    step = (x.abs().amax(-1, keepdim=True)) / 127
    assert ((round_inputs(x, 32) - x).abs() <= step / 2 * 1.001).all()


def test_joined() -> None:
    first, second = draw(64, 96, 4, 32, "leasts"), draw(33, 96, 4, 32, "leasts")
    both = GroupedWeight.joined([first, second])
    assert torch.equal(both.floats(), torch.cat([first.floats(), second.floats()]))
    x = torch.randn(3, 96)
    found = pack_grouped(both)(x)
    assert torch.equal(found[:, :64], pack_grouped(first)(x))
    torch.testing.assert_close(
        found, linear(round_inputs(x, 32), both.floats()), rtol=1e-4, atol=1e-4 * 300
    )


def test_what_is_taken() -> None:
    assert can_group(torch.bfloat16) and not can_group(torch.float64)


@needs_kernels
def test_what_was_not_packed_is_refused() -> None:
    operator, x = torch.ops.aioengine_cpu.linear, torch.zeros(2, 64)
    packed, factors, _ = NativeLinear.of_groups(
        *(
            torch.zeros(8, 64, dtype=torch.int8),
            torch.zeros(8, 2).half(),
            None,
            torch.ones(8),
            None,
        ),
        bits=4,
        group=32,
        has_full_inputs=False,
    ).operands
    assert operator(x, packed, factors, None, 8).shape == (2, 8)
    for wrong in (packed[:-1], packed[:10], torch.zeros_like(packed)):
        with pytest.raises(RuntimeError, match="not packed"):
            operator(x, wrong, None, None, 8)
    with pytest.raises(RuntimeError, match="fit"):
        operator(x[:, :32].contiguous(), packed, None, None, 8)
    with pytest.raises(RuntimeError, match="groups"):
        torch.ops.aioengine_cpu.pack_groups(
            torch.zeros(8, 64, dtype=torch.int8), torch.zeros(8, 2).half(), None, 5, 32, False
        )
    with pytest.raises(RuntimeError, match="row"):
        torch.ops.aioengine_cpu.read_outputs(packed, factors, 8, torch.tensor([8]))


def draw_e4m3(outputs: int, inputs: int, group: int) -> GroupedWeight:
    """Draw a weight that has every finite code, in turn, and scales far apart."""
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    codes = finite[torch.arange(outputs * inputs) * 7 % len(finite)].view(outputs, inputs)
    generator = torch.Generator().manual_seed(outputs * inputs)
    scales = torch.rand(outputs, -(-inputs // group), generator=generator) + 0.01
    scales *= torch.logspace(-6, 2, outputs)[:, None]
    return e4m3_weight(codes.view(torch.float8_e4m3fn), scales, group)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_e4m3_is_multiplied_as_it_is(
    instructions: str, outputs: int, inputs: int, group: int, dtype: torch.dtype
) -> None:
    if dtype is torch.float16 and instructions == "generic":
        pytest.skip("float16 wants F16C")
    weight = draw_e4m3(outputs, inputs, group)
    packed, twin = pack_grouped(weight), TorchGroupedLinear(weight)
    assert isinstance(packed, NativeLinear)
    assert torch.equal(packed.rows(torch.arange(outputs)), weight.floats())
    x = torch.randn(37, inputs).to(dtype)
    if dtype is torch.float16:
        x = x / 1024  # sums are as large as 448 times the inputs
    found, wanted = packed(x).float(), twin(x).float()
    step = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    assert bool(((found - wanted).abs() <= step * wanted.abs().amax(0) + 1e-7).all())
    alone = torch.cat([packed(row[None]) for row in x])
    assert torch.equal(alone.float(), found)


@needs_kernels
def test_e4m3_takes_a_byte_a_weight() -> None:
    packed = pack_grouped(draw_e4m3(256, 1024, 128))
    assert packed.nbytes <= 256 * 1024 * (1 + 4 / 128) + 2048


@needs_kernels
def test_e4m3_has_full_inputs_only() -> None:
    weight = replace(draw_e4m3(64, 128, 32), has_full_inputs=False)
    with pytest.raises(RuntimeError, match="floats have full inputs"):
        pack_grouped(weight)


def test_e4m3_keeps_scales_of_whole_outputs() -> None:
    numbers = torch.randn(8, 256).to(torch.float8_e4m3fn)
    scales = (torch.rand(8, 1) + 0.1).expand(8, 2)
    weight = e4m3_weight(numbers, scales, 128)
    wanted = numbers.float() * scales[:, :1]
    torch.testing.assert_close(weight.floats(), wanted, rtol=1e-6, atol=0)


def test_e4m3_joins_only_its_kind() -> None:
    weight = draw_e4m3(64, 128, 32)
    other = replace(round_weight(torch.randn(64, 128), 8), has_full_inputs=True)
    assert weight.form != other.form
    both = GroupedWeight.joined([weight, weight])
    assert torch.equal(both.floats(), torch.cat([weight.floats()] * 2))
    ids = torch.tensor([3, 1])
    assert torch.equal(weight.taken(ids).floats(), weight.floats()[ids])


LEVELS = {
    "IQ4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "FP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "ends": (-128, 127, *range(14)),
}


def draw_levels(outputs: int, inputs: int, levels: tuple[int, ...]) -> GroupedWeight:
    codes = torch.randint(len(levels), (outputs, inputs))
    scales = torch.randn(outputs, -(-inputs // 32))
    numbers = torch.tensor(levels, dtype=torch.int8)[codes]
    return GroupedWeight.of(numbers, scales, None, bits=4, group=32, levels=levels)


@needs_kernels
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (70, 40), (33, 128)])
@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_bytes_in_half_the_memory(
    name: str, outputs: int, inputs: int, is_full: bool, instructions: str
) -> None:
    weight = replace(draw_levels(outputs, inputs, LEVELS[name]), has_full_inputs=is_full)
    in_bytes = replace(weight, bits=8, levels=None)
    assert torch.equal(weight.floats(), in_bytes.floats())
    packed, wide = pack_grouped(weight), pack_grouped(in_bytes)
    assert packed.nbytes < 0.6 * wide.nbytes
    for count in (1, 2, 7, 100):
        x = torch.randn(count, inputs)
        assert torch.equal(packed(x), wide(x))
    rows = torch.tensor([outputs - 1, 0])
    assert isinstance(packed, NativeLinear)
    assert torch.equal(packed.rows(rows), weight.taken(rows).floats())


def test_levels_join_only_their_kind() -> None:
    one, other = (draw_levels(8, 32, LEVELS[name]) for name in ("IQ4", "FP4"))
    assert one.form != other.form
    both = GroupedWeight.joined([one, one])
    assert torch.equal(both.floats(), torch.cat([one.floats(), one.floats()]))


@needs_kernels
def test_numbers_that_are_no_levels_are_refused() -> None:
    weight = draw_levels(8, 32, LEVELS["FP4"])
    weight.numbers[3, 5] = 5
    with pytest.raises(RuntimeError, match="numbers must be levels"):
        pack_grouped(weight)
    for wrong in ({"levels": (0,) * 15}, {"bits": 8}):
        with pytest.raises(RuntimeError, match="levels are 16"):
            pack_grouped(replace(draw_levels(8, 32, LEVELS["FP4"]), **wrong))
