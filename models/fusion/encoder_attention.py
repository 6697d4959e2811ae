"""Encoders whose attention our kernels compute, where they are the faster ones.

The attention modules that transformers sends to PyTorch's scaled-dot-product attention, and that
are not causal, are made to ask for a function of ours. Whatever it does not know, a mask above all,
it hands on to transformers' own, so masks are still made as for that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from aioengine.kernels.cpu.encoder_attention import attend_to_all, is_faster
from aioengine.models.fusion.swap import route

__all__ = ["FULL_ATTENTION_NAME", "route_encoders"]

# As for `ATTENTION_NAME`: without the parts that transformers reads a meaning into.
FULL_ATTENTION_NAME = "aioengine_full"
_HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that do not change what is computed here; `is_causal` is read."""


def route_encoders(model: nn.Module) -> int:
    """Make encoders' attention modules ask for ours, by copies of their configs; how many did."""
    found = [
        module
        for module in model.modules()
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"
        and getattr(module, "is_causal", None) is False
    ]
    route(found, FULL_ATTENTION_NAME)
    return len(found)


def _attend_fully(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' signature: `query` [n, Hq, T, Dk] and so on -> [n, T, Hq, Dv]."""
    is_plain = attention_mask is None and all(
        name in _HARMLESS or value is None or value is False for name, value in kwargs.items()
    )
    if is_plain and not kwargs.get("is_causal") and is_faster(query, key, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_to_all(query, key, value, scale), None
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return found


AttentionInterface.register(FULL_ATTENTION_NAME, _attend_fully)
