"""Molmo's modules: a decoder in the manner of OLMo and Qwen2, and a CLIP tower, pooled 2 x 2.

Deitke et al., "Molmo and PixMo: Open Weights and Open Data for State-of-the-Art Vision-Language
Models" (2024). transformers has no class for it. Modules bear the names of the published weights;
where the published model computes in float32 whatever its weights are, these do so at least.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, pad, silu

from aioengine.errors import ModelLoadError
from aioengine.kernels.dense import dense_attention
from aioengine.models.fusion.layer_names import LayerNames
from aioengine.models.runtime.attention import Attention
from aioengine.models.runtime.defined_model import RMSNorm, rotary_table, rotate_halves
from aioengine.models.runtime.weights import copy_weight, copy_weights

__all__ = ["MolmoForCausalLM", "MolmoTransformer", "MolmoVisionBackbone"]


class MolmoBlock(nn.Module):
    """One layer: fused projections, norms before each half or, with `norm_after`, behind it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.sizes = (width, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.head_dim = head_dim
        self.norm_after = bool(config.norm_after)
        self.clip_qkv = config.clip_qkv
        eps = config.layer_norm_eps
        self.att_proj = nn.Linear(width, sum(self.sizes), bias=bool(config.qkv_bias))
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.ff_out = nn.Linear(config.intermediate_size // 2, width, bias=False)
        self.attn_norm = RMSNorm(width, eps)
        self.ff_norm = RMSNorm(width, eps)
        # Over all heads at once, before they are parted.
        self.q_norm = RMSNorm(self.sizes[0], eps) if config.attention_layer_norm else None
        self.k_norm = RMSNorm(self.sizes[1], eps) if config.attention_layer_norm else None
        self.attention = Attention(
            config.num_attention_heads, head_dim, head_dim**-0.5, num_kv_heads
        )

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`hidden` [T, width], `rotation`: cosines and sines, [T, 1, head_dim / 2] each."""
        attended = self._attend(hidden if self.norm_after else self.attn_norm(hidden), rotation)
        hidden = hidden + (self.attn_norm(attended) if self.norm_after else attended)
        fed = self._feed(hidden if self.norm_after else self.ff_norm(hidden))
        return hidden + (self.ff_norm(fed) if self.norm_after else fed)

    def _attend(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        fused = self.att_proj(hidden)
        if self.clip_qkv is not None:
            fused = fused.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = fused.split(self.sizes, -1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (
            rotate_halves(each.unflatten(-1, (-1, self.head_dim)), rotation).flatten(-2)
            for each in (query, key)
        )
        attended: Tensor = self.attn_out(self.attention(query, key, value.contiguous()))
        return attended

    def _feed(self, hidden: Tensor) -> Tensor:
        # Gate and value the other way round than in most models.
        value, gate = self.ff_proj(hidden).chunk(2, -1)
        fed: Tensor = self.ff_out(silu(gate) * value)
        return fed


class MolmoTransformer(nn.Module):
    """The decoder: [T, width] and positions [T] to hidden states [T, width]."""

    frequencies: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        num_rows = config.embedding_size or config.vocab_size
        head_dim = config.hidden_size // config.num_attention_heads
        self.wte = nn.Embedding(num_rows + config.additional_vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(MolmoBlock(config) for _ in range(config.num_hidden_layers))
        self.ln_f = RMSNorm(config.hidden_size, config.layer_norm_eps)
        self.ff_out = nn.Linear(config.hidden_size, num_rows, bias=False)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        rotation = rotary_table(positions, self.frequencies)
        for block in self.blocks:
            hidden = block(hidden, rotation)
        normed: Tensor = self.ln_f(hidden)
        return normed


class VisionAttention(nn.Module):
    """Attention of all tokens, or of `queries` to others; softmax in float32 at least."""

    layer_names = LayerNames(merged=[("wk", "wv")])

    def __init__(self, config: Any, num_layers: int = 1) -> None:
        super().__init__()
        width, size = config.image_emb_dim, config.image_num_heads * config.image_head_dim
        kv_size = config.image_num_key_value_heads * config.image_head_dim
        self.head_dim = config.image_head_dim
        self.wq = nn.Linear(num_layers * width, size)
        self.wk = nn.Linear(num_layers * width, kv_size)
        self.wv = nn.Linear(num_layers * width, kv_size)
        self.wo = nn.Linear(size, width)

    def forward(self, queries: Tensor, others: Tensor) -> Tensor:
        """[n, q, width] and [n, k, width] -> [n, q, width]."""
        projected = (self.wq(queries), self.wk(others), self.wv(others))
        query, key, value = (
            _at_least_float32(each).view(*each.shape[:2], -1, self.head_dim).transpose(1, 2)
            for each in projected
        )
        mixed = dense_attention(query, key, value)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2).to(queries.dtype))
        return out


class VisionMLP(nn.Module):
    """CLIP's, with its quick GELU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.image_emb_dim, config.image_mlp_dim)
        self.w2 = nn.Linear(config.image_mlp_dim, config.image_emb_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.w1(hidden)
        out: Tensor = self.w2(inner * torch.sigmoid(1.702 * inner))
        return out


class VisionBlock(nn.Module):
    """One layer of the tower."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = VisionAttention(config)
        self.feed_forward = VisionMLP(config)
        self.attention_norm = nn.LayerNorm(config.image_emb_dim, config.image_norm_eps)
        self.ffn_norm = nn.LayerNorm(config.image_emb_dim, config.image_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, normed)
        out: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return out


class VisionTransformer(nn.Module):
    """The tower without its last layer: what each layer gives, class token first."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, patch = config.image_emb_dim, config.image_patch_size
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(config.image_num_pos, width))
        self.patch_embedding = nn.Linear(3 * patch * patch, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, config.image_norm_eps)
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(
            VisionBlock(config) for _ in range(config.image_num_layers)
        )

    def forward(self, patches: Tensor) -> list[Tensor]:
        """[n, patches, 3 * side * side] -> for each layer [n, 1 + patches, width]."""
        embedded = self.patch_embedding(patches)
        first = self.class_embedding.expand(len(embedded), 1, -1)
        hidden = torch.cat([first, embedded], 1) + self.positional_embedding
        wide = _at_least_float32(hidden)
        norm = self.pre_ln
        scale, shift = norm.weight.to(wide.dtype), norm.bias.to(wide.dtype)
        hidden = layer_norm(wide, norm.normalized_shape, scale, shift, norm.eps).to(hidden.dtype)
        found = []
        for block in self.transformer.resblocks:  # type: ignore[union-attr]
            hidden = block(hidden)
            found.append(hidden)
        return found


class Projector(nn.Module):
    """A gated MLP into the decoder's width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = config.intermediate_size // 2
        self.w1 = nn.Linear(config.image_emb_dim, inner, bias=False)
        self.w2 = nn.Linear(inner, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.image_emb_dim, inner, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.w2(silu(self.w1(hidden)) * self.w3(hidden))
        return out


class MolmoVisionBackbone(nn.Module):
    """Crops to rows: layers side by side, paddings marked, 2 x 2 patches to one by attention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = tuple(config.vit_layers)
        self.grid = tuple(side // config.image_patch_size for side in config.image_input_size)
        if config.image_num_pos != 1 + self.grid[0] * self.grid[1]:
            raise ModelLoadError(
                f"image_num_pos is {config.image_num_pos}, and a crop has {self.grid[0]} x "
                f"{self.grid[1]} patches: position embeddings of another grid are not built"
            )
        width = config.image_emb_dim * len(self.layers)
        self.image_vit = VisionTransformer(config)
        self.image_pooling_2d = VisionAttention(config, len(self.layers))
        self.image_projector = Projector(config)
        self.pad_embed = nn.Parameter(torch.zeros(2, width))

    def forward(self, patches: Tensor, masks: Tensor) -> Tensor:
        """[n, patches, 3 * side * side] and [n, patches] -> rows [n, pooled patches, hidden].

        `masks`: how much of a patch is image and not padding, 0 to 1.
        """
        layers = self.image_vit(patches)
        features = torch.cat([layers[index][:, 1:] for index in self.layers], -1)
        all_pad = (masks == 0)[..., None]
        some_pad = (masks < 1)[..., None] & ~all_pad
        features = features + self.pad_embed[0] * all_pad + self.pad_embed[1] * some_pad
        features = features.view(len(patches), *self.grid, -1)
        if self.grid[0] % 2:
            features = pad(features, (0, 0, 0, 1, 0, 1))
        n, height, width, size = features.shape
        windows = features.view(n, height // 2, 2, width // 2, 2, size).transpose(2, 3)
        windows = windows.reshape(-1, 4, size)
        pooled = self.image_pooling_2d(windows.mean(1, keepdim=True), windows)
        rows: Tensor = self.image_projector(pooled.view(n, -1, pooled.shape[-1]))
        return rows


class MolmoForCausalLM(nn.Module):
    """See `aioengine.models.runtime.defined_model`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check(config)
        self.num_new_rows = config.additional_vocab_size
        self.model = nn.Module()
        self.model.transformer = MolmoTransformer(config)
        self.model.vision_backbone = MolmoVisionBackbone(config)

    def get_decoder(self) -> MolmoTransformer:
        """The part with the decoder's attention layers."""
        decoder = self.model.transformer
        assert isinstance(decoder, MolmoTransformer)
        return decoder

    def get_input_embeddings(self) -> nn.Module:
        """The table, the added tokens' rows last."""
        return self.get_decoder().wte

    def get_output_embeddings(self) -> nn.Module:
        """The head, which has no rows for the added tokens."""
        return self.get_decoder().ff_out

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states [T, hidden] of ids or embeddings at positions [T]."""
        decoder = self.get_decoder()
        embeds = decoder.wte(input_ids) if inputs_embeds is None else inputs_embeds
        hidden: Tensor = decoder(embeds, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        logits: Tensor = self.get_decoder().ff_out(hidden)
        return logits

    def get_image_features(self, pixel_values: Tensor, image_masks: Tensor) -> Tensor:
        """Crops to the rows of their pooled patches: see `MolmoVisionBackbone`."""
        rows: Tensor = self.model.vision_backbone(pixel_values, image_masks)  # type: ignore[operator]
        return rows

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Published names, and the two parts of the embedding table into one."""
        table = self.get_decoder().wte.weight
        parts = {
            "embedding": table[: -self.num_new_rows],
            "new_embedding": table[-self.num_new_rows :],
        }
        left = set(parts)

        def others() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                part = name.removeprefix("model.transformer.wte.")
                if part in parts:
                    copy_weight(name, parts[part], tensor)
                    left.discard(part)
                else:
                    yield name, tensor

        loaded = copy_weights(self, others())
        return loaded if left else loaded | {"model.transformer.wte.weight"}


def _check(config: Any) -> None:
    """Raise ModelLoadError for settings of other models than those that are built here."""
    experts = [name for name in vars(config) if name.startswith("moe_")]
    if experts:
        raise ModelLoadError(f"MolmoE, which has experts ({experts[0]}), is not built")
    if config.layer_norm_type != "rms" or config.weight_tying:
        raise ModelLoadError(
            f"layer_norm_type {config.layer_norm_type!r} and weight_tying {config.weight_tying} "
            "are not built: 'rms' and False are"
        )
    num_layers = config.image_num_layers
    if not config.vit_layers or not all(-num_layers <= n < num_layers for n in config.vit_layers):
        raise ModelLoadError(
            f"vit_layers {list(config.vit_layers)} are not among the tower's {num_layers} layers"
        )
    if config.hidden_size % (2 * config.num_attention_heads) or config.additional_vocab_size < 1:
        raise ModelLoadError(
            f"hidden_size {config.hidden_size} in {config.num_attention_heads} heads, and "
            f"additional_vocab_size {config.additional_vocab_size}, cannot be"
        )


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
