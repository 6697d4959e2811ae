"""Layers that the references are made of, in NumPy and float64, from their definitions.

Nothing here comes from the package or from torch, so that a fault of either shows. Weights are
arrays under the names of the published checkpoints: `weights["wq.weight"]`, `weights["wq.bias"]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def linear(x: Array, weights: Weights, name: str) -> Array:
    """Multiply by a weight of [out, in], and add the bias where there is one."""
    y = np.einsum("...i,oi->...o", x, weights[f"{name}.weight"])
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def layer_norm(x: Array, weights: Weights, name: str, epsilon: float) -> Array:
    """Bring each row to mean 0 and variance 1, then scale and shift."""
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return centred / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Bring each row to a mean square of 1, then scale."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def attend(q: Array, k: Array, v: Array, scale: float, *, causal: bool = False) -> Array:
    """Mix the values of one head: [Q, D] and [K, D] and [K, V] give [Q, V]."""
    scores = scale * (q @ k.T)
    if causal:
        late = len(k) - len(q)
        rows, columns = np.indices(scores.shape)
        scores = np.where(columns <= rows + late, scores, -np.inf)
    likeness = np.exp(scores - scores.max(-1, keepdims=True))
    return likeness / likeness.sum(-1, keepdims=True) @ v


def attend_in_heads(
    q: Array, k: Array, v: Array, heads: int, scale: float | None = None, *, causal: bool = False
) -> Array:
    """Attend in heads that lie side by side; a key head serves its share of the query heads."""
    width = q.shape[-1] // heads
    kv_heads = k.shape[-1] // width
    outputs = []
    for head in range(heads):
        shared = head * kv_heads // heads
        mine, theirs = slice(head * width, head * width + width), shared * width
        outputs.append(
            attend(
                q[:, mine],
                k[:, theirs : theirs + width],
                v[:, theirs : theirs + width],
                width**-0.5 if scale is None else scale,
                causal=causal,
            )
        )
    return np.concatenate(outputs, axis=-1)


def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    """Compute x times its sigmoid."""
    return x * sigmoid(x)


def quick_gelu(x: Array) -> Array:
    """Compute CLIP's approximation of GELU."""
    return x * sigmoid(1.702 * x)


def gelu(x: Array) -> Array:
    """Compute GELU by the error function."""
    return x * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    """Compute GELU's approximation by tanh, SigLIP's own."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def resized(
    x: Array, size: tuple[int, int], kernel: Callable[[Array], Array], *, wide: bool, clamp: bool
) -> Array:
    """Resample the first two axes by a kernel of distances.

    `wide` stretches the kernel over what a smaller output pixel covers (antialiasing). With `clamp`
    samples beyond an edge repeat it; without, they are left out and the rest is normalised.
    """
    for axis, target in enumerate(size):
        source = x.shape[axis]
        scale = source / target
        middles = (np.arange(target) + 0.5) * scale
        stretch = max(scale, 1.0) if wide else 1.0
        reach = math.ceil(2 * stretch) + 1
        offsets = np.arange(-reach, source + reach) if clamp else np.arange(source)
        weights = kernel((offsets[None] + 0.5 - middles[:, None]) / stretch)
        weights /= weights.sum(-1, keepdims=True)
        matrix = np.zeros((target, source))
        for column, offset in enumerate(np.clip(offsets, 0, source - 1)):
            matrix[:, offset] += weights[:, column]
        x = np.moveaxis(np.tensordot(matrix, x, axes=(1, axis)), 0, axis)
    return x


def within(weights: Weights, name: str) -> dict[str, Array]:
    """Return the weights of one part, under their names in it."""
    start = f"{name}."
    return {each.removeprefix(start): w for each, w in weights.items() if each.startswith(start)}


def count(weights: Weights, name: str) -> int:
    """Count the numbered parts of a part, `name.0` and on."""
    return 1 + max(int(each.split(".")[0]) for each in within(weights, name))


def triangle(distance: Array) -> Array:
    """Weigh linearly: bilinear interpolation."""
    return np.maximum(0.0, 1 - np.abs(distance))


def cubic(distance: Array) -> Array:
    """Weigh by Keys' cubic convolution with -0.75, which is torch's bicubic interpolation."""
    a, x = -0.75, np.abs(distance)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
