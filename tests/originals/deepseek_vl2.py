"""DeepSeek-VL2, written from what was published, not from the package's own.

Facts from the paper "DeepSeek-VL2: Mixture-of-Experts Vision-Language Models for Advanced
Multimodal Understanding" (arXiv:2412.10302) and from the repository deepseek-ai/DeepSeek-VL2 under
deepseek_vl2/models: processing_deepseek_vl_v2.py (tiles), modeling_deepseek_vl_v2.py (projector and
order of rows), siglip_vit.py (encoder), modeling_deepseek.py (language part).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from tests.originals.arithmetic import (
    Array,
    Weights,
    attend,
    attend_in_heads,
    count,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    rms_norm,
    sigmoid,
    silu,
    within,
)
from tests.originals.rotary import turned, turned_by, yarn_speeds

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
    for index in range(0, count(weights, "layers"), 2):
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
    for block in (f"blocks.{index}" for index in range(count(weights, "blocks"))):
        qkv = linear(layer_norm(x, weights, f"{block}.norm1", 1e-6), weights, f"{block}.attn.qkv")
        q, k, v = np.split(qkv, 3, axis=-1)
        x = x + linear(attend_in_heads(q, k, v, heads), weights, f"{block}.attn.proj")
        inner = linear(layer_norm(x, weights, f"{block}.norm2", 1e-6), weights, f"{block}.mlp.fc1")
        x = x + linear(gelu_tanh(inner), weights, f"{block}.mlp.fc2")
    return layer_norm(x, weights, "norm", 1e-6)


@dataclass(frozen=True)
class Language:
    """Settings of the language part under their published names, and how prompts turn."""

    num_attention_heads: int
    num_key_value_heads: int
    use_mla: bool
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    rms_norm_eps: float = 1e-6
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    num_experts_per_tok: int = 1
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    def growth(self, share: float) -> float:
        """Return YaRN's factor of lengths: 0.1 of the logarithm of how much longer, and 1."""
        factor = self.rope_scaling.get("factor", 1.0)
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1

    def turned(self, x: Array, *, neighbours: bool) -> Array:
        """Turn rows at positions 0 to T - 1, slowed down as the config says."""
        positions = np.arange(float(len(x)))
        kind = self.rope_scaling.get("type")
        if kind == "linear":
            positions = positions / self.rope_scaling["factor"]
        if kind != "yarn":
            return turned(x, positions, self.rope_theta, neighbours=neighbours)
        scaling = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
        scaling |= self.rope_scaling
        slowed = yarn_speeds(
            x.shape[-1],
            self.rope_theta,
            scaling["factor"],
            scaling["original_max_position_embeddings"],
            (scaling["beta_fast"], scaling["beta_slow"]),
        )
        stretch = self.growth(scaling.get("mscale", 1)) / self.growth(
            scaling.get("mscale_all_dim", 0)
        )
        return stretch * turned_by(x, positions, slowed, neighbours=neighbours)

    def turned_in_heads(self, x: Array, heads: int) -> Array:
        """Turn heads that lie side by side, pairs half a head apart."""
        parts = np.split(x, heads, axis=-1)
        return np.concatenate([self.turned(part, neighbours=False) for part in parts], axis=-1)

    @property
    def score(self) -> float:
        """Factor of latent attention's scores: the square of YaRN's growth for all dimensions."""
        share = self.rope_scaling.get("mscale_all_dim", 0)
        return self.growth(share) ** 2 if share else 1.0


def attention(x: Array, weights: Weights, settings: Language) -> Array:
    """Attend as the tiny model does (`use_mla` false): LLaMA's attention, pairs half a head apart.

    x: [T, D], positions 0 to T - 1.
    """
    heads = settings.num_attention_heads
    q = settings.turned_in_heads(linear(x, weights, "q_proj"), heads)
    k = settings.turned_in_heads(linear(x, weights, "k_proj"), settings.num_key_value_heads)
    v = linear(x, weights, "v_proj")
    return linear(attend_in_heads(q, k, v, heads, causal=True), weights, "o_proj")


def latent_attention(x: Array, weights: Weights, settings: Language) -> Array:
    """Attend as the other models do: multi-head latent attention, pairs of neighbours.

    Keys and values come from one latent row, normalised. Of each query `qk_nope_head_dim`
    components match the head's own keys, and the rest, with positions, one key that all heads
    share. The inner norms' epsilon is 1e-6 whatever the config's.
    """
    heads, nope = settings.num_attention_heads, settings.qk_nope_head_dim
    if "q_proj.weight" in weights:
        queries = linear(x, weights, "q_proj")
    else:
        low = rms_norm(linear(x, weights, "q_a_proj"), weights["q_a_layernorm.weight"], 1e-6)
        queries = linear(low, weights, "q_b_proj")
    rank = len(weights["kv_a_layernorm.weight"])
    down = linear(x, weights, "kv_a_proj_with_mqa")
    shared = settings.turned(down[:, rank:], neighbours=True)
    latent = rms_norm(down[:, :rank], weights["kv_a_layernorm.weight"], 1e-6)
    outputs = []
    per_head = np.split(weights["kv_b_proj.weight"], heads)
    for query, up in zip(np.split(queries, heads, axis=-1), per_head, strict=True):
        turning = settings.turned(query[:, nope:], neighbours=True)
        outputs.append(
            attend(
                np.concatenate([query[:, :nope], turning], axis=-1),
                np.concatenate([latent @ up[:nope].T, shared], axis=-1),
                latent @ up[nope:].T,
                query.shape[-1] ** -0.5 * settings.score,
                causal=True,
            )
        )
    return linear(np.concatenate(outputs, axis=-1), weights, "o_proj")


def fed(x: Array, weights: Weights) -> Array:
    """Feed forward through a gate of SiLU."""
    gate = silu(linear(x, weights, "gate_proj"))
    return linear(gate * linear(x, weights, "up_proj"), weights, "down_proj")


def shares(scores: Array, bias: Array | None, settings: Language) -> Array:
    """Return each expert's share of one token, 0 for those it does not go to."""
    ranking = scores if bias is None else scores + bias
    if settings.topk_method != "greedy":
        groups = np.split(np.arange(len(scores)), settings.n_group)
        best = 1 if settings.topk_method == "group_limited_greedy" else 2
        worth = [np.sort(ranking[group])[-best:].sum() for group in groups]
        out = np.argsort(worth)[: settings.n_group - settings.topk_group]
        ranking = ranking.copy()
        for index in out:
            ranking[groups[index]] = 0
    chosen_experts = np.argsort(ranking)[-settings.num_experts_per_tok :]
    found = np.zeros_like(scores)
    found[chosen_experts] = scores[chosen_experts]
    if settings.norm_topk_prob and settings.num_experts_per_tok > 1:
        found /= found.sum()
    return found * settings.routed_scaling_factor


def mixed(x: Array, weights: Weights, settings: Language) -> Array:
    """Feed forward through each token's experts, and through those that all tokens share."""
    logits = linear(x, weights, "gate")
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    scores = (
        likely / likely.sum(-1, keepdims=True)
        if settings.scoring_func == "softmax"
        else sigmoid(logits)
    )
    bias = weights.get("gate.e_score_correction_bias")
    per_token = np.stack([shares(row, bias, settings) for row in scores])
    out = fed(x, within(weights, "shared_experts"))
    for index in range(count(weights, "experts")):
        out = out + per_token[:, index, None] * fed(x, within(weights, f"experts.{index}"))
    return out


def decoded(x: Array, weights: Weights, settings: Language) -> Array:
    """Run the language part on embeddings and return logits [T, vocab]."""
    epsilon = settings.rms_norm_eps
    for index in range(count(weights, "model.layers")):
        layer = within(weights, f"model.layers.{index}")
        normal = rms_norm(x, layer["input_layernorm.weight"], epsilon)
        attending = latent_attention if settings.use_mla else attention
        x = x + attending(normal, within(layer, "self_attn"), settings)
        normal = rms_norm(x, layer["post_attention_layernorm.weight"], epsilon)
        mlp = within(layer, "mlp")
        x = x + (mixed(normal, mlp, settings) if "gate.weight" in mlp else fed(normal, mlp))
    return linear(rms_norm(x, weights["model.norm.weight"], epsilon), weights, "lm_head")
