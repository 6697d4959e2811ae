"""Molmo (v1), written from what was published, not from the package's own.

Facts from the paper "Molmo and PixMo: Open Weights and Open Data for State-of-the-Art
Vision-Language Models" (arXiv:2409.17146), from the repository allenai/molmo
(olmo/data/model_preprocessor.py, olmo/model.py, and its issue 50 on the masks), and from the files
that come with the checkpoints allenai/Molmo-7B-D-0924, -7B-O-0924 and -72B-0924:
image_preprocessing_molmo.py and modeling_molmo.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.originals.arithmetic import (
    Array,
    Weights,
    attend_in_heads,
    count,
    layer_norm,
    linear,
    quick_gelu,
    resized,
    rms_norm,
    silu,
    triangle,
    within,
)
from tests.originals.rotary import turned_in_heads

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's."""
LAYERS = (-2, -9)
"""Blocks of the encoder whose outputs are seen, side by side in this order."""


@dataclass(frozen=True)
class Crops:
    """The processor's settings, as the published ones are."""

    side: int = 336
    patch: int = 14
    margins: tuple[int, int] = (4, 4)
    """Patches before and behind what a crop alone shows; its neighbours show them too."""
    most: int = 12

    @property
    def patches(self) -> int:
        """Patches along a crop's side."""
        return self.side // self.patch

    @property
    def window(self) -> int:
        """Patches from the start of one crop to the start of the next."""
        return self.patches - sum(self.margins)

    def canvas(self, tiling: tuple[int, int]) -> tuple[int, int]:
        """Return height and width in pixels of the picture that crops are cut from."""
        down, across = (count * self.window + sum(self.margins) for count in tiling)
        return down * self.patch, across * self.patch


def tiling(height: int, width: int, crops: Crops) -> tuple[int, int]:
    """Choose how many crops go down and across.

    The margins are taken off image and crop. The choice enlarges the image least, to no less than
    its size; or shrinks it least where nothing holds it. Ties go to few crops, then to few rows.
    Ratios are float32's, as in training; small images have negative ones.
    """
    counts = range(1, crops.most + 1)
    pairs = [(down, across) for down in counts for across in counts if down * across <= crops.most]
    pairs.sort(key=lambda pair: (pair[0] * pair[1], pair[0]))
    window, margin = crops.window * crops.patch, sum(crops.margins) * crops.patch
    sizes = np.float32(height - margin), np.float32(width - margin)

    def scale(pair: tuple[int, int]) -> np.float32:
        with np.errstate(divide="ignore"):
            fits = [np.float32(n * window) / size for n, size in zip(pair, sizes, strict=True)]
        return min(fits)

    holding = [pair for pair in pairs if scale(pair) >= 1]
    return min(holding, key=scale) if holding else max(pairs, key=scale)


def fitted_size(height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width at which an image just fits: float32 products, cut down.

    Raises ValueError where nothing is left, which no resize takes.
    """
    lengths = np.float32(height), np.float32(width)
    scale = min(np.float32(c) / length for c, length in zip(canvas, lengths, strict=True))
    high, wide = (int(length * scale) for length in lengths)
    if not high or not wide:
        raise ValueError(f"nothing is left of {width}x{height}")
    return high, wide


def fitted(image: NDArray[np.uint8], canvas: tuple[int, int]) -> tuple[Array, Array]:
    """Fit an image in the middle of black; return it in CLIP's units, and 1 where image is.

    Interpolation is bilinear and antialiased, on values from 0 to 1. The border is black before the
    mean is taken off.
    """
    high, wide = fitted_size(image.shape[0], image.shape[1], canvas)
    top, left = (canvas[0] - high) // 2, (canvas[1] - wide) // 2
    picture, mask = np.zeros((*canvas, 3)), np.zeros(canvas)
    small = resized(image / 255.0, (high, wide), triangle, wide=True, clamp=False)
    picture[top : top + high, left : left + wide] = np.clip(small, 0, 1)
    mask[top : top + high, left : left + wide] = 1
    return (picture - np.array(MEAN)) / np.array(STD), mask


def patched(picture: Array, patch: int) -> Array:
    """Cut a square into [patches, patch * patch * channels], all by rows, channels innermost."""
    side = len(picture) // patch
    return np.stack(
        [
            picture[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch].reshape(-1)
            for y in range(side)
            for x in range(side)
        ]
    )


def cut(image: NDArray[np.uint8], crops: Crops) -> tuple[Array, Array]:
    """Return patches [1 + crops, N, pixels], the whole image first, and masks [1 + crops, N].

    A mask is the share of a patch that is image. The published processor appends the whole image's
    mask (-1 throughout) behind those of the crops, though its patches come first: so every mask
    lies one crop early. Models were trained with that.
    """
    down, across = tiling(*image.shape[:2], crops)
    picture, mask = fitted(image, crops.canvas((down, across)))
    whole, _ = fitted(image, (crops.side, crops.side))
    patches, masks = [patched(whole, crops.patch)], []
    step = crops.window * crops.patch
    for y in range(0, down * step, step):
        for x in range(0, across * step, step):
            place = slice(y, y + crops.side), slice(x, x + crops.side)
            patches.append(patched(picture[place], crops.patch))
            masks.append(patched(mask[place][..., None], crops.patch).mean(-1))
    masks.append(np.full(crops.patches**2, -1.0))
    return np.stack(patches), np.stack(masks)


def owner(place: int, count: int, crops: Crops) -> tuple[int, int]:
    """Return the crop along one axis that shows a pooled place, and the place within it.

    An inner crop shows its window only; the first also its leading margin, the last its trailing.
    """
    leading, window, cells = crops.margins[0] // 2, crops.window // 2, (crops.patches + 1) // 2
    crop = min(max(place - leading, 0) // window, count - 1)
    inside = place - crop * window
    assert 0 <= inside < cells
    return crop, inside


def layout(
    height: int, width: int, crops: Crops, ids: dict[str, int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return an image's tokens, and for each patch token in turn its (crop, pooled feature).

    The whole image comes first, then all crops as one picture, by its rows. Each of the two begins
    with `start`, ends every row with `column`, and itself with `end`.
    """
    cells = (crops.patches + 1) // 2
    down, across = tiling(height, width, crops)
    tokens, places = [ids["start"]], []
    for y in range(cells):
        tokens += [ids["patch"]] * cells + [ids["column"]]
        places += [(0, y * cells + x) for x in range(cells)]
    tokens += [ids["end"], ids["start"]]
    rows, columns = (
        (count * crops.window + sum(crops.margins) + 1) // 2 for count in (down, across)
    )
    for y in range(rows):
        row, inner_y = owner(y, down, crops)
        for x in range(columns):
            column, inner_x = owner(x, across, crops)
            places.append((1 + row * across + column, inner_y * cells + inner_x))
        tokens += [ids["patch"]] * columns + [ids["column"]]
    return [*tokens, ids["end"]], places


def marked(features: Array, masks: Array, pad_embed: Array) -> Array:
    """Add the first embedding to patches without image, and the second to any other below 1."""
    empty = (masks == 0)[..., None]
    partial = ((masks < 1) & (masks != 0))[..., None]
    return features + empty * pad_embed[0] + partial * pad_embed[1]


def pooled(features: Array, weights: Weights, heads: int) -> Array:
    """Pool [N, C] of one crop in blocks of two by two; their mean asks, and all four answer."""
    side = math.isqrt(len(features))
    grid = features.reshape(side, side, -1)
    if side % 2:
        grid = np.pad(grid, ((0, 1), (0, 1), (0, 0)))
    rows = []
    for y in range(0, len(grid), 2):
        for x in range(0, len(grid), 2):
            four = grid[y : y + 2, x : x + 2].reshape(4, -1)
            q = linear(four.mean(0, keepdims=True), weights, "wq")
            k, v = linear(four, weights, "wk"), linear(four, weights, "wv")
            rows.append(linear(attend_in_heads(q, k, v, heads), weights, "wo")[0])
    return np.stack(rows)


def projected(x: Array, weights: Weights) -> Array:
    """Project pooled features: the gate is `w1`, what it lets pass `w3`."""
    return linear(silu(linear(x, weights, "w1")) * linear(x, weights, "w3"), weights, "w2")


def encoded(
    patches: Array,
    weights: Weights,
    heads: int,
    epsilon: float,
    layers: tuple[int, int] = LAYERS,
) -> Array:
    """Encode one crop by CLIP's transformer and return two of its blocks' outputs, joined.

    The class token comes first, has the first position, and is left out of the result. No norm
    follows the last block.
    """
    x = np.concatenate(
        [weights["class_embedding"][None], linear(patches, weights, "patch_embedding")]
    )
    x = layer_norm(x + weights["positional_embedding"], weights, "pre_ln", epsilon)
    outputs = []
    for index in range(count(weights, "transformer.resblocks")):
        block = f"transformer.resblocks.{index}"
        normal = layer_norm(x, weights, f"{block}.attention_norm", epsilon)
        q, k, v = (
            linear(normal, weights, f"{block}.attention.{name}") for name in ("wq", "wk", "wv")
        )
        x = x + linear(attend_in_heads(q, k, v, heads), weights, f"{block}.attention.wo")
        normal = layer_norm(x, weights, f"{block}.ffn_norm", epsilon)
        inner = quick_gelu(linear(normal, weights, f"{block}.feed_forward.w1"))
        x = x + linear(inner, weights, f"{block}.feed_forward.w2")
        outputs.append(x)
    return np.concatenate([outputs[layer][1:] for layer in layers], axis=-1)


def embedded(
    tokens: Array, features: Array, places: list[tuple[int, int]], is_patch: NDArray[np.bool_]
) -> Array:
    """Add features to the embeddings of the patch tokens, which keep their own as well."""
    rows = tokens.copy()
    for row, (crop, place) in zip(np.flatnonzero(is_patch), places, strict=True):
        rows[row] += features[crop, place]
    return rows


def attention(
    x: Array, weights: Weights, heads: int, base: float, epsilon: float, clip: float = math.inf
) -> Array:
    """Attend with positions 0 to T - 1; pairs lie half a head apart.

    `clip` bounds all projections. Where the model has norms of queries and keys (OLMo's), they come
    behind it and see all heads at once.
    """
    width = len(weights["attn_out.weight"])
    fused = np.clip(linear(x, weights, "att_proj"), -clip, clip)
    kv_width = (fused.shape[-1] - width) // 2
    q, k, v = np.split(fused, [width, width + kv_width], axis=-1)
    if "q_norm.weight" in weights:
        q = rms_norm(q, weights["q_norm.weight"], epsilon)
        k = rms_norm(k, weights["k_norm.weight"], epsilon)
    positions = np.arange(float(len(q)))
    q = turned_in_heads(q, positions, base, heads, neighbours=False)
    k = turned_in_heads(k, positions, base, heads * kv_width // width, neighbours=False)
    return linear(attend_in_heads(q, k, v, heads, causal=True), weights, "attn_out")


def decoded(
    x: Array,
    weights: Weights,
    heads: int,
    base: float,
    epsilon: float,
    *,
    norm_after: bool,
    clip: float = math.inf,
) -> Array:
    """Run the decoder on embeddings and return logits [T, vocab].

    `norm_after`: norms follow the two halves of a block, not precede them. The second half of the
    feed-forward's projection is the gate.
    """
    for index in range(count(weights, "blocks")):
        block = within(weights, f"blocks.{index}")

        def normal(rows: Array, name: str, block: Weights = block) -> Array:
            return rms_norm(rows, block[f"{name}.weight"], epsilon)

        before = x if norm_after else normal(x, "attn_norm")
        after = attention(before, block, heads, base, epsilon, clip)
        x = x + (normal(after, "attn_norm") if norm_after else after)
        before = x if norm_after else normal(x, "ff_norm")
        passed, gate = np.split(linear(before, block, "ff_proj"), 2, axis=-1)
        after = linear(silu(gate) * passed, block, "ff_out")
        x = x + (normal(after, "ff_norm") if norm_after else after)
    return linear(rms_norm(x, weights["ln_f.weight"], epsilon), weights, "ff_out")
