"""Calls of a decoder with a cache over the pages: one for each length of a step's chunks, and one
for all requests with one token, as far as padding is harmless.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutput

from aioengine.errors import ModelLoadError
from aioengine.kernels.attention import AttentionMetadata, KeyValue, split_by_sequence
from aioengine.kernels.layer_slot import StepContext, StepHolder
from aioengine.kernels.pool import to_numbers, to_stored
from aioengine.models.by_cache.caches import CacheSpecs, Entry, KeptCache, PastCache, spell_out
from aioengine.models.fusion.swap import subclass, swap
from aioengine.models.fusion.trial import is_near, random_rows
from aioengine.models.runtime.attention import counts_tokens

__all__ = ["attach_cache"]

_SLOT = "_aioengine_cache"
_NUM_TRIED = 6
_PADDING = 64
"""Tokens that a context may be padded by, or a third of it: it is computed, and held."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Sequences of a step that a decoder is called with at once.

    `chosen`: which these are, by their index. `bounds`: where the tokens of each lie in the flat
    batch, as many for all. `lens`: of their contexts.
    """

    chosen: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    lens: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of the longest context."""
        return max(self.lens)

    @property
    def is_padded(self) -> bool:
        """Return whether some contexts are shorter than others."""
        return min(self.lens) < self.length

    def rows(self, flat: Tensor) -> Tensor:
        """Rows of `flat` [T, ...] that are of the call's tokens: [n, t, ...]."""
        first, last = self.bounds[0][0], self.bounds[-1][1]
        num_each = self.bounds[0][1] - first
        if last - first == num_each * len(self.bounds):  # they lie side by side
            return flat[first:last].view(len(self.bounds), num_each, *flat.shape[1:])
        return torch.stack([flat[start:end] for start, end in self.bounds])

    def sequences(self, each: Tensor) -> Tensor:
        """Rows of `each` [S, ...] that are of the call's sequences: [n, ...]."""
        first, last = self.chosen[0], self.chosen[-1] + 1
        if last - first == len(self.chosen):
            return each[first:last]
        return torch.stack([each[index] for index in self.chosen])


class _PagedCache(PastCache):
    """A cache over a step's pages, for one call.

    `places`: what a layer puts there -> (the layer's index among the model's, its KV group).
    """

    def __init__(
        self, step: StepContext, call: _Call, places: Mapping[Entry, tuple[int, int]]
    ) -> None:
        start, end = call.bounds[0]
        super().__init__(call.length - (end - start))
        self._step, self._call, self._places = step, call, places
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, entry: Entry, key: Tensor, value: Tensor) -> KeyValue:
        """Write keys and values into the pages; return those of the contexts."""
        index, group = self._places[entry]
        meta, pages = self._step.metadata[group], self._step.caches[index]
        slots = tuple(self._call.rows(s.long()) for s in (meta.slot_blocks, meta.slot_offsets))
        for each, cache in zip((key, value), pages, strict=True):
            # Rotation in float32 may leave keys so.
            cache.index_put_(slots, to_stored(each.transpose(1, 2), cache).to(cache.dtype))
        if group not in self._context:
            self._context[group] = self._find_context(meta)
        blocks, offsets = self._context[group]
        keys, values = (
            to_numbers(cache[blocks, offsets], each.dtype)
            .to(each.dtype)
            .transpose(1, 2)
            .contiguous()
            for cache, each in zip(pages, (key, value), strict=True)
        )
        return keys, values

    def _find_context(self, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Block and row of each position of the contexts [n, L], the first one's for padding."""
        ends = self._call.sequences(meta.seq_lens).long()[:, None]
        steps = torch.arange(self._call.length, device=ends.device)[None, :]
        positions = (ends - self._call.length + steps).clamp(min=0)
        blocks = self._call.sequences(meta.block_table).long()
        return blocks.gather(1, positions // meta.block_size), positions % meta.block_size


@dataclass(frozen=True, slots=True, eq=False)
class _CacheSlot:
    """One decoder's place: the model's current step, and how it is called.

    `kind`: the class of the module before it was attached; `names`: of what its forward takes.
    `pads`: whether requests with contexts of different lengths can be in one call.
    """

    kind: type[nn.Module]
    names: frozenset[str]
    holder: StepHolder
    places: Mapping[Entry, tuple[int, int]]
    pads: bool

    def call(self, module: nn.Module, embeds: Tensor, cache: Cache, **others: Tensor) -> Tensor:
        """The module's own forward on embeddings [n, t, hidden]: hidden states [n, t, dim]."""
        given = {name: each for name, each in others.items() if name in self.names}
        forward: Any = self.kind.forward
        output = forward(
            module, inputs_embeds=embeds, past_key_values=cache, use_cache=True, **given
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def run(self, module: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, dim] of a step's embeddings [T, hidden] at `positions` [T]."""
        step = self.holder.current
        assert step is not None
        out: Tensor | None = None
        for call in _calls(step.metadata[0], self.pads):
            cache = _PagedCache(step, call, self.places)
            others: dict[str, Tensor] = {}
            if call.is_padded:
                lens = call.sequences(step.metadata[0].seq_lens)
                mask = _mask_of(lens, call.length)
                others = {"attention_mask": mask, "position_ids": call.rows(positions)}
            found = self.call(module, call.rows(embeds), cache, **others)
            if out is None:
                out = found.new_empty(embeds.shape[0], found.shape[-1])
            for (start, end), each in zip(call.bounds, found, strict=True):
                out[start:end] = each
        assert out is not None, "a step without tokens"
        return out


def _calls(meta: AttentionMetadata, pads: bool) -> Iterator[_Call]:
    """The calls that a step's sequences are run in."""
    bounds = split_by_sequence(meta)
    sizes = [*zip(meta.query_lens, meta.context_lens, strict=True)]
    groups: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        new, length = sizes[index]
        least = sizes[groups[-1][0]] if groups else (0, 0)
        fits = pads and least[0] == new == 1 and length - least[1] <= max(_PADDING, length // 3)
        if least == (new, length) or fits:
            groups[-1].append(index)
        else:
            groups.append([index])
    for group in groups:
        chosen = tuple(sorted(group))
        lens = tuple(meta.context_lens[index] for index in chosen)
        yield _Call(chosen, tuple(bounds[index] for index in chosen), lens)


def _mask_of(lens: Tensor, length: int) -> Tensor:
    """Build the mask of tokens [n, length] of contexts that are padded on the left."""
    steps = torch.arange(length, device=lens.device)
    return (steps >= length - lens[:, None]).long()


def _forward(
    module: nn.Module, inputs_embeds: Tensor, position_ids: Tensor | None = None, **kwargs: Any
) -> Any:
    """Run in the place of a decoder's own forward."""
    slot: _CacheSlot = getattr(module, _SLOT)
    if slot.holder.current is None:  # outside a step, on whole sequences
        forward: Any = slot.kind.forward
        given = {**kwargs, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        return forward(module, **{name: v for name, v in given.items() if name in slot.names})
    others = [name for name, each in kwargs.items() if each is not None and name != "use_cache"]
    assert position_ids is not None and position_ids.dim() == 2 and not others, others
    hidden = slot.run(module, inputs_embeds[0], position_ids[0])
    return BaseModelOutput(last_hidden_state=hidden[None])


@torch.no_grad()
def attach_cache(
    decoder: nn.Module,
    specs: CacheSpecs,
    holder: StepHolder,
    places: Sequence[tuple[int, int]],
    like: Tensor,
) -> None:
    """Run `decoder` by its cache, over pages; mutates it. Raises ModelLoadError where what it
    computes of a token is not the same however a prompt is cut.

    `places`: each layer's KV group and index there; `like`: what its embeddings are like.
    """
    kind = type(decoder)
    # Falcon chooses by the same name in its own code, where biases differ.
    if like.device.type != "cpu" and getattr(kind, "_supports_attention_backend", False):
        spell_out(decoder)
    names = frozenset(inspect.signature(kind.forward).parameters)
    numbered = enumerate(zip(specs.entries, places, strict=True))
    layers = {entry: (index, group) for index, (entry, (group, _)) in numbered}
    slot = _CacheSlot(kind, names, holder, layers, pads=False)
    rows = random_rows(_NUM_TRIED, like.shape[-1], like=like)[None]
    cut, short = _NUM_TRIED - 1, _NUM_TRIED // 2
    whole = slot.call(decoder, rows, KeptCache())
    caches = KeptCache(), KeptCache()
    first = slot.call(decoder, rows[:, :cut], caches[0])
    slot.call(decoder, rows[:, :short], caches[1])
    values = [cache.values for cache in caches]
    later = rows[:, cut:]
    long = slot.call(decoder, later, KeptCache(values[0], cut))
    if not is_near(torch.cat([first, long], dim=1), whole):
        raise ModelLoadError(
            f"{kind.__name__} cannot be run in chunks: what it computes of a token depends on how "
            "a prompt is cut. Run this model with transformers"
        )
    alone = slot.call(decoder, later, KeptCache(values[1], short))
    missing = cut - short
    joined = {
        entry: (_padded(key, others[0], missing), _padded(value, others[1], missing))
        for (entry, (key, value)), others in zip(values[0].items(), values[1].values(), strict=True)
    }
    mask = _mask_of(torch.tensor([_NUM_TRIED, short + 1], device=like.device), _NUM_TRIED)
    given = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
    try:
        cache = KeptCache(joined, cut)
        padded = slot.call(decoder, later.expand(2, -1, -1), cache, **given)
        pads = is_near(padded, torch.cat([long, alone]))
        # What is counted is padding too; it changes a token only where there are many.
        pads = pads and not any(map(counts_tokens, decoder.modules()))
    except Exception:  # a model's own code may raise anything here
        pads = False
    swap(decoder, subclass(kind, _forward), **{_SLOT: replace(slot, pads=pads)})


def _padded(long: Tensor, short: Tensor, missing: int) -> Tensor:
    """Both [1, Hkv, L, D] as one batch, with `missing` rows of zeros before the shorter one's."""
    return torch.cat([long, pad(short, (0, 0, missing, 0))])
