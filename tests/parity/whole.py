"""Models that are defined here, run without pages: one whole sequence, once for every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aioengine import AsyncEngine, SamplingParams
from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.layer_slot import attach_slot
from aioengine.models.runtime.attention import Attention
from tests.parity.families import MAX_TOKENS, Case

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


class WholeSlot:
    """Plain causal attention over the tokens of one call."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        assert args == AttentionArgs(args.scale)
        out = scaled_dot_product_attention(
            *(each.transpose(0, 1) for each in (query, key, value)),
            is_causal=True,
            scale=args.scale,
            enable_gqa=True,
        )
        return out.transpose(0, 1)


def unpaged(definition: Any) -> Any:
    """The same module, whose attention layers need no pages."""
    for module in definition.modules():
        if isinstance(module, Attention):
            attach_slot(module, WholeSlot())
    return definition


@torch.inference_mode()
def greedy(
    definition: Any, token_ids: Sequence[int], rows: Sequence[Tensor], row_id: int
) -> tuple[int, ...]:
    """The next tokens, where `rows` stand at the ids `row_id`."""
    found = list(token_ids)
    for _ in range(MAX_TOKENS):
        ids = torch.tensor(found)
        embeds = definition.get_input_embeddings()(ids)
        if rows:
            embeds[ids == row_id] = torch.cat(list(rows))
        hidden = definition(None, torch.arange(len(ids)), inputs_embeds=embeds)
        found.append(int(definition.compute_logits(hidden[-1:]).argmax()))
    return tuple(found[len(token_ids) :])


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    """Small blocks, so that few tokens make many."""
    sizes = {"device": "cpu", "dtype": "float64", "block_size": 4, "kv_cache_bytes": 8 << 20}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **options})


async def check_all(engine: AsyncEngine, cases: Sequence[Case]) -> None:
    """All at once."""
    outputs = await asyncio.gather(
        *(engine.generate(case.text, PARAMS, images=case.images) for case in cases)
    )
    for case, output in zip(cases, outputs, strict=True):
        case.check(output.token_ids)


async def check_alone_and_together(
    folder: Path, cases: Sequence[Case], budget: int, **options: Any
) -> None:
    """The cases' tokens, with caches cold and warm."""
    async with engine_for(folder, max_num_batched_tokens=budget, **options) as engine:
        for case in cases[:2]:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            case.check(output.token_ids)
        await engine.reset_caches()
        await check_all(engine, cases)
        await check_all(engine, cases)
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


async def check_without_prefixes(
    folder: Path, cases: Sequence[Case], num_encoded: int, **options: Any
) -> None:
    """The cases' tokens twice, and how many items the encoder was given."""
    settings = {"max_num_batched_tokens": 31, "enable_prefix_caching": False, **options}
    async with engine_for(folder, **settings) as engine:
        await check_all(engine, cases)
        await check_all(engine, cases)
        assert engine.statistics().encoder_items_run == num_encoded


def exact_norms(model: Any) -> Any:
    """A transformers model whose RMS norms stay in float64, where they would turn to float32."""

    def forward_of(norm: Any) -> Callable[[Tensor], Tensor]:
        return lambda hidden: torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon
        )

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward_of(module)
    return model
