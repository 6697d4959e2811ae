"""Encoders whose attention our kernels compute, where they are the faster ones.

The attention modules that transformers sends to PyTorch's scaled-dot-product attention, and that
are not causal, or that a family marks (`is_of_encoder`), are made to ask for a function of ours.
Masks are still made as for that. On a CPU, whatever it does not know, a mask above all, it hands on
to transformers' own; on a GPU it takes masks and biases, so that no kernel is chosen anew for each
image's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.cpu.encoder_attention import attend_to_all, is_faster
from aioengine.kernels.dense import dense_attention
from aioengine.kernels.layer_slot import slot_of
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
_ELSEWHERE = frozenset({"cache", "softcap"})
"""Arguments that transformers' own function deals with or refuses."""


def route_encoders(model: nn.Module) -> int:
    """Make encoders' attention modules ask for ours, by copies of their configs; how many did."""
    found = [
        module
        for module in model.modules()
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"
        and (getattr(module, "is_causal", None) is False or hasattr(module, "is_of_encoder"))
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
    slot = slot_of(module)
    if slot is not None:  # in a trial, of one sequence
        args = AttentionArgs(query.shape[-1] ** -0.5 if scaling is None else scaling)
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        return slot.attend(query, key, value, args)[None], None
    if kwargs.get("is_causal") is None:
        kwargs["is_causal"] = getattr(module, "is_causal", False)
    is_plain = attention_mask is None and all(
        name in _HARMLESS or value is None or value is False for name, value in kwargs.items()
    )
    if is_plain and not kwargs["is_causal"] and is_faster(query, key, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_to_all(query, key, value, scale), None
    if query.device.type == "cuda" and not _ELSEWHERE & kwargs.keys():
        return _attend_on_gpu(query, key, value, attention_mask, scaling, **kwargs), None
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return found


def _attend_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    *,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute what transformers' own does; `query` may have one batch for all of the keys'."""
    is_causal = bool(is_causal) and mask is None and query.shape[2] > 1
    if position_bias is not None:
        assert not is_causal, "an encoder's biases know no order"
        least = torch.finfo(position_bias.dtype).min
        if mask is None:
            mask = position_bias
        elif mask.dtype == torch.bool:
            mask = position_bias.masked_fill(~mask, least)
        else:
            mask = position_bias + mask
    query = query.expand(len(key), -1, -1, -1)
    out = dense_attention(query, key, value, mask, scale=scale, is_causal=is_causal)
    return out.transpose(1, 2).contiguous()


AttentionInterface.register(FULL_ATTENTION_NAME, _attend_fully)
