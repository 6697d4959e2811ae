"""Attention over dense rows, by an operator that is named and not chosen by PyTorch.

PyTorch's `scaled_dot_product_attention` picks its kernel at every call. On a GPU it may pick cuDNN,
which builds an execution plan for each new shape: a tenth of a second and more, and in paged
attention nearly every step has a new one. To forbid that would change the whole process, so the
kernel is called by its name there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["KEY_MULTIPLE", "attention_over", "dense_attention", "padded_length"]

KEY_MULTIPLE = 64
"""Of the keys in masked calls on a GPU: few shapes over a growing context, and aligned masks."""
_QUERY_BLOCK = 32
"""Queries that the memory-efficient kernel takes at a time, or a divisor of them."""
_ALIGNMENT_BYTES = 16
"""Of rows and of their addresses, for the memory-efficient kernel."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# PyTorch binds its operators by name too, at half the cost of a call through `torch.ops`.
_efficient: Callable[..., Any] = torch._scaled_dot_product_efficient_attention
_math: Callable[..., Any] = torch._scaled_dot_product_attention_math


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of `query` [n, Hq, T, Dk] over `key` [n, Hkv, S, Dk], `value` [n, Hkv, S, Dv].

    `mask` broadcasts to [n, Hq, T, S] and is added to the scores, or is bool, True where a query
    sees a key; every query sees one. `is_causal`: from the first key on, without a mask. `scale`:
    Dk ** -0.5 by default. Returns [n, Hq, T, Dv] in the query's dtype.
    """
    return attention_over(query, key, value, mask, is_causal=is_causal)(query, scale)


def attention_over(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Callable[[Tensor, float | None], Tensor]:
    """Return `dense_attention` over these keys and values, for queries and scales to come.

    Shapes are as there; the queries have this one's shape and dtype. What keys and values hold is
    read at each call, the mask is not: it serves all layers whose keys and values are put in one
    place.
    """
    group = query.shape[1] // key.shape[1]
    if not query.is_cuda:
        return lambda query, scale: scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
    is_taken = _is_taken(query.dtype, query.shape[-1], value.shape[-1])
    bias = mask
    if mask is not None:
        bias = _as_bias(mask, query, key) if is_taken else _as_numbers(mask, query.dtype)
    is_ready = group == 1 and _is_aligned(key) and _is_aligned(value)

    def attend(query: Tensor, scale: float | None) -> Tensor:
        keys, values = key, value
        if group > 1:
            keys, values = (each.repeat_interleave(group, dim=1) for each in (key, value))
        if not is_taken:
            # What PyTorch would take for these.
            found: Tensor = _math(query, keys, values, bias, 0.0, is_causal, scale=scale)[0]
            return found
        if not is_ready:
            keys, values = _aligned(keys), _aligned(values)
        return _by_kernel(_aligned(query), keys, values, bias, is_causal, scale)

    return attend


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Call the memory-efficient kernel, around a fault of it.

    One query over keys that heads share (stride 0): it takes heads for rows then, and asks whether
    there is one of what is left from a block on. So the last of 33 or 65 would be computed for the
    first heads alone, in the place of other rows.
    """

    def call(query: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
        found: Tensor = _efficient(query, key, value, bias, False, 0.0, is_causal, scale=scale)[0]
        return found

    count = query.shape[2]
    is_shared = key.shape[1] > 1 and key.stride(1) == value.stride(1) == 0
    if not is_shared or count == 1 or count % _QUERY_BLOCK != 1:
        return call(query, bias, is_causal)
    biases = (None, None) if bias is None else (bias[:, :, :-1], bias[:, :, -1:])
    most = call(query[:, :, :-1], biases[0], is_causal)
    if is_causal:
        key, value = key[:, :, :count], value[:, :, :count]
    return torch.cat((most, call(query[:, :, -1:], biases[1], False)), dim=2)


def padded_length(count: int, device: torch.device) -> int:
    """Round a number of keys up to what masked calls on `device` take; elsewhere it stays."""
    return count if device.type != "cuda" else -(-count // KEY_MULTIPLE) * KEY_MULTIPLE


@lru_cache(maxsize=64)
def _is_taken(dtype: torch.dtype, *widths: int) -> bool:
    """Return whether the memory-efficient kernel has rows of these widths and numbers."""
    sizes = [width * dtype.itemsize for width in widths]
    return dtype in _DTYPES and all(sizes) and not any(size % _ALIGNMENT_BYTES for size in sizes)


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether the kernel can read the rows [..., D] where they lie."""
    return _reads(tensor.stride(), tensor.storage_offset(), tensor.element_size())


@lru_cache(maxsize=1024)
def _reads(strides: tuple[int, ...], offset: int, itemsize: int) -> bool:
    multiple = _ALIGNMENT_BYTES // itemsize
    *outer, last = strides
    return last == 1 and not offset % multiple and all(each % multiple == 0 for each in outer)


def _aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy that the kernel can read."""
    if _is_aligned(tensor):
        return tensor
    # Not `contiguous`, which leaves odd strides of dimensions of one.
    return tensor.clone(memory_format=torch.contiguous_format)


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Make of a mask what is added to scores: the operators below PyTorch's own add a bool as 1."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, float("-inf"))


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Make of a mask what the kernel adds: of the scores' shape and dtype, with aligned rows."""
    shape = (*query.shape[:3], key.shape[2])
    if mask.shape == shape and mask.dtype == query.dtype and _is_aligned(mask):
        return mask
    mask = _as_numbers(mask, query.dtype)
    count = key.shape[2]
    if mask.shape[-1] != count:
        mask = mask.expand(*mask.shape[:-1], count)
    if not _is_aligned(mask):
        # The rows' memory is longer than they are; nothing reads what is behind them.
        room = mask.new_empty(*mask.shape[:-1], -(-count // KEY_MULTIPLE) * KEY_MULTIPLE)
        mask = room[..., :count].copy_(mask)
    return mask.expand(shape)
