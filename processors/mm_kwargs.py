"""A request's own options for the HF processor: copied, counted, and held to what an item may cost.

They may come from anybody, and reach code that was written for a developer's own settings: asked
for it, that would make gigabytes of a small image. The engine's `mm_processor_kwargs` are the
application's own, and nothing here is asked of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from aioengine.config import MediaConfig
from aioengine.errors import InvalidRequestError

__all__ = ["check_cost", "copy_options", "merge_for_hf", "merge_options"]

MAX_DEPTH = 8
MAX_VALUES = 1000
MAX_CHARACTERS = 1 << 16
MAX_NAME_CHARACTERS = 100
MAX_BITS = 62

MAX_COUNT = 64
"""Of whatever an option counts, where the processor's own setting is not larger by itself."""
TILE_PIXELS = 448 * 448
"""Of one of the tiles into which images are cut."""
MAX_EDGE = 4096
"""Larger numbers in a processor's own `size` count pixels, whatever they are called."""

_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_COUNTED_ELSEWHERE = ("num_frames", "fps", "sampling_rate")


def copy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same plain values, which the caller cannot change any more.

    Raises InvalidRequestError for other values, numbers that are not finite, and more of anything
    than options have. What is shared in many places counts in each.
    """
    copied = _Copier().copy(options, 0)
    assert isinstance(copied, dict)
    return copied


def check_cost(
    options: Mapping[str, Any],
    hf_processor: Any,
    modality: str,
    config: MediaConfig,
    *,
    size: tuple[int, int] = (1, 1),
    num_frames: int = 1,
) -> None:
    """Raise InvalidRequestError for options that would make more of an item than one may be.

    `options`: as `copy_options` gave them; `size`: of the image, or of each frame. They are held
    to `max_image_pixels` and `max_video_pixels`, as they are when they come; any other number to
    four times the HF processor's own.
    """
    max_pixels = config.max_image_pixels
    if modality == "video":
        max_pixels = config.max_video_pixels // num_frames
    part = getattr(hf_processor, _PARTS.get(modality, ""), None)
    _Bounds(part, max(size) / min(size), max_pixels).check(options)


class _Copier:
    """Copies values and counts them on the way, so that nothing endless is walked to its end."""

    def __init__(self) -> None:
        self._num_values = self._num_characters = 0

    def copy(self, value: Any, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _refused(f"has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _refused(f"must be nested at most {MAX_DEPTH} levels deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Integral):
            number = int(value)
            if number.bit_length() > MAX_BITS:
                raise _refused(f"has an integer of more than {MAX_BITS} bits")
            return number
        if isinstance(value, Real):
            if not math.isfinite(value):
                raise _refused("has a number that is not finite")
            return float(value)
        if isinstance(value, list | tuple):
            copied = [self.copy(element, depth + 1) for element in value]
            return copied if isinstance(value, list) else tuple(copied)
        if isinstance(value, Mapping):
            return {self._name(name): self.copy(each, depth + 1) for name, each in value.items()}
        raise _refused(
            f"must be plain values: {type(value).__name__:.40} is no number, text, list, tuple or "
            "mapping from text to these"
        )

    def _text(self, value: str) -> str:
        self._num_characters += len(value)
        if self._num_characters > MAX_CHARACTERS:
            raise _refused(f"has more than {MAX_CHARACTERS} characters")
        return str(value)

    def _name(self, name: object) -> str:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
            raise _refused(f"must have names of text, up to {MAX_NAME_CHARACTERS} characters")
        return self._text(name)


class _Bounds:
    """Bounds on the options of one item."""

    def __init__(self, part: Any, aspect: float, max_pixels: int) -> None:
        self._part = part
        self._aspect = aspect
        self._max_pixels = max_pixels
        own = getattr(part, "size", None) or {}
        # transformers' own kind of mapping is none, but can be made one.
        edges = [own] if isinstance(own, int) else list(dict(own).values())
        self._size_counts_pixels = max(_numbers(edges), default=0) > MAX_EDGE

    def check(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if name in _COUNTED_ELSEWHERE:
                continue
            if isinstance(value, Mapping) and name.endswith("_kwargs"):
                self.check(value)
            elif "pixels" in name or "resolution" in name or "pinpoints" in name:
                self._check_pixels(name, self._pixels_of(value, is_count="pixels" in name))
            elif "temporal" not in name and any(word in name for word in ("size", "edge")):
                self._check_pixels(name, self._pixels_of(value, is_count=False))
            elif name in ("height", "width"):
                self._check_pixels(name, self._pixels_of({name: value}, is_count=False))
            elif any(word in name for word in ("patch", "tile", "slice")):
                self._check_pixels(name, max(_flat_numbers(value), default=0) * TILE_PIXELS)
            else:
                self._check_count(name, value)

    def _pixels_of(self, value: Any, *, is_count: bool) -> float:
        """The pixels of the largest image that a size can mean for this one."""
        if isinstance(value, Mapping):
            return self._pixels_of_mapping(value)
        numbers = _flat_numbers(value)
        if is_count:
            return max(numbers, default=0)
        if isinstance(value, list | tuple):  # a pair, or a list of pairs
            return max(numbers, default=0) ** 2 if len(numbers) != 2 else math.prod(numbers)
        return sum(numbers) ** 2 * self._aspect

    def _pixels_of_mapping(self, size: Mapping[str, Any]) -> float:
        edges = dict(zip(size, map(_number, size.values()), strict=True))
        shortest, longest = edges.pop("shortest_edge", 0), edges.pop("longest_edge", 0)
        if self._size_counts_pixels:
            return max(shortest, self._product(edges))  # the larger one only makes smaller
        # The one that asks for less counts, where both are given.
        asked = [n for n in (shortest**2 * self._aspect, longest**2) if n]
        return max(min(asked, default=0), self._product(edges))

    @staticmethod
    def _product(edges: Mapping[str, float]) -> float:
        """Multiply two edges; one with itself."""
        known = [edge for edge in edges.values() if edge]
        return math.prod(known) if len(known) == 2 else max(known, default=0) ** 2

    def _check_pixels(self, name: str, num_pixels: float) -> None:
        if num_pixels > self._max_pixels:
            raise _refused(
                f"asks with {name!r} for {num_pixels:.3g} pixels, more than the "
                f"{self._max_pixels:.3g} of the largest image that is taken",
                num_pixels,
            )

    def _check_count(self, name: str, value: Any) -> None:
        own = max(_flat_numbers(getattr(self._part, name, None)), default=0)
        most = max(MAX_COUNT, 4 * own)
        largest = max(_flat_numbers(value, integers_only=True), default=0)
        if largest > most:
            raise _refused(
                f"has {largest} for {name!r}, more than {most:g}; larger ones can be given to the "
                "engine only",
                largest,
            )


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return abs(value) if is_number else 0


def _numbers(values: Any) -> list[float]:
    return [_number(value) for value in values if _number(value)]


def _flat_numbers(value: Any, *, integers_only: bool = False) -> list[float]:
    """The numbers in a value, however deep."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [n for each in value for n in _flat_numbers(each, integers_only=integers_only)]
    return [] if integers_only and isinstance(value, float) else _numbers([value])


def _refused(reason: str, value: object = None) -> InvalidRequestError:
    name = "mm_processor_kwargs"
    return InvalidRequestError(f"{name} {reason}", parameter=name, value=value)


def merge_for_hf(hf_processor: Any, options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """All options of an HF processor by their scopes, these over its own, from wherever a caller
    has put them. Raises anything for options of other types than it declares."""
    tokenizer = getattr(hf_processor, "tokenizer", None)
    merged: dict[str, Any] = hf_processor._merge_kwargs(
        hf_processor.valid_processor_kwargs,
        tokenizer_init_kwargs=getattr(tokenizer, "init_kwargs", {}),
        **copy.deepcopy(dict(options)),  # older versions empty the scopes in it
        **more,
    )
    return merged


def merge_options(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of options, scope by scope; `over` wins."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge_options(below, value)
        merged[key] = value
    return merged
