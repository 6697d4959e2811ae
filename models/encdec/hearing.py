"""Rows that an encoder of audio gives to a decoder, asked of transformers' own module.

What reaches the decoder is what the module's forward tells it: encoder states, perhaps projected,
and the mask of those that count. It is run up to there, with something that only listens in the
place of the decoder. So families need no line that says how their encoders take features, or which
rows a convolution over padding leaves.

Prompts are laid out before audio is decoded, so that the number of rows has to follow from that of
samples. Convolutions, windows and padding to a multiple all round a quotient, and such roundings of
roundings are one: from some length on there is one row more every so many samples. Both numbers are
found on a module without weights, and a model that does otherwise anywhere it is tried is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from aioengine.errors import EngineError, ModelLoadError
from aioengine.models.runtime.hf_loading import build_on_meta
from aioengine.models.runtime.whole_pass import spare_layers, without_layers

__all__ = ["Staircase", "find_staircase", "hear", "shapes_and_masks"]

_LIMITS = ("max_source_positions", "max_speech_positions", "max_position_embeddings")
"""How configs of encoders call the rows that there may be at most."""
_FILLED = ("aten::new_ones", "aten::new_zeros", "aten::new_full")


class _ToldError(Exception):
    """Ends a forward at its decoder, with what that was told."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__("the decoder was called")
        self.told = told


class _Listener(nn.Module):
    """Stands where the decoder does."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.config = decoder.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _ToldError(kwargs)


def hear(model: Any, **features: Tensor) -> tuple[Tensor, Tensor | None]:
    """The states [n, rows, dim] that the decoder is told, and a mask [n, rows], where those that
    count are True, if there is one.

    `features` [n, ...] as forward takes them. The module is left as it is: another thread may run
    its decoder meanwhile.
    """
    decoder = model.get_decoder()
    *owners, name = _path_of(model, decoder).split(".")
    deaf = owner = _copied(model)
    for each in owners:
        owner._modules[each] = owner = _copied(owner._modules[each])
    owner._modules[name] = _Listener(decoder)
    (size,) = {len(each) for each in features.values()}
    first = next(iter(features.values()))
    ids = torch.zeros(size, 1, dtype=torch.int64, device=first.device)
    try:
        deaf(**features, decoder_input_ids=ids, use_cache=False)
    except _ToldError as error:
        states, mask = (
            error.told.get(name) for name in ("encoder_hidden_states", "encoder_attention_mask")
        )
        if isinstance(states, Tensor) and states.dim() == 3:
            return states, None if mask is None else mask != 0
    raise EngineError(f"forward of {type(model).__name__} does not tell its decoder of audio")


def _path_of(model: Any, wanted: nn.Module) -> str:
    paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
    return paths[id(wanted)]


def _copied(module: Any) -> Any:
    """The module with a list of children that may be changed; the children are the same."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


class _ShapesAndMasks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes what follows from sizes and masks; of weights and features the shapes alone.

    What has no data makes what has none, and only that does: a tensor that is filled with a number
    has data, whatever device it is made for.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name.startswith(_FILLED):
            args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
            kwargs["device"] = torch.device("cpu")
        elif any(each.is_meta for each in tensors):
            if name.endswith("_"):
                if not args[0].is_meta:
                    raise RuntimeError("features decide which rows count")
                return args[0]  # its shape stays
            args, kwargs = tree_map_only(Tensor, lambda each: each.to("meta"), (args, kwargs))
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
        elif "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def shapes_and_masks() -> AbstractContextManager[object]:
    """Enter a mode in which modules on the meta device run to what follows from sizes."""
    return _ShapesAndMasks()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Staircase:
    """Rows by samples: one at `first` samples, and one more with every further `step`.

    `most_rows`: the most that the encoder's config knows; None where it says nothing.
    """

    first: int
    step: int
    most_rows: int | None = None

    def count(self, num_samples: int) -> int:
        """Rows of so many samples; 0 if too few."""
        return max(0, (num_samples - self.first) // self.step + 1)

    def most_samples(self, limit: int) -> int:
        """The longest audio of `limit` samples at most that makes no more than `most_rows`."""
        if self.most_rows is None:
            return limit
        return min(limit, self.first + self.most_rows * self.step - 1)


def find_staircase(
    model_class: Any, hf_config: Any, extract: Callable[[int], Mapping[str, Tensor]], rate: int
) -> Staircase:
    """Rows of audio by its samples. `extract`: features of so many samples at `rate` Hz.

    Raises ModelLoadError where they do not rise evenly.
    """
    model = build_on_meta(model_class, hf_config)
    count = _Counter(model, extract)
    try:
        found = _find_steps(count, rate, _most_rows(model))
    # Whatever extractors and modules raise that want something else.
    except Exception as error:
        raise ModelLoadError(
            f"the encoder of {model_class.__name__} does not say how many rows it makes of audio: "
            f"{type(error).__name__}: {error!s:.200}"
        ) from error
    if found is None:
        raise ModelLoadError(
            f"the rows that the encoder of {model_class.__name__} makes of audio do not rise "
            "evenly with its length"
        )
    return found


class _Counter:
    """Rows of so many samples, of a module on the meta device."""

    def __init__(self, model: Any, extract: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._model = model
        self._extract = extract
        self._dtype = next(model.parameters()).dtype
        self._spared = spare_layers(model, {})
        self._known: dict[Hashable, int] = {}

    def __call__(self, num_samples: int) -> int:
        features = self._extract(num_samples)
        # Numbers of samples that make as many frames are one case.
        key = tuple(
            (name, each.shape, None if each.is_floating_point() else each.numpy().tobytes())
            for name, each in features.items()
        )
        if key not in self._known:
            self._known[key] = self._count(features)
        return self._known[key]

    @torch.no_grad()
    def _count(self, features: Mapping[str, Tensor]) -> int:
        given = {
            name: each.to("meta", self._dtype) if each.is_floating_point() else each
            for name, each in features.items()
        }
        with without_layers(self._model, self._spared), shapes_and_masks():
            states, mask = hear(self._model, **given)
        return states.shape[1] if mask is None else int(mask.sum())


def _find_steps(count: Callable[[int], int], rate: int, most_rows: int | None) -> Staircase | None:
    """The staircase, if it is one wherever it is tried."""
    rows, longer = count(rate), count(8 * rate)
    if not 0 < rows < longer - 1:
        return None
    # Between so many ends of steps lies one step less than there are, and less than one more.
    steps = longer - rows
    least, most = 7 * rate // (steps + 1) - 1, -(-7 * rate // (steps - 1))
    end = _first(lambda length: count(length) > rows, rate, rate + most)
    step = _first(lambda size: count(end + size) > rows + 1, least, most)
    found = Staircase(end - rows * step, step, most_rows)
    tried = [found.first + step - 1, found.first + step, *(end + n * step // 3 for n in range(7))]
    is_even = all(count(each) == found.count(each) for each in tried if each > 0)
    return found if is_even and longer == found.count(8 * rate) else None


def _first(is_enough: Callable[[int], bool], too_few: int, enough: int) -> int:
    """The least number that is enough, between one that is not and one that is."""
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _most_rows(model: Any) -> int | None:
    config = model.get_encoder().config
    # A config of the whole says by its last name how long the decoder's sequences are.
    names = _LIMITS[:-1] if config is model.config else _LIMITS
    return next((int(config.to_dict()[name]) for name in names if hasattr(config, name)), None)
