"""The seam: transformers' attention layers, and our own, run on `aioengine.kernels`.

transformers looks an attention function up by name in its `AttentionInterface` at every call. One
function is registered there, under a name of ours; modules are made to ask for it by giving them a
copy of their config (`route_attention`). No mask function is registered under that name, so
transformers builds no masks for these modules: causality, windows and sequence boundaries are the
backend's business.

What a layer needs hangs on its module as a slot (`kernels.layer_slot`). A module without a slot is
not ours and gets plain scaled-dot-product attention.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from aioengine.errors import ModelLoadError
from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.dense import dense_attention
from aioengine.kernels.layer_slot import StepHolder, slot_of
from aioengine.models.fusion.swap import route

__all__ = [
    "ATTENTION_NAME",
    "Attention",
    "AttentionType",
    "check_window",
    "chunk_of",
    "counts_tokens",
    "encoders_in",
    "give_positions",
    "route_attention",
]

# transformers reads meaning into parts of such names ("sdpa", "flash"); this one has none of them.
ATTENTION_NAME = "aioengine_paged"
_CHUNKED = "chunked_attention"


def route_attention(root: nn.Module, layers: Sequence[str] = ()) -> None:
    """Make every module under `root` ask for our attention function, by a config of its own.

    `layers`: its attention layers, by name, where they are known: encoders beside them are left.
    """
    inside = encoders_in(root, layers) if layers else {}
    others = {each for encoder in inside.values() for each in encoder.modules()}
    modules = (each for each in root.modules() if each not in others)
    own = [each for each in modules if isinstance(getattr(each, "config", None), PreTrainedConfig)]
    route(own, ATTENTION_NAME)


def encoders_in(decoder: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """Find models of their own inside a decoder that have none of its `layers`, by name."""
    return {
        name: module
        for name, module in decoder.named_modules()
        if name
        and isinstance(module, PreTrainedModel)
        and not any(each.startswith(f"{name}.") for each in layers)
    }


def chunk_of(module: nn.Module) -> int | None:
    """Find the tokens of a chunk that a layer's attention does not leave; None where it has none.

    transformers gives a layer its bounds in its mask, which there is none of here. Raises
    ModelLoadError where they are not known.
    """
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if _CHUNKED not in kinds:
        return None
    index, size = getattr(module, "layer_idx", None), getattr(config, "attention_chunk_size", None)
    if index is None:
        raise ModelLoadError(
            f"{type(module).__name__} does not say which layer's it is, and so not whether it "
            "attends in chunks"
        )
    if kinds[index] != _CHUNKED:
        return None
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError(
            f"config.json: attention_chunk_size is {size!r:.40}, and must be a positive number"
        )
    return size


def check_window(module: nn.Module) -> None:
    """Raise ModelLoadError where a layer has a window, and tells its attention of none.

    transformers has it in a mask, which there is none of here, or in a cache of the model's own: no
    short trial shows that.
    """
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", None)
    kind = kinds[index] if isinstance(index, int) and index < len(kinds) else ""
    if "sliding" in kind and getattr(config, "sliding_window", None):
        raise ModelLoadError(
            f"{type(module).__name__} has the layer type {kind!r} and tells its attention of no "
            "window, so that it would see tokens that it must not"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Stands for a cache in attention that adds up the tokens before a call and its own.

    `positions` [T]: of a step's tokens.
    """

    positions: Tensor

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """The tokens before each one's call, which with its place in the call give its position."""
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Nothing is kept here."""
        return key, value


def counts_tokens(module: nn.Module) -> bool:
    """Return whether attention is sharper at later positions, which it counts by its cache."""
    is_tuned = getattr(module, "attn_temperature_tuning", False)
    return bool(is_tuned) and not getattr(module, "use_rope", True)


def give_positions(root: nn.Module, holder: StepHolder) -> None:
    """Have attention that is sharper at later positions find these in a step's flat batch.

    Llama 4's layers without rotation are given no positions; they count. Adds hooks to them.
    """

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        step = holder.current
        if step is None or step.positions is None:
            return None
        return args, {**kwargs, "past_key_values": _Seen(step.positions)}

    for module in root.modules():
        if counts_tokens(module):
            module.register_forward_pre_hook(give, with_kwargs=True)


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
    check = getattr(slot, "check_tensors", None)
    if check is not None:  # the probe's
        given = {"attention_mask": attention_mask, **kwargs}
        check([name for name, each in given.items() if isinstance(each, Tensor)], key.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    args = AttentionArgs(scale, sliding_window, softcap, s_aux)
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return slot.attend(query, key, value, args)[None], None


AttentionInterface.register(ATTENTION_NAME, _attend_by_slot)


class AttentionType(enum.Enum):
    """Attention mask: who attends to whom."""

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
        self.args = AttentionArgs(scale, window, softcap)
        self.attn_type = attn_type

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
        return slot.attend(query, key, value, self.args).flatten(-2)

    def _attend_to_all(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        rows = (
            query,
            key.repeat_interleave(group, dim=-2),
            value.repeat_interleave(group, dim=-2),
        )
        flat = (each.reshape(-1, *each.shape[-3:]).transpose(1, 2) for each in rows)
        out = dense_attention(*flat, scale=self.args.scale).transpose(1, 2)
        return out.reshape(*query.shape[:-1], -1)
