"""Operators that PyTorch has for CUDA alone, computed on the CPU by the rules that they have there.

A rule that is broken raises, where the real one would raise, read elsewhere or make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.simulated import device
from tests.simulated.device import DEVICE, SimulatedTensor

__all__ = ["CHOSEN", "BrokenRuleError"]

aten = torch.ops.aten
CHOSEN = "scaled_dot_product_attention, which may build a plan for each new shape"
ALIGNMENT_BYTES = 16


class BrokenRuleError(RuntimeError):
    """An operator was called as it must not be on CUDA."""


def rule(holds: bool, text: str) -> None:
    """Raise BrokenRuleError unless it holds."""
    if not holds:
        raise BrokenRuleError(text)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows are whole, and begin where 16 bytes begin."""
    size = tensor.element_size()
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % ALIGNMENT_BYTES == 0
        and all(stride * size % ALIGNMENT_BYTES == 0 for count, stride in strides if count > 1)
    )


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`aten._scaled_dot_product_efficient_attention`, in float32."""
    given = (query, key, value)
    rule(all(each.dim() == 4 for each in given), "four dimensions")
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    rule(
        {each.dtype for each in given} <= {query.dtype} <= set(kinds), "one dtype, of 32 or 16 bits"
    )
    rule(len({each.shape[:2] for each in given}) == 1, "as many heads of keys as of queries")
    rule(key.shape[2] == value.shape[2] and query.shape[3] == key.shape[3], "shapes that fit")
    rule(all(map(is_aligned, given)), "aligned rows")
    steps = (each.stride(2) * each.element_size() for each in given)
    rule(all(step % ALIGNMENT_BYTES == 0 for step in steps), "aligned rows, a single one too")
    sizes = (each.shape[3] * each.element_size() for each in given)
    rule(all(size % ALIGNMENT_BYTES == 0 for size in sizes), "heads of whole 16 bytes")
    is_shared = key.shape[1] > 1 and key.stride(1) == value.stride(1) == 0
    is_alone = query.shape[2] > 1 and query.shape[2] % 32 == 1
    rule(not (is_shared and is_alone), "several queries in the last block over shared keys")
    factor = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    scores = query.float() @ key.float().mT * factor
    if attn_bias is not None:
        rule(attn_bias.dtype == query.dtype, "a bias of the query's dtype")
        rule(attn_bias.shape == scores.shape, "a bias of the scores' shape")
        rule(is_aligned(attn_bias), "a bias with aligned rows")
        scores = scores + attn_bias.float()
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    rule(not bool((scores == -math.inf).all(-1).any()), "a key that each query sees")
    out = (scores.softmax(-1) @ value.float()).to(query.dtype)
    nothing = torch.empty(0)
    # As CUDA lays it out: a token's heads side by side.
    return out.transpose(1, 2).contiguous().transpose(1, 2), nothing, nothing, nothing


def look(func: Any, args: Any) -> None:
    """Note what is called on the device that a CPU computes without more."""
    if not any(isinstance(each, SimulatedTensor) for each in tree_leaves(args)):
        return
    if func is aten.scaled_dot_product_attention.default:
        DEVICE.note(CHOSEN)
    if func is aten._grouped_mm.default:
        rows, weights = (each.elem for each in args[:2])
        if rows.dtype != torch.bfloat16 or weights.dtype != torch.bfloat16:
            DEVICE.wait("_grouped_mm of other dtypes than bfloat16 reads its groups' ends back")
        rule(is_aligned(rows), "aligned rows")
        rule(is_aligned(weights) or is_aligned(weights.mT), "aligned weights")
        rule(args[2].dtype == torch.int32, "ends of groups in int32")


_run = device.run


def _run_by_rules(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == "meta":
        return func(*args, **kwargs)
    look(func, args)
    if func is aten.histc.default and not args[0].is_floating_point():
        # A CPU counts numbers with a point only.
        counts = _run(func, (args[0].float(), *args[1:]), kwargs)
        return counts.to(args[0].dtype)
    return _run(func, args, kwargs)


device.run = _run_by_rules
_library = torch.library.Library("aten", "IMPL")
_library.impl(
    "_scaled_dot_product_efficient_attention",
    lambda *args, **options: efficient_attention(*args, **options),
    "CPU",
)
