"""Qwen-VL, the first one: a decoder of its own, a tower, and a resampler between them.

Bai et al., "Qwen-VL: A Versatile Vision-Language Model for Understanding, Localization, Text
Reading, and Beyond" (2023). Modules are named as in the published checkpoints. A checkpoint without
`visual` in its config is the text model of the same family ("Qwen Technical Report", 2023).

Beyond `seq_length` the published model turns its positions by the length of the sequence ("dynamic
NTK") and scales its queries by their position. One request's length would change another's output,
so the longest sequence here is the one up to which it does neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, silu

from aioengine.errors import ModelLoadError
from aioengine.kernels.dense import dense_attention
from aioengine.models.fusion.layer_names import LayerNames
from aioengine.models.qwen_vl.processing import (
    QwenConfig,
    QwenProcessingInfo,
    QwenVLDummyInputsBuilder,
    QwenVLMultiModalProcessor,
    QwenVLProcessingInfo,
)
from aioengine.models.runtime.attention import Attention
from aioengine.models.runtime.defined_model import (
    DefinedModel,
    RMSNorm,
    rotary_table,
    rotate_halves,
)
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.weights import copy_weights
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Qwen", "QwenLMHeadModel", "QwenTower", "QwenVL"]

_TOWER_EPS = 1e-6
_NUM_TOWER_POSITIONS = 256
"""Of the tower's own position embeddings, stretched over the patches there are."""
_POOL_HEAD_SIZE = 128
_COMPUTED = (".attn.masked_bias", "rotary_emb.inv_freq")
"""Ends of the names of what some checkpoints have beside their weights."""


@dataclass(frozen=True, kw_only=True)
class _TowerConfig:
    """The config's `visual` section."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    mlp_ratio: float
    output_dim: int
    n_queries: int = 256

    @classmethod
    def of(cls, visual: dict[str, Any], hidden_size: int) -> _TowerConfig:
        """Raises ModelLoadError for a section that describes no tower of this kind."""
        known = {each.name: each for each in fields(cls)}
        missing = [
            name for name, each in known.items() if each.default is MISSING and name not in visual
        ]
        if missing:
            raise ModelLoadError(f"the config's visual section has no {', '.join(missing)}")
        made = cls(**{name: value for name, value in visual.items() if name in known})
        if made.output_dim != hidden_size:
            raise ModelLoadError(
                f"the tower's output_dim is {made.output_dim}, the decoder's hidden_size "
                f"{hidden_size}"
            )
        return made


class _TowerAttention(nn.Module):
    """All patches to all patches; one layer makes each head's query, key and value in a row."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        per_head = self.in_proj(hidden).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
        out = dense_attention(*per_head.chunk(3, dim=-1))
        projected: Tensor = self.out_proj(out.transpose(-2, -3).flatten(-2))
        return projected


class _TowerBlock(nn.Module):
    def __init__(self, config: _TowerConfig) -> None:
        super().__init__()
        inner = int(config.width * config.mlp_ratio)
        self.ln_1 = nn.LayerNorm(config.width, eps=_TOWER_EPS)
        self.attn = _TowerAttention(config.width, config.heads)
        self.ln_2 = nn.LayerNorm(config.width, eps=_TOWER_EPS)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(config.width, inner))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(inner, config.width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        out: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return out


class _TowerBlocks(nn.Module):
    def __init__(self, config: _TowerConfig) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(_TowerBlock(config) for _ in range(config.layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.resblocks:
            hidden = block(hidden)
        return hidden


class _Resampler(nn.Module):
    """A fixed number of learnt queries, on a grid of their own, look at all patches once."""

    def __init__(self, config: _TowerConfig) -> None:
        super().__init__()
        size = config.output_dim
        if isqrt(config.n_queries) ** 2 != config.n_queries or size % _POOL_HEAD_SIZE:
            raise ModelLoadError(
                f"the resampler's n_queries ({config.n_queries}) must be a square, and its "
                f"output_dim ({size}) a multiple of {_POOL_HEAD_SIZE}"
            )
        self.query = nn.Parameter(torch.empty(config.n_queries, size))
        # Sines and cosines of the place on the grid, which checkpoints hold like any weight.
        self.pos_embed = nn.Parameter(torch.empty(config.n_queries, size))
        self.kv_proj: nn.Module = nn.Identity()
        if config.width != size:
            self.kv_proj = nn.Linear(config.width, size, bias=False)
        self.ln_q = nn.LayerNorm(size, eps=_TOWER_EPS)
        self.ln_kv = nn.LayerNorm(size, eps=_TOWER_EPS)
        self.attn = nn.MultiheadAttention(size, size // _POOL_HEAD_SIZE, batch_first=True)

    def forward(self, patches: Tensor) -> Tensor:
        values = self.ln_kv(self.kv_proj(patches))
        queries = self.ln_q(self.query) + self.pos_embed
        places = _stretched(self.pos_embed, patches.shape[1])
        out: Tensor = self.attn(
            queries.expand(len(patches), -1, -1), values + places, values, need_weights=False
        )[0]
        return out


class QwenTower(nn.Module):
    """A vision transformer and its resampler: pixels [n, 3, S, S] -> rows [n, n_queries, size].

    Raises ModelLoadError for a config that describes none.
    """

    def __init__(self, visual: dict[str, Any], hidden_size: int) -> None:
        super().__init__()
        config = _TowerConfig.of(visual, hidden_size)
        size = config.output_dim
        self.image_size = config.image_size
        self.conv1 = nn.Conv2d(
            3, config.width, config.patch_size, stride=config.patch_size, bias=False
        )
        self.positional_embedding = nn.Parameter(torch.empty(_NUM_TOWER_POSITIONS, config.width))
        self.ln_pre = nn.LayerNorm(config.width, eps=_TOWER_EPS)
        self.transformer = _TowerBlocks(config)
        self.attn_pool = _Resampler(config)
        self.ln_post = nn.LayerNorm(size, eps=_TOWER_EPS)
        self.proj = nn.Parameter(torch.empty(size, size))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """See the class; in the dtype of the weights."""
        patches = self.conv1(pixel_values).flatten(2).transpose(1, 2)
        patches = patches + _stretched(self.positional_embedding, patches.shape[1])
        pooled = self.ln_post(self.attn_pool(self.transformer(self.ln_pre(patches))))
        rows: Tensor = pooled @ self.proj
        return rows


def _stretched(table: Tensor, num_places: int) -> Tensor:
    """A square grid's embeddings [n, width] over another square grid, in float32 at least."""
    if len(table) == num_places:
        return table
    side, wanted = isqrt(len(table)), isqrt(num_places)
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    grid = wide.view(1, side, side, -1).permute(0, 3, 1, 2)
    grid = interpolate(grid, size=(wanted, wanted), mode="bicubic", align_corners=False)
    return grid.flatten(2)[0].T.to(table.dtype)


class _QwenAttention(nn.Module):
    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        size, head_size = config.hidden_size, config.kv_channels
        self.num_heads = config.num_attention_heads
        if self.num_heads * head_size != size:
            raise ModelLoadError(
                f"{self.num_heads} heads of kv_channels {head_size} are not hidden_size {size}"
            )
        self.c_attn = nn.Linear(size, 3 * size)
        self.c_proj = nn.Linear(size, size, bias=not config.no_bias)
        self.attend = Attention(self.num_heads, head_size, head_size**-0.5)

    def forward(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = self.c_attn(hidden).chunk(3, dim=-1)
        query, key = (
            rotate_halves(each.unflatten(-1, (self.num_heads, -1)), table).flatten(-2)
            for each in (query, key)
        )
        projected: Tensor = self.c_proj(self.attend(query, key, value.contiguous()))
        return projected


class _QwenMLP(nn.Module):
    layer_names = LayerNames(merged=[("w1", "w2")])

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        # The config counts both of the layers that are multiplied.
        size, inner, bias = config.hidden_size, config.intermediate_size // 2, not config.no_bias
        self.w1 = nn.Linear(size, inner, bias=bias)
        self.w2 = nn.Linear(size, inner, bias=bias)
        self.c_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.c_proj(self.w1(hidden) * silu(self.w2(hidden)))
        return projected


class _QwenBlock(nn.Module):
    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = _QwenAttention(config)
        self.ln_2 = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = _QwenMLP(config)

    def forward(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden), table)
        out: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return out


class _QwenModel(nn.Module):
    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(_QwenBlock(config) for _ in range(config.num_hidden_layers))
        self.ln_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        if config.visual is not None:
            self.visual = QwenTower(config.visual, config.hidden_size)


class QwenLMHeadModel(nn.Module):
    """The published model of this name, with its tower where the config has one.

    Raises ModelLoadError for a config whose sizes do not fit each other.
    """

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.rotary_size = int(config.kv_channels * config.rotary_pct)
        self.rotary_base = config.rotary_emb_base
        self.transformer = _QwenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states [T, hidden] of token ids or embeddings at `positions` [T]."""
        hidden = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds
        steps = torch.arange(0, self.rotary_size, 2, device=positions.device).float()
        frequencies = 1.0 / self.rotary_base ** (steps / self.rotary_size)
        table = rotary_table(positions, frequencies)
        for block in self.transformer.h:
            hidden = block(hidden, table)
        normed: Tensor = self.transformer.ln_f(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of hidden states [n, hidden]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Rows [n, n_queries, hidden] of images [n, 3, S, S]."""
        rows: Tensor = self.transformer.visual(pixel_values)
        return rows

    def get_decoder(self) -> nn.Module:
        """The decoder's blocks."""
        return self.transformer.h

    def get_input_embeddings(self) -> nn.Module:
        """Token embeddings."""
        return self.transformer.wte

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.lm_head

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes (name, tensor) of a published checkpoint; the names that were loaded.

        Raises ModelLoadError for what it has no place for.
        """
        return copy_weights(self, (each for each in weights if not each[0].endswith(_COMPUTED)))


@MULTIMODAL_REGISTRY.register_processor(info=QwenProcessingInfo)
class Qwen(DefinedModel):
    """The text model."""

    definition: ClassVar[type[nn.Module]] = QwenLMHeadModel
    config_class = QwenConfig

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        settings: Any = getattr(model, "generation_config", None)
        end = getattr(settings, "eos_token_id", None)
        if isinstance(end, int) and getattr(settings, "chat_format", None) == "chatml":
            # The published `chat` ends an answer at the next two as well, <|im_start|>, <|im_end|>.
            settings.eos_token_id = [end, end + 1, end + 2]

    @property
    def max_position_embeddings(self) -> int:
        """See the module: shorter than what the config calls so, if longer ones are scaled."""
        config = self.hf_config
        scales = config.use_dynamic_ntk or config.use_logn_attn
        return int(config.seq_length if scales else config.max_position_embeddings)


@MULTIMODAL_REGISTRY.register_processor(
    QwenVLMultiModalProcessor, info=QwenVLProcessingInfo, dummy_inputs=QwenVLDummyInputsBuilder
)
class QwenVL(Qwen):
    """Sequences up to `seq_length`; without `visual` in its config, a text model (`Qwen`)."""

    @classmethod
    def chosen_for(cls, hf_config: Any) -> type[TransformersModel]:
        return cls if hf_config.visual is not None else Qwen
