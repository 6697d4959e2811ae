"""Images of many sizes, and how the package's modules are called with arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from aioengine import AsyncEngine, SamplingParams
from tests.originals.arithmetic import Array

MAX_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
TABLE_ERROR = 2e-5
"""Tables of angles are float32 here as in the published models, and in the references float64."""

many = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
some = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


def sizes(usual: int, extreme: int) -> st.SearchStrategy[tuple[int, int]]:
    """Draw width and height: any, odd ones, a pixel, and up to `extreme` beside very few."""
    edge, narrow, long = st.integers(1, usual), st.integers(1, 3), st.integers(usual, extreme)
    return st.one_of(
        st.tuples(edge, edge),
        st.tuples(narrow, long),
        st.tuples(long, narrow),
        st.tuples(long, long),
    )


def picture(size: tuple[int, int]) -> Image.Image:
    """Draw an RGB image, noise over a gradient, of width and height."""
    width, height = size
    noise = np.random.default_rng(width * 7919 + height).integers(0, 90, (height, width, 3))
    slope = (
        np.arange(width)[None, :, None] * 97 // width
        + np.arange(height)[:, None, None] * 60 // height
    )
    return Image.fromarray((noise + slope).astype(np.uint8))


def arrays(named: Any) -> dict[str, Array]:
    """Return a module's weights, or a file's, as float64 arrays."""
    tensors = load_file(named) if isinstance(named, Path) else named.state_dict()
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def drawn(*shape: int, seed: int = 0) -> Array:
    """Draw normal numbers."""
    return np.random.default_rng(seed).normal(size=shape)


def tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor of its own, in float64."""
    return torch.tensor(array, dtype=torch.float64)


async def generated(
    folder: Path, prompts: Sequence[tuple[str, Sequence[Image.Image]]], **options: Any
) -> list[Any]:
    """Have the engine answer all prompts at once, in small chunks over small pages."""
    small = {"device": "cpu", "dtype": "float64", "block_size": 4, "kv_cache_bytes": 16 << 20}
    engine = AsyncEngine.from_pretrained(
        folder, **{**small, "max_num_batched_tokens": 61, **options}
    )
    async with engine:
        return await asyncio.gather(
            *(engine.generate(text, PARAMS, images=tuple(images)) for text, images in prompts)
        )
