"""Attention over latents, in the place of a module's own keys and values of all heads.

    latent   [T, latent]  what the keys and values of all heads are a linear function of
    turned   [T, turned]  a key with the position in it, the same for all heads
    key_h  = [still_h latent | turned],  value_h = value_h latent

A page holds [latent | turned] of a token, once: 576 numbers for DeepSeek-V3, where the keys and
values of its 128 heads are 40,960. A query is taken to the latents' side and attends there, as if
to one head (`query_h still_h` with what it attends to, then `value_h` of the sum). That is more
arithmetic for each pair of tokens, and none for making keys; so a long chunk makes keys and values
of its context, in pages that live as long as the layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aioengine.kernels.attention import (
    AttentionArgs,
    AttentionMetadata,
    KeyValue,
    split_by_sequence,
)
from aioengine.kernels.experts import PackedExperts, pack_experts
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder, attach_slot, slot_of
from aioengine.kernels.pool import BYTES, to_numbers

__all__ = [
    "LatentSizes",
    "LatentSlot",
    "attach_latents",
    "expand",
    "expansion_of",
    "prepare_latents",
]

MAX_EXPANDED_BYTES = 256 << 20
"""Of keys and values that are made of a context for a chunk behind it."""
FEW_ROWS = 64
"""Of an operator that threads of our own compute (`kernels/cpu/ops/parallel.cpp`)."""


class LatentSizes(NamedTuple):
    """Widths of latents and turned keys, and of a head's still key and value."""

    heads: int
    latent: int
    turned: int
    still: int
    value: int


def expansion_of(module: nn.Module) -> nn.Linear | None:
    """The layer that expands latents, of a module that does so in a method of its own."""
    layer = getattr(module, "kv_b_proj", None)
    has_method = callable(getattr(type(module), "expand_kv", None))
    return layer if has_method and isinstance(layer, nn.Linear) else None


def attach_latents(module: nn.Module, slot: LayerSlot, sizes: LatentSizes | None) -> None:
    """Let `slot` take the calls of `module`, with latents where there are `sizes` of them; mutates
    the module."""
    if sizes is None:
        attach_slot(module, slot)
        return
    latents = LatentSlot(slot, module, sizes)
    module.expand_kv = latents.hand_on  # type: ignore[assignment]
    attach_slot(module, latents)


def prepare_latents(decoder: nn.Module) -> None:
    """Make what the slots of `decoder` need of its weights, which have their last form."""
    for module in decoder.modules():
        slot = slot_of(module)
        if isinstance(slot, LatentSlot):
            slot.prepare()


def expand(module: Any, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Make keys and values [1, H, T, ...] of `latent`, `turned` [1, 1, T, ...], by its own code."""
    made: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, turned)
    return made


class _Part(NamedTuple):
    """Sequences of a step that are attended to in one way.

    `tokens`: their rows of the flat batch. `blocks`: those of their context, if that is expanded;
    `meta` counts by these then.
    """

    tokens: slice
    meta: AttentionMetadata
    blocks: Tensor | None


@dataclass(frozen=True, eq=False)
class LatentSlot:
    """See `Slot`: of a module that hands its latents on instead of what they are expanded to."""

    slot: LayerSlot
    module: Any
    sizes: LatentSizes

    @property
    def wanted(self) -> Tensor | None:
        """See `LayerSlot`."""
        return self.slot.wanted

    @property
    def is_last(self) -> bool:
        """See `LayerSlot`."""
        return self.slot.is_last

    @property
    def holder(self) -> StepHolder:
        """See `LayerSlot`."""
        return self.slot.holder

    def prepare(self) -> None:
        """Make the weights by head, which are kept."""
        with torch.inference_mode():
            assert len(self._of_heads) == 2

    def hand_on(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Give the module its latents as key and value of one head, while this slot is its own."""
        if slot_of(self.module) is not self:
            return expand(self.module, latent, turned)
        rows = torch.cat([latent, turned], dim=-1)
        return rows, rows[..., : self.sizes.latent]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Write this step's latents into the layer's pages, then attend over them.

        `query` [T, H, still + turned], `key` [T, 1, latent + turned] -> [T, H, value].
        """
        step, sizes = self._step, self.sizes
        assert key.shape[1:] == (1, sizes.latent + sizes.turned), "these are no latents"
        meta = step.metadata[self.slot.group]
        cache, _ = step.caches[self.slot.layer]
        pages = self._with_values(cache, cache)
        new = self._with_values(key, cache) if self.slot.stores else None
        parts = meta.once(("latent", sizes), lambda: _parts(meta, sizes, query.element_size()))
        if len(parts) == 1 and parts[0].blocks is None:
            return self._attended(query, pages, meta, args, new)
        if new is not None:
            step.backend.write_kv(new, pages, meta)
        out = query.new_empty(*query.shape[:2], sizes.value)
        for tokens, part, blocks in parts:
            if blocks is None:
                out[tokens] = self._attended(query[tokens], pages, part, args)
            else:
                expanded = self._expanded(pages[0][blocks], query.dtype)
                out[tokens] = step.backend.attend(query[tokens], expanded, part, args)
        return out

    @property
    def _step(self) -> StepContext:
        step = self.slot.holder.current
        assert step is not None, "an attention layer was called outside a step"
        return step

    def _with_values(self, rows: Tensor, cache: Tensor) -> KeyValue:
        """Rows of `cache`, or to go there, and what of them are values, which is all of bytes."""
        return rows, rows if cache.dtype is BYTES else rows[..., : self.sizes.latent]

    def _attended(
        self,
        query: Tensor,
        pages: KeyValue,
        meta: AttentionMetadata,
        args: AttentionArgs,
        new: KeyValue | None = None,
    ) -> Tensor:
        """Values [T, H, value] of queries [T, H, still + turned], by way of the latents."""
        backend = self._step.backend
        to_latents, to_values = self._of_heads
        latents = backend.attend(to_latents(query), pages, meta, args, new=new)
        if latents.shape[-1] != self.sizes.latent:
            latents = latents[..., : self.sizes.latent]
        return to_values(latents)

    def _expanded(self, rows: Tensor, dtype: torch.dtype) -> KeyValue:
        """Keys and values [n, block_size, H, ...] of pages of latents [n, block_size, 1, ...]."""
        latents = to_numbers(rows, dtype).reshape(1, 1, -1, self.sizes.latent + self.sizes.turned)
        parts = latents.tensor_split([self.sizes.latent], dim=-1)
        size = rows.shape[:2]
        key, value = (each[0].transpose(0, 1) for each in expand(self.module, *parts))
        return key.view(*size, *key.shape[1:]), value.view(*size, *value.shape[1:])

    @cached_property
    def _of_heads(self) -> tuple[_HeadLinear, _HeadLinear]:
        """The matmuls of each head that take queries to latents, and latents to values.

        What is turned goes through the first as it is.
        """
        sizes, layer = self.sizes, expansion_of(self.module)
        assert layer is not None
        # What it makes of ones is its weight, in whatever form it has that.
        one = torch.eye(sizes.latent, dtype=layer.weight.dtype, device=layer.weight.device)
        by_head = layer(one).view(sizes.latent, sizes.heads, -1).permute(1, 2, 0)
        keys, values = by_head.tensor_split([sizes.still], dim=1)
        widths = sizes.latent + sizes.turned, sizes.still + sizes.turned
        queries = keys.new_zeros(sizes.heads, *widths)
        queries[:, : sizes.latent, : sizes.still] = keys.mT
        queries[:, sizes.latent :, sizes.still :] = one.new_ones(sizes.turned).diag()
        return _HeadLinear(queries), _HeadLinear(values)


class _HeadLinear:
    """Matmuls with a `weight` [H, out, in] of each head's own.

    Packed, those of few tokens are some heads at a time: what has more rows than `FEW_ROWS` is
    shared out by PyTorch's threads, which meet each time, for milliseconds where others keep the
    processors busy.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = pack_experts(weight, None)
        self._weight = None if self._packed is not None else weight.mT.contiguous()
        self._groups: dict[int, list[PackedExperts]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, H, in] -> [T, H, out]."""
        if self._weight is not None:
            return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
        count, num_heads, width = x.shape
        at_once = num_heads if count > FEW_ROWS else min(FEW_ROWS // count, num_heads)
        ends = _ends(at_once, count)
        parts = []
        for first, packed in zip(range(0, num_heads, at_once), self._grouped(at_once), strict=True):
            heads = x if at_once == num_heads else x[:, first : first + at_once]
            found = packed(heads.transpose(0, 1).reshape(-1, width), ends[: packed.num_experts])
            parts.append(found.view(packed.num_experts, count, -1))
        if len(parts) == 1:
            return parts[0].transpose(0, 1)
        out = x.new_empty(num_heads, count, parts[0].shape[-1])
        for first, part in zip(range(0, num_heads, at_once), parts, strict=True):
            out[first : first + at_once] = part
        return out.transpose(0, 1)

    def _grouped(self, at_once: int) -> list[PackedExperts]:
        """The packed weights, so many heads' at a time."""
        assert self._packed is not None
        if at_once not in self._groups:
            firsts = range(0, self._packed.num_experts, at_once)
            self._groups[at_once] = [self._packed.taken(n, n + at_once) for n in firsts]
        return self._groups[at_once]


@lru_cache(maxsize=128)
def _ends(num_heads: int, count: int) -> Tensor:
    """Make the ends of so many heads' rows."""
    return torch.arange(1, num_heads + 1) * count


def _parts(meta: AttentionMetadata, sizes: LatentSizes, itemsize: int) -> list[_Part]:
    """The sequences of a step, those side by side that are attended to in one way as one part."""
    bounds = split_by_sequence(meta)
    lengths = zip(meta.query_lens, meta.context_lens, strict=True)
    ways = [_pays(sizes, itemsize, *each) for each in lengths]
    parts = []
    for is_expanded, group in groupby(range(len(ways)), key=lambda index: ways[index]):
        indices = [*group]
        first, last = indices[0], indices[-1] + 1
        tokens = slice(bounds[first][0], bounds[last - 1][1])
        part = meta if last - first == len(ways) else _cut(meta, first, last, tokens)
        own = _by_themselves(part) if is_expanded else (part, None)
        parts.append(_Part(tokens, *own))
    return parts


def _pays(sizes: LatentSizes, itemsize: int, num_new: int, length: int) -> bool:
    """Return whether keys and values of all of a sequence's context are to be made for its new
    tokens.

    What making them takes for each token but the new ones, whose queries and sums are taken to
    latents and back otherwise, against what each pair of tokens takes less.
    """
    wide, narrow = sizes.latent, sizes.still + sizes.value
    saved = num_new * (length - num_new / 2) * (2 * wide - narrow)
    size = length * sizes.heads * (narrow + sizes.turned) * itemsize
    fits = length == num_new or size <= MAX_EXPANDED_BYTES
    return num_new > 1 and fits and saved > (length - num_new) * wide * narrow


def _cut(meta: AttentionMetadata, first: int, last: int, tokens: slice) -> AttentionMetadata:
    """The metadata of sequences [first, last), which write nothing."""
    query_start = meta.query_start[first : last + 1]
    num_decodes = meta.num_decodes if first == 0 else 0  # of what is expanded there are none
    return replace(
        meta,
        query_start=query_start - tokens.start if tokens.start else query_start,
        seq_lens=meta.seq_lens[first:last],
        block_table=meta.block_table[first:last],
        slot_blocks=meta.slot_blocks[:0],
        slot_offsets=meta.slot_offsets[:0],
        by_length=meta.by_length[:num_decodes],
        query_lens=meta.query_lens[first:last],
        context_lens=meta.context_lens[first:last],
        num_decodes=num_decodes,
        block_ids=None if meta.block_ids is None else meta.block_ids[tokens],
        has_blocks=meta.has_blocks[first:last],
        scratch={},
    )


def _by_themselves(meta: AttentionMetadata) -> tuple[AttentionMetadata, Tensor]:
    """Metadata over pages of their own, one sequence's behind the other's; and the blocks, in the
    pool, of these pages."""
    size = meta.block_size
    used = [-(-length // size) for length in meta.context_lens]
    blocks = torch.cat([row[:count] for row, count in zip(meta.block_table, used, strict=True)])
    counts = (meta.seq_lens + (size - 1)) // size
    begins = counts.cumsum(0, dtype=torch.int32) - counts
    steps = torch.arange(max(used), dtype=torch.int32, device=blocks.device)
    table = (begins[:, None] + steps).clamp(max=sum(used) - 1)
    none = meta.slot_blocks[:0]
    own = replace(meta, block_table=table, slot_blocks=none, slot_offsets=none, scratch={})
    return own, blocks.long()
