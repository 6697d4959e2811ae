"""DeepSeek-VL2, written from what was published, without a look at the package's own.

Facts from the paper "DeepSeek-VL2: Mixture-of-Experts Vision-Language Models for Advanced
Multimodal Understanding" (arXiv:2412.10302) and from the repository deepseek-ai/DeepSeek-VL2 under
deepseek_vl2/models: processing_deepseek_vl_v2.py (tiles), modeling_deepseek_vl_v2.py (projector and
order of rows), siglip_vit.py (encoder), modeling_deepseek.py (attention of the language part).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

from tests.originals.arithmetic import (
    Array,
    Weights,
    attend,
    attend_in_heads,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    rms_norm,
)
from tests.originals.rotary import turned, turned_in_heads

Size = tuple[int, int]
"""Width and height."""
MAX_TILED_IMAGES = 2
"""A prompt of more images shows each in one tile."""


def chosen(size: Size, candidates: Sequence[Size], images: int = 1) -> Size:
    """Choose the canvas that keeps most of an image's pixels, then the one that wastes least.

    More pixels than the image has count for nothing; of equal canvases the first listed wins.
    """
    if images > MAX_TILED_IMAGES:
        return candidates[0][0], candidates[0][0]
    width, height = size

    def worth(place: int) -> tuple[int, int, int]:
        wide, high = candidates[place]
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - wide * high, -place

    best = max(range(len(candidates)), key=worth)
    if worth(best)[0] == 0:
        raise ValueError(f"no canvas holds a pixel of {width}x{height}")
    return candidates[best]


def tiles(image: Image.Image, candidates: Sequence[Size], images: int = 1) -> Array:
    """Return [1 + tiles, side, side, 3] in -1 to 1: the whole image, then tiles by rows.

    Both are fitted by Pillow's `pad` into the middle of grey; the second on the chosen canvas.
    """
    side = candidates[0][0]
    wide, high = chosen(image.size, candidates, images)
    grey = (127, 127, 127)
    whole = np.asarray(ImageOps.pad(image, (side, side), color=grey))
    canvas = np.asarray(ImageOps.pad(image, (wide, high), color=grey))
    cut = [
        canvas[top : top + side, left : left + side]
        for top in range(0, high, side)
        for left in range(0, wide, side)
    ]
    return (np.stack([whole, *cut]) / 255.0 - 0.5) / 0.5


def cells(side: int, patch: int, ratio: int) -> int:
    """Return the rows (and columns) of features of one tile."""
    return math.ceil(side // patch / ratio)


def placeholders(grid: Size, cell: int) -> int:
    """Return the tokens of an image in `grid` tiles (across, down).

    A newline ends each row of cells: of the whole image, and of all tiles seen as one picture. One
    separator stands between the two.
    """
    across, down = grid
    return cell * (cell + 1) + 1 + down * cell * (across * cell + 1)


def merged(patches: Array, ratio: int) -> Array:
    """Gather blocks of `ratio` by `ratio` patches of [side * side, C] in one row each.

    Zeros complete the lower and right edge. A row holds channel by channel its block's patches in
    reading order: component c * ratio**2 + y * ratio + x.
    """
    side = math.isqrt(len(patches))
    channels = patches.shape[-1]
    cell = math.ceil(side / ratio)
    rows = np.zeros((cell * cell, channels * ratio * ratio))
    for y in range(side):
        for x in range(side):
            row = (y // ratio) * cell + x // ratio
            inner = (y % ratio) * ratio + x % ratio
            for channel in range(channels):
                rows[row, channel * ratio**2 + inner] = patches[y * side + x, channel]
    return rows


def projected(patches: Array, weights: Weights, ratio: int) -> Array:
    """Project merged patches by linear layers with GELU between them: `layers.0`, `layers.2`..."""
    x = merged(patches, ratio)
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for index in range(0, depth, 2):
        x = linear(gelu(x) if index else x, weights, f"layers.{index}")
    return x


def arranged(
    features: Array, grid: Size, newline: Array, separator: Array, *, whole_first: bool = True
) -> Array:
    """Lay out [1 + tiles, cell * cell, D] as the rows that replace an image's placeholders."""
    across, down = grid
    cell = math.isqrt(features.shape[1])
    whole: list[Array] = []
    for y in range(cell):
        whole += [features[0, y * cell + x] for x in range(cell)]
        whole.append(newline)
    local: list[Array] = []
    for y in range(down * cell):
        for x in range(across * cell):
            tile = 1 + (y // cell) * across + x // cell
            local.append(features[tile, (y % cell) * cell + x % cell])
        local.append(newline)
    parts = [whole, [separator], local] if whole_first else [local, [separator], whole]
    return np.stack([row for part in parts for row in part])


def encoded(pixels: Array, weights: Weights, patch: int, heads: int) -> Array:
    """Encode one tile of [side, side, 3] by SigLIP's transformer: no class token, no head."""
    side = len(pixels) // patch
    kernel = weights["patch_embed.proj.weight"]
    x = np.stack(
        [
            np.einsum(
                "yxc,ocyx->o",
                pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch],
                kernel,
            )
            for row in range(side)
            for column in range(side)
        ]
    )
    x = x + weights["patch_embed.proj.bias"] + weights["pos_embed"][0]
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    for block in (f"blocks.{index}" for index in range(depth)):
        qkv = linear(layer_norm(x, weights, f"{block}.norm1", 1e-6), weights, f"{block}.attn.qkv")
        q, k, v = np.split(qkv, 3, axis=-1)
        x = x + linear(attend_in_heads(q, k, v, heads), weights, f"{block}.attn.proj")
        inner = linear(layer_norm(x, weights, f"{block}.norm2", 1e-6), weights, f"{block}.mlp.fc1")
        x = x + linear(gelu_tanh(inner), weights, f"{block}.mlp.fc2")
    return layer_norm(x, weights, "norm", 1e-6)


def attention(x: Array, weights: Weights, heads: int, kv_heads: int, base: float) -> Array:
    """Attend as the tiny model does (`use_mla` false): LLaMA's attention, pairs half a head apart.

    x: [T, D], positions 0 to T - 1.
    """
    positions = np.arange(float(len(x)))
    q = turned_in_heads(linear(x, weights, "q_proj"), positions, base, heads, neighbours=False)
    k = turned_in_heads(linear(x, weights, "k_proj"), positions, base, kv_heads, neighbours=False)
    v = linear(x, weights, "v_proj")
    return linear(attend_in_heads(q, k, v, heads, causal=True), weights, "o_proj")


def latent_attention(
    x: Array, weights: Weights, heads: int, nope: int, rope: int, base: float, epsilon: float
) -> Array:
    """Attend as the other models do: multi-head latent attention, pairs of neighbours.

    Keys and values come from one latent row, normalised. Of each query `nope` components match the
    head's own keys, and `rope` more, with positions, one key that all heads share.
    """
    positions = np.arange(float(len(x)))
    if "q_proj.weight" in weights:
        queries = linear(x, weights, "q_proj")
    else:
        low = linear(x, weights, "q_a_proj")
        low = rms_norm(low, weights["q_a_layernorm.weight"], epsilon)
        queries = linear(low, weights, "q_b_proj")
    rank = len(weights["kv_a_layernorm.weight"])
    down = linear(x, weights, "kv_a_proj_with_mqa")
    shared = turned(down[:, rank:], positions, base, neighbours=True)
    latent = rms_norm(down[:, :rank], weights["kv_a_layernorm.weight"], epsilon)
    outputs = []
    per_head = np.split(weights["kv_b_proj.weight"], heads)
    for query, up in zip(np.split(queries, heads, axis=-1), per_head, strict=True):
        turning = turned(query[:, nope:], positions, base, neighbours=True)
        outputs.append(
            attend(
                np.concatenate([query[:, :nope], turning], axis=-1),
                np.concatenate([latent @ up[:nope].T, shared], axis=-1),
                latent @ up[nope:].T,
                (nope + rope) ** -0.5,
                causal=True,
            )
        )
    return linear(np.concatenate(outputs, axis=-1), weights, "o_proj")
