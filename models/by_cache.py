"""Decoders that compute attention in code of their own, run over transformers' cache interface.

Some modules spell out their attention and ask no `AttentionInterface`, or build masks and biases
for whole sequences: they cannot run on a flat batch of many requests' tokens. All of them put keys
and values into a cache, though. Such a decoder keeps its own forward, attention, masks and
positions, and is called with a cache of ours, which writes a step's keys and values into the pages
and gives back those of the whole context: once for each chunk, and once for all requests with one
token, which are padded on the left as `generate` pads a batch, or only for those of one length
where the module takes no padding.

This is right and slow; what runs on a flat batch never comes here.
"""

from __future__ import annotations

import inspect
import logging
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
from aioengine.models.fusion.swap import route, subclass, swap
from aioengine.models.fusion.trial import is_near, random_rows
from aioengine.models.runtime.hf_loading import build_on_meta
from aioengine.models.runtime.probe import LayerSpec, LayerSpecs
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["ByCache", "CacheSpecs"]

logger = logging.getLogger(__name__)

_SLOT = "_aioengine_cache"
_NUM_PROBE_TOKENS = 3
_NUM_TRIED = 6
_PADDING = 64
"""Tokens that a context may be padded by, or a third of it: it is computed, and held."""


Entry = tuple[str, int]
"""What a layer puts into a cache: "attention" or "indexer", and the number it goes by."""


class CacheSpecs(LayerSpecs):
    """Attention layers that are known by what they put into a cache, which is `entries`."""

    entries: tuple[Entry, ...] = ()


class ByCache(TransformersModel):
    """A model whose decoder is run by its own cache interface where it cannot run flattened."""

    def layers(self) -> tuple[LayerSpec, ...]:
        """See the base class. Raises its error where the decoder cannot run either way."""
        if getattr(self.text_config, "attention_type", None) == "block_sparse":
            raise ModelLoadError(
                f"{type(self.model).__name__} attends in blocks to long prompts only, to tokens "
                "behind them too, and a short one turns that off for all later ones; set "
                "attention_type to 'original_full' in config.json"
            )
        try:
            return super().layers()
        except ModelLoadError as error:
            try:
                return self.layers_by_cache()
            except ModelLoadError as other:
                reason = str(error).rstrip(".")
                raise ModelLoadError(f"{reason}. Nor by its cache: {other}") from other

    @classmethod
    def probe_by_cache(cls, hf_config: Any) -> CacheSpecs | None:
        """The layers by what they put into a cache, of a model that fails its trial on a flat
        batch; None if it cannot be run so."""
        try:
            return cls.around(build_on_meta(cls.hf_class(hf_config), hf_config)).layers_by_cache()
        except ModelLoadError:
            return None

    def layers_by_cache(self) -> CacheSpecs:
        """The layers by what they put into a cache. Raises ModelLoadError."""
        # A decoder that was probed in another way has been used up.
        shell = self.around(build_on_meta(self.hf_class(self.hf_config), self.hf_config))
        return _find_layers(shell.decoder(), self.hidden_size)

    def patch(self) -> None:
        """Have the decoder run by its cache, if that is how its layers were found."""
        if not isinstance(self.specs, CacheSpecs):
            super().patch()
            return
        table = self.model.get_input_embeddings().weight
        logger.info(
            "%s computes attention in code of its own: it is run by its cache, a call for each "
            "chunk, which is slower than a flat batch",
            type(self.model).__name__,
        )
        attach_cache(self.decoder(), self.specs, self._holder, self.layer_groups, table)


class _PastCache(Cache):  # type: ignore[misc]
    """transformers' cache in one call of a decoder, with `past` tokens before its own."""

    def __init__(self, past: int) -> None:
        super().__init__(layers=[])
        self.past = past

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the call's."""
        return self.past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The index of the call's first token."""
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The number of tokens that are given back, and the index of the first of these."""
        return self.past + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Put keys and values [n, Hkv, t, D] behind those that are there, and return all."""
        return self.put(("attention", layer_idx), key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Put an indexer's keys [n, t, D] behind those that are there, and return all.

        Pages are of keys and values: the halves of a row stand for these.
        """
        halves = indexer_key_states[:, None].tensor_split(2, dim=-1)
        return torch.cat(self.put(("indexer", layer_idx), *halves), dim=-1)[:, 0]

    def put(self, entry: Entry, key: Tensor, value: Tensor) -> KeyValue:
        """Keep what a layer puts into the cache; return all that is there of its."""
        raise NotImplementedError


class _KeptCache(_PastCache):
    """A cache that keeps keys and values [n, Hkv, L, D] by layer."""

    def __init__(self, values: Mapping[Entry, KeyValue] | None = None, past: int = 0) -> None:
        super().__init__(past)
        self.values = dict(values or {})

    def put(self, entry: Entry, key: Tensor, value: Tensor) -> KeyValue:
        """See the base class."""
        before = self.values.get(entry)
        if before is not None:
            key, value = torch.cat([before[0], key], -2), torch.cat([before[1], value], -2)
        self.values[entry] = key, value
        return key, value


class _NotingCache(_KeptCache):
    """A cache that also notes which module puts what into it."""

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self._running = running
        self.specs: dict[Entry, LayerSpec] = {}

    def put(self, entry: Entry, key: Tensor, value: Tensor) -> KeyValue:
        """See the base class. Raises ModelLoadError for anything but rows of the call's tokens."""
        name = self._running[-1]
        heads, key_dim, value_dim = key.shape[1], key.shape[-1], value.shape[-1]
        shapes = (1, heads, _NUM_PROBE_TOKENS, key_dim), (1, heads, _NUM_PROBE_TOKENS, value_dim)
        if (key.shape, value.shape) != shapes or entry in self.specs:
            raise ModelLoadError(f"{name} puts something else into it than its tokens' rows")
        self.specs[entry] = LayerSpec(
            name, "self", heads, heads, key_dim, value_dim, 1.0, None, None, sinks=False
        )
        return super().put(entry, key, value)


def _find_layers(decoder: nn.Module, hidden_size: int) -> CacheSpecs:
    """Find what the layers of `decoder`, on the meta device, put into a cache.

    Raises ModelLoadError where it cannot be run with one, or keeps anything else.
    """
    if getattr(decoder, "_is_stateful", False):
        raise ModelLoadError("it keeps a state")
    _spell_out(decoder)
    running: list[str] = []
    for name, module in decoder.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: running.append(name))
        module.register_forward_hook(lambda _, __, ___: running.pop() and None)
    like = next(decoder.parameters())
    embeds = torch.empty(1, _NUM_PROBE_TOKENS, hidden_size, device="meta", dtype=like.dtype)
    cache = _NotingCache(running)
    try:
        with torch.no_grad():
            decoder(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
            later = _KeptCache(cache.values, _NUM_PROBE_TOKENS)
            decoder(inputs_embeds=embeds, past_key_values=later, use_cache=True)
    except ModelLoadError:
        raise
    # Whatever a model's own code raises here, the answer is the same.
    except Exception as error:
        raise ModelLoadError(f"{type(error).__name__}: {error!s:.200}") from error
    config: Any = getattr(decoder, "config", None)
    # Of BART's kind the other name is of the encoder's.
    num_layers = getattr(config, "decoder_layers", getattr(config, "num_hidden_layers", 1))
    num_found = sum(kind == "attention" for kind, _ in cache.specs)
    if num_found < num_layers:
        raise ModelLoadError(f"{num_found} of {num_layers} layers use it")
    found = CacheSpecs(cache.specs.values())
    found.entries = tuple(cache.specs)
    return found


def _spell_out(decoder: nn.Module) -> None:
    """Have attention spelt out, as masks for it are made without a look at what they hold, for
    which shapes do not do and a device waits."""
    route([each for each in decoder.modules() if hasattr(each, "config")], "eager")


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


class _PagedCache(_PastCache):
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
    if like.device.type != "cpu":
        _spell_out(decoder)
    kind = type(decoder)
    names = frozenset(inspect.signature(kind.forward).parameters)
    numbered = enumerate(zip(specs.entries, places, strict=True))
    layers = {entry: (index, group) for index, (entry, (group, _)) in numbered}
    slot = _CacheSlot(kind, names, holder, layers, pads=False)
    rows = random_rows(_NUM_TRIED, like.shape[-1], like=like)[None]
    cut, short = _NUM_TRIED - 1, _NUM_TRIED // 2
    whole = slot.call(decoder, rows, _KeptCache())
    caches = _KeptCache(), _KeptCache()
    first = slot.call(decoder, rows[:, :cut], caches[0])
    slot.call(decoder, rows[:, :short], caches[1])
    values = [cache.values for cache in caches]
    later = rows[:, cut:]
    long = slot.call(decoder, later, _KeptCache(values[0], cut))
    if not is_near(torch.cat([first, long], dim=1), whole):
        raise ModelLoadError(
            f"{kind.__name__} cannot be run in chunks: what it computes of a token depends on how "
            "a prompt is cut. Run this model with transformers"
        )
    alone = slot.call(decoder, later, _KeptCache(values[1], short))
    missing = cut - short
    joined = {
        entry: (_padded(key, others[0], missing), _padded(value, others[1], missing))
        for (entry, (key, value)), others in zip(values[0].items(), values[1].values(), strict=True)
    }
    mask = _mask_of(torch.tensor([_NUM_TRIED, short + 1], device=like.device), _NUM_TRIED)
    given = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
    try:
        cache = _KeptCache(joined, cut)
        padded = slot.call(decoder, later.expand(2, -1, -1), cache, **given)
        pads = is_near(padded, torch.cat([long, alone]))
    except Exception:  # a model's own code may raise anything here
        pads = False
    swap(decoder, subclass(kind, _forward), **{_SLOT: replace(slot, pads=pads)})


def _padded(long: Tensor, short: Tensor, missing: int) -> Tensor:
    """Both [1, Hkv, L, D] as one batch, with `missing` rows of zeros before the shorter one's."""
    return torch.cat([long, pad(short, (0, 0, missing, 0))])
