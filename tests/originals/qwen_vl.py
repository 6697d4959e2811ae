"""Qwen-VL, written from what was published, not from the package's own.

Facts from the paper "Qwen-VL: A Versatile Vision-Language Model for Understanding, Localization,
Text Reading, and Beyond" (arXiv:2308.12966) and from the files that come with the checkpoints
Qwen/Qwen-VL and Qwen/Qwen-VL-Chat (repository QwenLM/Qwen-VL): visual.py (image, encoder and
resampler), modeling_qwen.py (rotary positions, attention), tokenization_qwen.py (marker tokens).
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from tests.originals.arithmetic import (
    Array,
    Weights,
    attend_in_heads,
    count,
    cubic,
    gelu,
    layer_norm,
    linear,
    resized,
    rms_norm,
    silu,
    within,
)
from tests.originals.rotary import logn, ntk_base, turned_in_heads

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's."""
QUERIES = 256
HEAD = 128
"""Width of the resampler's heads."""
EPSILON = 1e-6


def preprocessed(image: Image.Image, side: int) -> Array:
    """Return [side, side, 3]: bicubic to a square, whatever the shape, then CLIP's mean and std."""
    square = image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    return (np.asarray(square) / 255.0 - np.array(MEAN)) / np.array(STD)


def placeholders(start: int, queries: int = QUERIES) -> list[int]:
    """Return an image's tokens: `<img>`, 256 places that features take, and `</img>`.

    Their ids follow one another: `image_start_id`, then `</img>`, then `<imgpad>`. The published
    tokenizer writes the image's address in the first places; no embedding of it is ever used.
    """
    return [start, *[start + 2] * queries, start + 1]


def sincos(width: int, grid: int) -> Array:
    """Return [grid * grid, width] of fixed positions, by rows.

    The column has the first half of the components, the row the second. Each half holds the sines
    of all speeds and then their cosines, with speeds of 10000**(-4i / width).
    """
    speeds = 10000.0 ** -(np.arange(width // 4) / (width // 4))
    rows = []
    for y in range(grid):
        for x in range(grid):
            both = [wave(place * speeds) for place in (x, y) for wave in (np.sin, np.cos)]
            rows.append(np.concatenate(both))
    return np.stack(rows)


def stretched(positions: Array, places: int) -> Array:
    """Interpolate positions of one square grid for another, bicubic where they differ."""
    source, target = math.isqrt(len(positions)), math.isqrt(places)
    if source == target:
        return positions
    grid = positions.reshape(source, source, -1)
    grown = resized(grid, (target, target), cubic, wide=False, clamp=True)
    return grown.reshape(target * target, -1)


def resampled(features: Array, weights: Weights) -> Array:
    """Have learned queries attend to [L, width] and return [queries, D].

    Positions are added to queries and keys once both are normalised, and to no value.
    """
    wide = linear(features, weights, "kv_proj") if "kv_proj.weight" in weights else features
    kv = layer_norm(wide, weights, "ln_kv", EPSILON)
    own = weights["pos_embed"]
    q = layer_norm(weights["query"], weights, "ln_q", EPSILON) + own
    k = kv + stretched(own, len(kv))
    wq, wk, wv = np.split(weights["attn.in_proj_weight"], 3)
    bq, bk, bv = np.split(weights["attn.in_proj_bias"], 3)
    heads = q.shape[-1] // HEAD
    mixed = attend_in_heads(q @ wq.T + bq, k @ wk.T + bk, kv @ wv.T + bv, heads)
    return linear(mixed, weights, "attn.out_proj")


def seen(pixels: Array, weights: Weights, patch: int, heads: int) -> Array:
    """Encode [side, side, 3] as the rows that replace an image's places.

    The projection of each block's attention holds q, k and v of one head after the other.
    """
    side = len(pixels) // patch
    cut = pixels.reshape(side, patch, side, patch, 3)
    x = np.einsum("iyjxc,ocyx->ijo", cut, weights["conv1.weight"]).reshape(side * side, -1)
    x = x + stretched(weights["positional_embedding"], side * side)
    x = layer_norm(x, weights, "ln_pre", EPSILON)
    for index in range(count(weights, "transformer.resblocks")):
        block = f"transformer.resblocks.{index}"
        qkv = linear(
            layer_norm(x, weights, f"{block}.ln_1", EPSILON), weights, f"{block}.attn.in_proj"
        )
        trios = np.split(qkv, 3 * heads, axis=-1)
        q, k, v = (np.concatenate(trios[part::3], axis=-1) for part in range(3))
        x = x + linear(attend_in_heads(q, k, v, heads), weights, f"{block}.attn.out_proj")
        inner = linear(
            layer_norm(x, weights, f"{block}.ln_2", EPSILON), weights, f"{block}.mlp.c_fc"
        )
        x = x + linear(gelu(inner), weights, f"{block}.mlp.c_proj")
    rows = layer_norm(resampled(x, within(weights, "attn_pool")), weights, "ln_post", EPSILON)
    return rows @ weights["proj"]


def attention(
    x: Array, weights: Weights, heads: int, base: float, trained: int, *, dynamic: bool = True
) -> Array:
    """Attend over [T, D] as one prompt: pairs half a head apart, NTK and logn beyond `trained`."""
    positions = np.arange(float(len(x)))
    q, k, v = np.split(linear(x, weights, "c_attn"), 3, axis=-1)
    if dynamic:
        base = ntk_base(base, q.shape[-1] // heads, len(x), trained)
    q = turned_in_heads(q, positions, base, heads, neighbours=False)
    k = turned_in_heads(k, positions, base, heads, neighbours=False)
    if dynamic:
        q = q * logn(positions, trained)[:, None]
    return linear(attend_in_heads(q, k, v, heads, causal=True), weights, "c_proj")


def decoded(x: Array, weights: Weights, heads: int, base: float, trained: int) -> Array:
    """Run the decoder on embeddings and return logits [T, vocab]; `w2` is the gate."""
    for index in range(count(weights, "transformer.h")):
        block = within(weights, f"transformer.h.{index}")
        normal = rms_norm(x, block["ln_1.weight"], EPSILON)
        x = x + attention(normal, within(block, "attn"), heads, base, trained)
        normal = rms_norm(x, block["ln_2.weight"], EPSILON)
        inner = linear(normal, block, "mlp.w1") * silu(linear(normal, block, "mlp.w2"))
        x = x + linear(inner, block, "mlp.c_proj")
    return linear(rms_norm(x, weights["transformer.ln_f.weight"], EPSILON), weights, "lm_head")
