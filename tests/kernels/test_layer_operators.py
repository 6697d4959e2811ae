"""A plan's layers: to the bits of the operators that they are made of, alone or all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata
from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.cpu.layer_operators import NativeOperators
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.cpu.norm import compute_norm
from aioengine.kernels.cpu.rotary import rotate
from aioengine.kernels.layer_plan import (
    CrossPlan,
    DecoderPlan,
    FeedForwardPlan,
    LayerPlan,
    NormPlan,
    Operators,
    run_plan,
)
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder
from aioengine.kernels.matmul import Activation
from aioengine.kernels.metadata import build_cross_metadata, build_metadata
from aioengine.kernels.torch_operators import TorchOperators

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels here")

HIDDEN, INNER, HEAD = 64, 96, 32
HEADS, KV_HEADS = 4, 2
EPSILON = 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, instruction_set: str) -> torch.dtype:
    if request.param is torch.float16 and instruction_set == "generic":
        pytest.skip("float16 needs F16C")
    found: torch.dtype = request.param
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + 1000 * seed))


def matmul(outputs: int, inputs: int, dtype: torch.dtype, *, has_bias: bool) -> NativeLinear:
    bias = random(outputs) if has_bias else None
    return NativeLinear((random(outputs, inputs) / 8).to(dtype), bias)


def norm_of(dim: int, dtype: torch.dtype, seed: int, *, has_bias: bool = False) -> NormPlan:
    bias = random(dim, seed=seed + 20).to(dtype) if has_bias else None
    return NormPlan((1 + random(dim, seed=seed) / 8).to(dtype), EPSILON * (1 + seed), bias)


def layer_plan(
    dtype: torch.dtype,
    *,
    hidden: int = HIDDEN,
    has_bias: bool = False,
    is_gated: bool = True,
    **others: Any,
) -> LayerPlan:
    """A layer of the usual kind; `others`: what is different."""
    feed_forward = FeedForwardPlan(
        up=matmul(INNER * (1 + is_gated), hidden, dtype, has_bias=has_bias),
        activation=Activation.SILU,
        is_gated=is_gated,
        down=matmul(hidden, INNER, dtype, has_bias=has_bias),
    )
    usual: dict[str, Any] = {
        "norm": norm_of(hidden, dtype, 0),
        "qkv": matmul((HEADS + 2 * KV_HEADS) * HEAD, hidden, dtype, has_bias=has_bias),
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD,
        "attention": AttentionArgs(0.1),
        "out": matmul(hidden, HEADS * HEAD, dtype, has_bias=has_bias),
        "feed_norm": norm_of(hidden, dtype, 1),
        "feed_forward": feed_forward,
    }
    return LayerPlan(**{**usual, **others})


def normed(x: Tensor, norm: NormPlan | None) -> Tensor:
    if norm is None:
        return x
    return compute_norm(x, norm)


def angles(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    turns = random(tokens, HEAD // 2, seed=seed).repeat(1, 2)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def variants(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Options of `layer_plan`."""
    wide = [norm_of(HIDDEN, torch.float32, seed) for seed in range(4)]
    of_heads = [norm_of(HEAD, kind, 4) for kind in (dtype, torch.float32)]
    return {
        "usual": {},
        "biases, no gates": {"has_bias": True, "is_gated": False},
        "norms of heads": {"query_norm": of_heads[0], "key_norm": norm_of(HEAD, dtype, 4)},
        "norms behind": {
            "norm": None,
            "out_norm": norm_of(HIDDEN, dtype, 2),
            "feed_norm": None,
            "feed_out_norm": norm_of(HIDDEN, dtype, 3),
        },
        "norms of float32": {
            "norm": wide[0],
            "query_norm": of_heads[1],
            "key_norm": of_heads[1],
            "out_norm": wide[1],
            "feed_norm": wide[2],
            "feed_out_norm": wide[3],
        },
        "no angles": {"angles": None},
        "layer norms": {
            "norm": norm_of(HIDDEN, dtype, 0, has_bias=True),
            "feed_norm": norm_of(HIDDEN, dtype, 1, has_bias=True),
            "angles": None,
            "has_bias": True,
            "is_gated": False,
        },
    }


VARIANTS = [*variants(torch.float32)]


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_before_attention(dtype: torch.dtype, rows: int, variant: str) -> None:
    layer = layer_plan(dtype, **variants(dtype)[variant])
    x = random(rows, HIDDEN).to(dtype)
    cos, sin = angles(rows, dtype)
    operators = NativeOperators([layer])
    found = operators.project(0, x, operators.prepare([(cos, sin)]))
    whole = layer.qkv(normed(x, layer.norm)).view(rows, -1, HEAD)
    query, key, value = torch.split(whole, (HEADS, KV_HEADS, KV_HEADS), 1)
    query, key = normed(query, layer.query_norm), normed(key, layer.key_norm)
    if layer.angles is not None:
        query, key = rotate(query, key, cos, sin)
    for one, other in zip(found, (query, key, value), strict=True):
        assert one.shape == other.shape and torch.equal(one, other)


def test_angles_that_are_wider(dtype: torch.dtype, instruction_set: str) -> None:
    """Encoders rotate in float32, whatever their dtype."""
    query, key = (random(5, heads, HEAD).to(dtype) for heads in (HEADS, KV_HEADS))
    cos, sin = angles(5, torch.float32)
    for x, found in zip((query, key), rotate(query, key, cos, sin), strict=True):
        low, high = x.float().chunk(2, -1)
        wanted = x.float() * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
        assert found.dtype is dtype
        torch.testing.assert_close(found, wanted.to(dtype))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("hidden", [HIDDEN, 72])
@pytest.mark.parametrize("variant", VARIANTS)
def test_after_attention(
    dtype: torch.dtype, instruction_set: str, rows: int, hidden: int, variant: str
) -> None:
    if hidden % 32 and dtype is torch.bfloat16 and "bf16" in instruction_set:
        pytest.skip("such weights are oneDNN's")
    options = variants(dtype)[variant] if hidden == HIDDEN else {}
    layer = layer_plan(dtype, hidden=hidden, **options)
    feed = layer.feed_forward
    assert isinstance(feed, FeedForwardPlan)
    x, attended = random(rows, hidden).to(dtype), random(rows, HEADS * HEAD).to(dtype)
    before = x.clone()
    operators = NativeOperators([layer])
    found = operators.add_attended(0, x, attended)
    assert torch.equal(found, normed(layer.out(attended), layer.out_norm) + x)
    inner = feed.up(normed(found, layer.feed_norm), feed.activation, feed.is_gated)
    wanted = normed(feed.down(inner), layer.feed_out_norm) + found
    assert torch.equal(operators.add_feed(0, found), wanted)
    assert torch.equal(x, before)


class Decoder:
    """Three layers of two KV groups and two kinds of angles, over pages of their own."""

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        self.dtype, self.holder = dtype, StepHolder()
        layers = []
        for index in range(3):
            args = AttentionArgs(0.1 * (1 + index), 2 if index == 1 else None)
            if index == 2:
                args = args._replace(softcap=3.0, sinks=random(HEADS))
            slot = LayerSlot(index, index % 2, self.holder, is_last=index == 2)
            own = {"attention": args, "slot": slot, "angles": index % 2, **options}
            layers.append(layer_plan(dtype, **own))
        self.plan = DecoderPlan(tuple(layers), norm_of(HIDDEN, dtype, 5), self.make_angles)
        self.native = NativeOperators(self.plan.layers, self.plan.norm)
        self.caches = torch.zeros(3, 2, 5, 4, KV_HEADS, HEAD, dtype=dtype)

    def make_angles(self, x: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [angles(len(x), self.dtype, seed) for seed in range(2)]

    def run(
        self,
        x: Tensor,
        *,
        operators: Operators | None = None,
        backend: CpuBackend | None = None,
        wanted: Tensor | None = None,
        rows: Sequence[Tensor] = (),
    ) -> Tensor:
        """Two sequences, one of which goes on from its pages; one group sees a block both ways."""
        step = StepContext(
            [metadata(None), metadata(torch.tensor([0, 0, -1], dtype=torch.int32))],
            [(keys, values) for keys, values in self.caches],
            backend or CpuBackend(),
            wanted=wanted,
        )
        with self.holder.hold(step):
            return run_plan(self.plan, operators or self.native, x, torch.arange(len(x)), rows)


def metadata(block: Tensor | None) -> AttentionMetadata:
    return build_metadata(
        block_size=4,
        block_tables=[[3], [0, 2]],
        starts=[0, 4],
        ends=[3, 7],
        block_ids=None if block is None else [block, None],
    )


class _OwnBackend(CpuBackend):
    """Wants to be called for each layer."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_layers_at_once(dtype: torch.dtype, variant: str) -> None:
    options = variants(dtype)[variant]
    x = random(6, HIDDEN).to(dtype)
    rows = [random(6, HIDDEN, seed=seed).to(dtype) for seed in range(2)]
    one, other = Decoder(dtype, **options), Decoder(dtype, **options)
    for given in ((), rows):
        found = one.run(x, rows=given)
        assert found.isfinite().all()
        assert torch.equal(found, other.run(x, rows=given, backend=_OwnBackend()))
        assert torch.equal(one.caches, other.caches) and one.caches.any()
    for wanted in ([5, 2], [], [*range(6)]):
        places = torch.tensor(wanted, dtype=torch.int64)
        part = one.run(x, rows=rows, wanted=places)
        assert torch.equal(part[places], found[places])
        assert not part[[i for i in range(6) if i not in wanted]].any()


def test_a_layer_that_reads_the_pages_of_another_writes_none() -> None:
    slot = LayerSlot(1, 1, StepHolder(), stores=False)
    decoder = Decoder(torch.float32)
    first, second, third = decoder.plan.layers
    slot = replace(slot, holder=decoder.holder)
    decoder.plan = replace(decoder.plan, layers=(first, replace(second, slot=slot), third))
    native = NativeOperators(decoder.plan.layers, decoder.plan.norm)
    x = random(6, HIDDEN)
    found = decoder.run(x, operators=native)
    assert not decoder.caches[1].any() and decoder.caches[0].any()
    assert torch.equal(found, decoder.run(x, operators=native, backend=_OwnBackend()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_operators_in_pytorch(instruction_set: str, variant: str) -> None:
    """They come to the same numbers, in float32 to a few roundings."""
    decoder = Decoder(torch.float32, **variants(torch.float32)[variant])
    x = random(6, HIDDEN)
    before = x.clone()
    plain = TorchOperators(decoder.plan.layers, decoder.plan.norm)
    for wanted in (None, torch.tensor([5, 2])):
        found = decoder.run(x, operators=plain, wanted=wanted)
        torch.testing.assert_close(found, decoder.run(x, wanted=wanted), atol=2e-5, rtol=2e-5)
    assert torch.equal(x, before)


class CrossDecoder(Decoder):
    """Two layers that also read an encoder's rows, and no angles but learned places."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.holder = dtype, StepHolder()
        layers = []
        for index in range(2):
            slots = [
                LayerSlot(2 * index + i, i, self.holder, is_last=2 * index + i == 3)
                for i in range(2)
            ]
            cross = CrossPlan(
                norm=norm_of(HIDDEN, dtype, 7, has_bias=True),
                query=matmul(HEADS * HEAD, HIDDEN, dtype, has_bias=True),
                key_value=matmul(2 * KV_HEADS * HEAD, HIDDEN, dtype, has_bias=True),
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD,
                attention=AttentionArgs(0.2),
                slot=slots[1],
                out=matmul(HIDDEN, HEADS * HEAD, dtype, has_bias=True),
            )
            own = {**variants(dtype)["layer norms"], "slot": slots[0], "cross": cross}
            layers.append(layer_plan(dtype, **own))
        norm = norm_of(HIDDEN, dtype, 5, has_bias=True)
        places = random(9, HIDDEN, seed=9).to(dtype)
        self.plan = DecoderPlan(tuple(layers), norm, lambda *_: [], places)
        self.native = NativeOperators(self.plan.layers, self.plan.norm)
        self.caches = torch.zeros(4, 2, 5, 4, KV_HEADS, HEAD, dtype=dtype)

    def step(self, memory: Tensor | None, backend: CpuBackend | None = None) -> StepContext:
        """Two sequences; where there is `memory` [7, hidden], that of both is written."""
        cross = build_cross_metadata(
            block_size=4,
            block_tables=[[1], [4]],
            query_lens=[3, 3],
            context_lens=[4, 3],
            is_new=[memory is not None] * 2,
        )
        caches = [(keys, values) for keys, values in self.caches]
        rows = torch.zeros(1, HIDDEN, dtype=self.dtype) if memory is None else memory
        return StepContext([metadata(None), cross], caches, backend or CpuBackend(), memory=rows)

    def run_step(self, x: Tensor, step: StepContext, operators: Operators | None = None) -> Tensor:
        with self.holder.hold(step):
            return run_plan(self.plan, operators or self.native, x, torch.arange(len(x)))


def test_layers_that_read_an_encoders_rows(dtype: torch.dtype) -> None:
    decoder = CrossDecoder(dtype)
    x, memory = random(6, HIDDEN).to(dtype), random(7, HIDDEN, seed=8).to(dtype)
    first = decoder.run_step(x, decoder.step(memory))
    assert decoder.caches[1].any() and decoder.caches[3].any()
    kept = decoder.caches.clone()
    other = CrossDecoder(dtype)
    assert torch.equal(other.run_step(x, other.step(memory, _OwnBackend())), first)
    assert torch.equal(other.caches, kept)
    whole = decoder.run_step(x, decoder.step(None))
    assert torch.equal(whole, first)
    assert torch.equal(decoder.run_step(x, decoder.step(None, _OwnBackend())), whole)
    assert torch.equal(decoder.caches, kept)
    part = torch.tensor([5, 2])
    found = decoder.run_step(x, replace(decoder.step(None), wanted=part))
    assert torch.equal(found[part], whole[part])
    if dtype is torch.float32:
        plain = TorchOperators(decoder.plan.layers, decoder.plan.norm)
        found = decoder.run_step(x, decoder.step(memory), plain)
        torch.testing.assert_close(found, whole, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("returns", ["rows", "more"])
def test_a_module_in_the_place_of_a_feed_forward_layer(dtype: torch.dtype, returns: str) -> None:
    """In the middle and at the end; the last one is given the rows that are read alone."""
    counts = []

    def module(x: Tensor) -> Any:
        counts.append(x.shape[1])
        found = x * 2 + 1
        return found if returns == "rows" else (found, None)

    decoder = Decoder(dtype)
    first, second, third = decoder.plan.layers
    layers = first, replace(second, feed_forward=module), replace(third, feed_forward=module)
    decoder.plan = replace(decoder.plan, layers=layers)
    native = NativeOperators(layers, decoder.plan.norm)
    x, places = random(6, HIDDEN).to(dtype), torch.tensor([4, 1])
    rows = [random(6, HIDDEN, seed=seed).to(dtype) for seed in range(3)]
    whole = decoder.run(x, operators=native, rows=rows)
    part = decoder.run(x, operators=native, rows=rows, wanted=places)
    assert counts == [6, 6, 6, 2]
    assert torch.equal(part[places], whole[places])
    by_layer = decoder.run(x, operators=native, rows=rows, backend=_OwnBackend())
    assert torch.equal(by_layer, whole)


def test_what_does_not_fit_is_refused() -> None:
    layer = layer_plan(torch.float32)
    operators = NativeOperators([layer])
    x, wide = random(3, HIDDEN), random(3, HEADS * HEAD)
    assert operators.add_attended(0, x, wide).shape == x.shape
    for other in (random(4, HIDDEN), x.double(), x.T.contiguous().T):
        with pytest.raises(RuntimeError, match=r"residual|dimension|are for float32"):
            operators.add_attended(0, other, wide)
    with pytest.raises(RuntimeError, match="fit each other"):
        operators.add_attended(0, x, random(3, HEADS * HEAD + 1))
    with pytest.raises(RuntimeError, match="no such layer"):
        operators.add_attended(1, x, wide)
    with pytest.raises(RuntimeError, match="no such angles"):
        operators.project(0, x, [])


def test_a_plan_lies_where_it_was_made() -> None:
    """A copy of its bytes, or anything else, is refused."""
    ops: Any = torch.ops.aioengine_cpu
    layer = layer_plan(torch.float32)
    operators = NativeOperators([layer])
    plan = operators._plan
    x = random(3, HIDDEN)
    assert ops.add_feed(plan, 0, x).shape == x.shape
    for other in (plan.clone(), plan[:-1], x):
        with pytest.raises(RuntimeError, match="pack_plan"):
            ops.add_feed(other, 0, x)
    with pytest.raises(RuntimeError, match="same number of layers"):
        ops.pack_plan([x], [1], [1.0], None, None, 0.0)


@pytest.mark.parametrize("by_pages", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{"num_heads": 0}, {"num_heads": -8}, {"num_kv_heads": 0}, {"head_dim": 0}, {"head_dim": -32}],
    ids=str,
)
def test_an_encoder_layer_of_impossible_heads_is_refused(
    sizes: dict[str, int], by_pages: bool
) -> None:
    layer = layer_plan(torch.float32, angles=None, **sizes)
    operators = NativeOperators([layer], by_pages=by_pages)
    with pytest.raises(RuntimeError, match="heads"):
        operators.encode(torch.randn(12, HIDDEN), (), [12])
