"""Shrinking images before the HF image processor sees them, where that changes no bit.

transformers' Pillow-based image processors turn the full-size image into an array, back into a
image, resize it, and go on with the small result. The way through the array changes nothing but
costs three copies of the full image, with the GIL held for parts of them. Where resizing is
provably the first thing that happens, it is done here on the image itself, in one call that lets
other threads run; the processor then finds an image of the wanted size and leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from aioengine.processors.mm_kwargs import merge_for_hf

__all__ = ["resize_ahead", "resizes_first"]

OwnStep: TypeAlias = Callable[[Any, Mapping[str, Any]], bool]
"""Whether an image processor's own `_preprocess`, given these options, begins by resizing."""

# The steps between an image and its resizing. One that a processor overrides may do anything.
_STOCK_STEPS = (
    "__call__",
    "preprocess",
    "_preprocess_image_like_inputs",
    "_prepare_image_like_inputs",
    "_prepare_images_structure",
    "process_image",
    "convert_to_rgb",
    "resize",
)


def resize_ahead(
    hf_processor: Any,
    mm_data: Mapping[str, object],
    mm_kwargs: Mapping[str, object],
    own_preprocess_resizes_first: OwnStep = lambda image_processor, options: False,
) -> dict[str, object]:
    """`mm_data` with its images resized, where the HF processor's result stays bit-identical."""
    images = mm_data.get("images")
    image_processor = getattr(hf_processor, "image_processor", None)
    if not isinstance(images, list) or not _hands_images_on(hf_processor):
        return dict(mm_data)
    options = merge_for_hf(hf_processor, mm_kwargs)["images_kwargs"]
    if not resizes_first(image_processor, options, own_preprocess_resizes_first):
        return dict(mm_data)
    return {**mm_data, "images": [_resize(image, image_processor, options) for image in images]}


def _hands_images_on(hf_processor: Any) -> bool:
    """Return whether an HF processor gives its image processor the images as it gets them."""
    from transformers.processing_utils import ProcessorMixin

    steps = ("__call__", "prepare_inputs_layout", "_process_images", "_merge_kwargs")
    cls = type(hf_processor)
    return all(
        hasattr(ProcessorMixin, step) and getattr(cls, step, None) is getattr(ProcessorMixin, step)
        for step in steps
    )


def resizes_first(image_processor: Any, options: Mapping[str, Any], own: OwnStep) -> bool:
    """Return whether an HF image processor is a stock Pillow one up to and including its
    resizing."""
    try:
        from transformers.image_processing_backends import PilBackend
    except ImportError:  # Older and newer layouts of transformers: the plain way still works.
        return False
    if not isinstance(image_processor, PilBackend):
        return False
    cls = type(image_processor)
    if any(getattr(cls, step, None) is not getattr(PilBackend, step) for step in _STOCK_STEPS):
        return False
    return cls._preprocess is PilBackend._preprocess or own(image_processor, options)


def _resize(image: object, image_processor: Any, options: Mapping[str, Any]) -> object:
    if not isinstance(image, Image.Image) or image.mode != "RGB" or "transparency" in image.info:
        return image
    settings = {
        name: options.get(name, getattr(image_processor, name, None))
        for name in ("do_resize", "size", "resample", "default_to_square", "input_data_format")
    }
    resample = settings["resample"]
    if not settings["do_resize"] or settings["input_data_format"] is not None:
        return image
    if not isinstance(resample, int):  # Image.Resampling is an int; torch's kinds are not.
        return image
    target = _target(image.size, settings, image_processor)
    if target is None or _target(target, settings, image_processor) != target:
        return image
    return image.resize(target, resample=Image.Resampling(int(resample)))


def _target(
    size: tuple[int, int], settings: Mapping[str, Any], image_processor: Any
) -> tuple[int, int] | None:
    """The (width, height) that the processor resizes an image of `size` to, None if unknown."""
    from transformers.image_transforms import get_resize_output_image_size
    from transformers.image_utils import ChannelDimension

    wanted = image_processor._standardize_kwargs(
        size=settings["size"], default_to_square=settings["default_to_square"]
    )["size"]
    if wanted.longest_edge or wanted.max_height or wanted.max_width:
        return None
    if wanted.shortest_edge:
        width, height = size
        # Only its shape is looked at, so one byte stands for all pixels.
        shape = np.broadcast_to(np.uint8(0), (3, height, width))
        new_height, new_width = get_resize_output_image_size(
            shape,
            size=wanted.shortest_edge,
            default_to_square=False,
            input_data_format=ChannelDimension.FIRST,
        )
        return int(new_width), int(new_height)
    if wanted.height and wanted.width:
        return int(wanted.width), int(wanted.height)
    return None
