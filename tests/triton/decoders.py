"""A small decoder as a plan, over pages of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata
from aioengine.kernels.layer_plan import DecoderPlan, FeedForwardPlan, LayerPlan, NormPlan, run_plan
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder
from aioengine.kernels.matmul import Activation, TorchLinear
from aioengine.kernels.metadata import build_metadata
from aioengine.kernels.torch_operators import TorchOperators
from aioengine.kernels.triton.backend import TritonBackend

HIDDEN, INNER, HEADS, KV_HEADS = 48, 80, 6, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + 1000 * seed))


class Decoder:
    """Two layers over pages of their own."""

    def __init__(
        self, dtype: torch.dtype, *, head_dim: int = 16, has_bias: bool = False, **options: Any
    ) -> None:
        self.dtype, self.head_dim, self.holder = dtype, head_dim, StepHolder()
        layers = []
        for index in range(2):
            slot = LayerSlot(index, 0, self.holder, is_last=index == 1)
            feed = FeedForwardPlan(
                self.matmul(2 * INNER, HIDDEN, has_bias),
                options.get("activation", Activation.SILU),
                True,
                self.matmul(HIDDEN, INNER, has_bias),
            )
            plan = LayerPlan(
                norm=self.norm(HIDDEN, has_bias=has_bias),
                qkv=self.matmul((HEADS + 2 * KV_HEADS) * head_dim, HIDDEN, has_bias),
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=head_dim,
                attention=AttentionArgs(0.2, options.get("window")),
                slot=slot,
                out=self.matmul(HIDDEN, HEADS * head_dim, has_bias),
                feed_norm=self.norm(HIDDEN, has_bias=has_bias),
                feed_forward=feed,
            )
            layers.append(replace(plan, **options.get("more", {})))
        if options.get("has_head_norms"):
            norms = {"query_norm": self.norm(head_dim), "key_norm": self.norm(head_dim, seed=7)}
            layers = [replace(layer, **norms) for layer in layers]
        if options.get("has_out_norms"):
            norms = {"out_norm": self.norm(HIDDEN, 8), "feed_out_norm": self.norm(HIDDEN, 9)}
            layers = [replace(layer, **norms) for layer in layers]
        self.plan = DecoderPlan(tuple(layers), self.norm(HIDDEN, seed=3), self.angles)

    def matmul(self, outputs: int, inputs: int, has_bias: bool) -> TorchLinear:
        bias = random(outputs).to(self.dtype) if has_bias else None
        return TorchLinear((random(outputs, inputs) / 8).to(self.dtype), bias)

    def norm(self, dim: int, seed: int = 0, *, has_bias: bool = False) -> NormPlan:
        bias = random(dim, seed=seed + 20).to(self.dtype) if has_bias else None
        return NormPlan((1 + random(dim, seed=seed) / 8).to(self.dtype), 1e-5, bias)

    def angles(self, x: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        turns = positions[:, None] * torch.linspace(1, 0.1, self.head_dim // 2).repeat(2)
        return [(turns.cos().to(self.dtype), turns.sin().to(self.dtype))]

    def run(
        self,
        kind: type[TorchOperators],
        wanted: Tensor | None,
        meta: AttentionMetadata | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of a chunk, a token and a prompt, and the pages after them."""
        caches = random(2, 2, 9, 4, KV_HEADS, self.head_dim, seed=5).to(self.dtype)
        meta = meta or build_metadata(
            block_size=4, block_tables=[[3, 7], [0, 2], [1, 8]], starts=[6, 4, 0], ends=[7, 8, 5]
        )
        step = StepContext(
            [meta], [(each[0], each[1]) for each in caches], TritonBackend(), wanted=wanted
        )
        x, positions = random(10, HIDDEN).to(self.dtype), torch.tensor([6, *range(4, 8), *range(5)])
        with self.holder.hold(step):
            return run_plan(self.plan, kind(self.plan.layers, self.plan.norm), x, positions), caches
