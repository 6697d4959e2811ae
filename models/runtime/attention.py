"""The seam: transformers' attention layers, and our own, run on `aioengine.kernels`.

transformers looks an attention function up by name in its `AttentionInterface` at every call. One
function is registered there, under a name of ours; modules are made to ask for it by giving them a
copy of their config (`route_attention`). No mask function is registered under that name, so
transformers builds no masks for these modules: causality, windows and sequence boundaries are the
backend's business.

What a layer needs (its pages, the step's metadata) hangs on the module itself as a slot, and the
slot points to its own model's `StepHolder`. Nothing is kept in this module, so several models run
side by side in one process, each in its thread. A module without a slot is not ours and gets plain
scaled-dot-product attention.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from aioengine.errors import ModelLoadError
from aioengine.kernels.attention import AttentionBackend, AttentionMetadata

__all__ = [
    "ATTENTION_NAME",
    "Attention",
    "AttentionType",
    "LayerSlot",
    "Slot",
    "StepContext",
    "StepHolder",
    "attach_slot",
    "route_attention",
    "slot_of",
]

# transformers reads meaning into parts of such names ("sdpa", "flash"); this one has none of them.
ATTENTION_NAME = "aioengine_paged"
_SLOT = "_aioengine_slot"


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What the attention layers of one model need during one step.

    `metadata`: one for each KV group. `caches`: (key cache, value cache) of each layer. `backend`:
    the kernels that the engine chose. `positions` [T]: of the step's tokens. `memory` [R, dim]:
    what cross-attention layers are given, None where there are none. `wanted` [n]: rows that are
    read after the last layer, None for all.
    """

    metadata: Sequence[AttentionMetadata]
    caches: Sequence[tuple[Tensor, Tensor]]
    backend: AttentionBackend
    positions: Tensor | None = None
    memory: Tensor | None = None
    wanted: Tensor | None = None


class StepHolder:
    """One model's current step, shared by the slots of its layers."""

    def __init__(self) -> None:
        self.current: StepContext | None = None

    @contextmanager
    def hold(self, context: StepContext) -> Iterator[None]:
        """Make `context` the current step inside the block, however it is left."""
        assert self.current is None, "a step is running already"
        self.current = context
        try:
            yield
        finally:
            self.current = None


class Slot(Protocol):
    """What may be attached to an attention module: it takes the module's calls.

    `query` [T, Hq, Dk], `key` [T, Hkv, Dk], `value` [T, Hkv, Dv] -> [T, Hq, Dv].
    """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerSlot:
    """One attention layer's place: `layer` among the model's layers, its KV `group`.

    `stores`: False for a layer that reads what another has written in the same step.
    `is_last`: no other layer of attention comes after it. `distance_bias`: see
    `AttentionBackend.attend`.
    """

    layer: int
    group: int
    holder: StepHolder
    distance_bias: Tensor | None = None
    stores: bool = True
    is_last: bool = False

    @property
    def wanted(self) -> Tensor | None:
        """The rows that are read of what comes after this layer, None for all."""
        step = self.holder.current
        return step.wanted if self.is_last and step is not None else None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write this step's keys and values into the layer's pages, then attend over them.

        Where the pages are another layer's, that has run before and has written the same.
        Where a layer of cross-attention has nothing new, what it is given stands for nothing.
        """
        step = self.holder.current
        assert step is not None, "an attention layer was called outside a step"
        meta = step.metadata[self.group]
        key_cache, value_cache = step.caches[self.layer]
        return step.backend.attend(
            query,
            key_cache,
            value_cache,
            meta,
            scale=scale,
            new=(key, value) if self.stores and len(meta.slot_blocks) else None,
            window=window,
            softcap=softcap,
            sinks=sinks,
            distance_bias=self.distance_bias,
        )


def attach_slot(module: nn.Module, slot: Slot | None) -> None:
    """Let `slot` take the attention calls of `module`, None nobody; mutates the module."""
    setattr(module, _SLOT, slot)


def slot_of(module: nn.Module) -> Slot | None:
    """The slot that takes the attention calls of `module`."""
    found: Slot | None = getattr(module, _SLOT, None)
    return found


def route_attention(root: nn.Module) -> None:
    """Make every module under `root` ask for our attention function; mutates their `config`.

    A config object may be shared with modules outside `root` (an encoder), which must go on as
    before: each is copied once, and only the copy changes.
    """
    copies: dict[int, Any] = {}
    for module in root.modules():
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig):
            continue
        if id(config) not in copies:
            routed = copy.copy(config)
            # The public setter would walk into sub-configs that are still shared.
            routed._attn_implementation_internal = ATTENTION_NAME
            copies[id(config)] = routed
        module.config = copies[id(config)]


def _attend_by_slot(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: `query` [1, Hq, T, Dk] and so on -> [1, T, Hq, Dv]."""
    slot = slot_of(module)
    if slot is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    out = slot.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attend_by_slot)


class AttentionType(enum.Enum):
    """Who attends to whom."""

    DECODER = "decoder"
    """Tokens to earlier tokens of their sequence, over the KV cache."""
    ENCODER = "encoder"
    """Every token to every token of its sequence, without a cache."""
    ENCODER_DECODER = "encoder_decoder"
    """A decoder's tokens to an encoder's output, over keys and values that are written once."""


class Attention(nn.Module):
    """Attention for models that are defined here; it finds the step's metadata itself.

    `scale` multiplies the scores; `num_kv_heads` divides `num_heads`. A decoder's layer must have
    been given a slot (`attach_slot`) before its first step.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_kv_heads ({num_kv_heads}) does not divide num_heads ({num_heads})"
            )
        self.head_size = head_size
        self.scale = scale
        self.attn_type = attn_type
        self.window = window
        self.softcap = softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` [..., T, Hq * D], `key` [..., T, Hkv * D], `value` [..., T, Hkv * Dv]
        -> [..., T, Hq * Dv].

        A decoder's tokens are the step's flat batch and have no leading dimensions; an encoder's
        leading dimensions are separate sequences of equal length. For cross-attention `key` and
        `value` are of the step's memory (`StepContext`).
        """
        query = query.view(*query.shape[:-1], self.num_heads, self.head_size)
        key = key.view(*key.shape[:-1], self.num_kv_heads, self.head_size)
        value = value.view(*value.shape[:-1], self.num_kv_heads, -1)
        if self.attn_type is AttentionType.ENCODER:
            return self._attend_to_all(query, key, value).flatten(-2)
        slot = slot_of(self)
        assert slot is not None, "a decoder's attention layer has no slot"
        return slot.attend(
            query, key, value, scale=self.scale, window=self.window, softcap=self.softcap
        ).flatten(-2)

    def _attend_to_all(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        out: Tensor = scaled_dot_product_attention(
            query.transpose(-2, -3),
            key.repeat_interleave(group, dim=-2).transpose(-2, -3),
            value.repeat_interleave(group, dim=-2).transpose(-2, -3),
            scale=self.scale,
        )
        return out.transpose(-2, -3)
