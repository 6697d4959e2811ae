"""Stand-ins for transformers' cache, and what a decoder's layers put into one.

A decoder is run on the meta device with a cache that notes what is put into it, and by whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from aioengine.errors import ModelLoadError
from aioengine.kernels.attention import KeyValue
from aioengine.models.fusion.swap import route
from aioengine.models.runtime.probe import LayerSpec, LayerSpecs

__all__ = [
    "CacheSpecs",
    "Entry",
    "KeptCache",
    "PastCache",
    "check_state",
    "find_layers",
    "spell_out",
]

_NUM_PROBE_TOKENS = 3

Entry = tuple[str, int]
"""What a layer puts into a cache: "attention" or "indexer", and the number it goes by."""


class CacheSpecs(LayerSpecs):
    """Attention layers that are known by what they put into a cache, which is `entries`."""

    entries: tuple[Entry, ...] = ()


class PastCache(Cache):  # type: ignore[misc]
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


class KeptCache(PastCache):
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


class _NotingCache(KeptCache):
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


def check_state(decoder: nn.Module) -> None:
    """Raise ModelLoadError where a decoder keeps more than keys and values, as its class says."""
    if getattr(decoder, "_is_stateful", False):
        raise ModelLoadError("it keeps a state")


def find_layers(decoder: nn.Module, hidden_size: int) -> CacheSpecs:
    """Find what the layers of `decoder`, on the meta device, put into a cache.

    Raises ModelLoadError where it cannot be run with one, or keeps anything else.
    """
    check_state(decoder)
    spell_out(decoder)
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
            later = KeptCache(cache.values, _NUM_PROBE_TOKENS)
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


def spell_out(decoder: nn.Module) -> None:
    """Have attention spelt out, as masks for it are made without a look at what they hold, for
    which shapes do not do and a device waits."""
    route([each for each in decoder.modules() if hasattr(each, "config")], "eager")
