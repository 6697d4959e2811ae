"""DeepSeek-VL2: tiles of an image through SigLIP, two by two patches to a row.

Wu et al., "DeepSeek-VL2: Mixture-of-Experts Vision-Language Models for Advanced Multimodal
Understanding" (2024). An image's rows are those of one tile that shows it whole, and those of
tiles that show it closely, put together as the tiles lie; a learnt row ends each line of either,
and another parts the two. Modules are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aioengine.errors import ModelLoadError
from aioengine.kernels.dense import dense_attention
from aioengine.models.deepseek_vl2.language import DeepseekLanguageModel
from aioengine.models.deepseek_vl2.processing import (
    DeepseekVL2Config,
    DeepseekVL2MultiModalProcessor,
    DeepseekVL2ProcessingInfo,
)
from aioengine.models.runtime.defined_model import DefinedModel
from aioengine.models.runtime.image_tokens import ImageTokenDummyInputsBuilder
from aioengine.models.runtime.weights import copy_weight, copy_weights
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["DeepseekVL2", "DeepseekVLV2ForCausalLM"]

_TOWER_EPS = 1e-6
_UNUSED = "vision.attn_pool."
"""The tower's head, which checkpoints have and the model does not read."""


class _TowerAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0)
        out = dense_attention(*made.transpose(-2, -3))
        projected: Tensor = self.proj(out.transpose(-2, -3).flatten(-2))
        return projected


class _TowerBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_TOWER_EPS)
        self.attn = _TowerAttention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=_TOWER_EPS)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(width, inner))
        self.mlp.add_module("act", nn.GELU(approximate="tanh"))
        self.mlp.add_module("fc2", nn.Linear(inner, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden))
        out: Tensor = hidden + self.mlp(self.norm2(hidden))
        return out


class _Patches(nn.Module):
    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch_size, stride=patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches: Tensor = self.proj(pixel_values).flatten(2).transpose(1, 2)
        return patches


class _Tower(nn.Module):
    """Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023): all patches' states."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, patch_size = config.get("width", 1024), config.get("patch_size", 16)
        num_patches = (config.get("image_size", 384) // patch_size) ** 2
        self.patch_embed = _Patches(width, patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches, width))
        inner, num_heads = int(width * config.get("mlp_ratio", 4)), config.get("heads", 16)
        self.blocks = nn.Sequential(
            *(_TowerBlock(width, num_heads, inner) for _ in range(config.get("layers", 24)))
        )
        self.norm = nn.LayerNorm(width, eps=_TOWER_EPS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Tiles [n, 3, S, S] -> [n, patches, width]."""
        patches = self.patch_embed(pixel_values) + self.pos_embed
        out: Tensor = self.norm(self.blocks(patches))
        return out


class _Projector(nn.Module):
    """Squares of patches, side by side in one vector, through an MLP to the decoder's size."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        kind = config.get("projector_type", "downsample_mlp_gelu")
        if kind != "downsample_mlp_gelu" or config.get("token_pooling", False):
            raise ModelLoadError(f"a projector of the type {kind!r} is not supported")
        self.ratio = config.get("downsample_ratio", 2)
        size, depth = config.get("n_embed", 2048), config.get("depth", 2)
        inner = size * config.get("mlp_ratio", 1)
        sizes = [config.get("input_dim", 1152) * self.ratio**2, *[inner] * (depth - 1), size]
        self.layers = nn.Sequential()
        for index, (before, after) in enumerate(pairwise(sizes)):
            if index:
                self.layers.append(nn.GELU())
            self.layers.append(nn.Linear(before, after))

    def forward(self, patches: Tensor) -> Tensor:
        """[n, side * side, width] -> [n, ceil(side / ratio) ** 2, size]."""
        num_tiles, num_patches, width = patches.shape
        side, ratio = isqrt(num_patches), self.ratio
        missing, squares = -side % ratio, -(-side // ratio)
        grid = patches.view(num_tiles, side, side, width)
        grid = pad(grid, (0, 0, 0, missing, 0, missing))
        grid = grid.view(num_tiles, squares, ratio, squares, ratio, width)
        # Channel by channel, in each of them row by row.
        joined = grid.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
        out: Tensor = self.layers(joined)
        return out


class DeepseekVLV2ForCausalLM(nn.Module):
    """The published model of this name.

    Raises ModelLoadError for a config of another kind.
    """

    def __init__(self, config: DeepseekVL2Config) -> None:
        super().__init__()
        vision, projector = config.vision_config or {}, config.projector_config or {}
        size, hidden = projector.get("n_embed", 2048), config.get_text_config().hidden_size
        if config.tile_tag != "2D":
            raise ModelLoadError(f"tile_tag must be 2D, not {config.tile_tag!r}")
        if size != hidden:
            raise ModelLoadError(f"the projector's n_embed is {size}, hidden_size {hidden}")
        self.whole_first = config.global_view_pos == "head"
        self.vision = _Tower(vision)
        self.projector = _Projector(projector)
        self.image_newline = nn.Parameter(torch.empty(size))
        # Spelt as in the checkpoints.
        self.view_seperator = nn.Parameter(torch.empty(size))
        self.language = DeepseekLanguageModel(config.get_text_config())

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states [T, hidden] of token ids or embeddings at `positions` [T]."""
        embed = self.language.model.embed_tokens
        embeds = embed(input_ids) if inputs_embeds is None else inputs_embeds
        hidden: Tensor = self.language(embeds, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of hidden states [n, hidden]."""
        logits: Tensor = self.language.lm_head(hidden)
        return logits

    def get_image_features(self, pixel_values: Tensor, images_spatial_crop: Tensor) -> list[Tensor]:
        """Rows [rows, hidden] of each image.

        `pixel_values` [tiles, 3, S, S]: of each the tile that shows it whole, then the close ones
        row by row; `images_spatial_crop` [n, 2]: columns and rows of these.
        """
        rows = self.projector(self.vision(pixel_values))
        crops = images_spatial_crop.tolist()
        parts = rows.split_with_sizes(
            [1 + num_columns * num_rows for num_columns, num_rows in crops]
        )
        return [self._arranged(part, *crop) for part, crop in zip(parts, crops, strict=True)]

    def _arranged(self, tiles: Tensor, num_columns: int, num_rows: int) -> Tensor:
        side, size = isqrt(tiles.shape[1]), tiles.shape[2]
        whole = tiles[0].view(side, side, size)
        close = tiles[1:].view(num_rows, num_columns, side, side, size).transpose(1, 2)
        close = close.reshape(num_rows * side, num_columns * side, size)
        whole, close = map(self._with_line_ends, (whole, close))
        first, last = (whole, close) if self.whole_first else (close, whole)
        return torch.cat([first, self.view_seperator[None], last])

    def _with_line_ends(self, grid: Tensor) -> Tensor:
        """[lines, columns, size] -> [lines * (columns + 1), size]."""
        ends = self.image_newline.expand(len(grid), 1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)

    def get_decoder(self) -> nn.Module:
        """The decoder's layers."""
        return self.language.model.layers

    def get_input_embeddings(self) -> nn.Module:
        """Token embeddings."""
        return self.language.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.language.lm_head

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes (name, tensor) of a published checkpoint; the names that were loaded.

        Raises ModelLoadError for what it has no place for, and for an expert that is missing.
        """
        places = {f"language.{name}": at for name, at in self.language.expert_weights().items()}

        def others() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in places:
                    copy_weight(name, places.pop(name), tensor)
                elif not name.startswith(_UNUSED):
                    yield name, tensor

        loaded = copy_weights(self, others())
        if places:
            raise ModelLoadError(
                f"{len(places)} weights of experts are not in the checkpoint: {min(places)}"
            )
        return loaded | {name for name, _ in self.named_parameters() if ".mlp.experts." in name}


@MULTIMODAL_REGISTRY.register_processor(
    DeepseekVL2MultiModalProcessor,
    info=DeepseekVL2ProcessingInfo,
    dummy_inputs=ImageTokenDummyInputsBuilder,
)
class DeepseekVL2(DefinedModel):
    """Tiny, small and base. Beside more than two images, none is seen in tiles of its own."""

    definition: ClassVar[type[nn.Module]] = DeepseekVLV2ForCausalLM
    config_class = DeepseekVL2Config
