"""DeepSeek-VL2's decoder: shared and routed experts, over plain or latent attention.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model"
(2024), and "DeepSeek-V3 Technical Report" (2024) for the routing of the largest model. Modules are
named as in the published checkpoints, but for the experts of a layer, which lie in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from aioengine.errors import ModelLoadError
from aioengine.kernels.experts import lay_out_experts
from aioengine.kernels.layer_slot import slot_of
from aioengine.models.deepseek_vl2.processing import DeepseekLanguageConfig
from aioengine.models.runtime.attention import Attention
from aioengine.models.runtime.defined_model import RMSNorm, rotary_table, rotate_halves

__all__ = ["DeepseekLanguageModel"]

_LATENT_EPS = 1e-6
"""Of the norms inside latent attention, whatever the config's is."""

Table: TypeAlias = tuple[Tensor, Tensor]


class _Rotary(nn.Module):
    """Rotary frequencies for vectors of `size`, stretched as the config says.

    `scaling` None, "linear", or "yarn": Peng et al., "YaRN: Efficient Context Window Extension of
    Large Language Models" (2023). `score_factor`: what it multiplies attention scores by.
    """

    frequencies: Tensor

    def __init__(self, size: int, config: DeepseekLanguageConfig) -> None:
        super().__init__()
        scaling: Mapping[str, Any] = config.rope_scaling or {}
        kind = scaling.get("type", scaling.get("rope_type", "default"))
        if kind not in ("default", "linear", "yarn") or (kind == "yarn" and not config.use_mla):
            raise ModelLoadError(
                f"rope_scaling of the type {kind!r} is not supported"
                + ("" if config.use_mla else " without latent attention")
            )
        base, factor = config.rope_theta, scaling.get("factor", 1.0)
        frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.factor = self.score_factor = 1.0
        whole = float(scaling.get("mscale_all_dim", 0))
        if kind == "yarn":
            frequencies *= _slowing(size, base, scaling)
            self.factor = _growth(factor, scaling.get("mscale", 1)) / _growth(factor, whole)
        elif kind == "linear":
            frequencies /= factor
        # Without latent attention, attention is LLaMA's, which scales no scores.
        if whole and config.use_mla:
            self.score_factor = _growth(factor, whole) ** 2
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> Table:
        """The table for `positions` [T]."""
        return rotary_table(positions, self.frequencies, self.factor)


def _growth(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _slowing(size: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Compute the factor of each of YaRN's frequencies, float32 [size / 2].

    Those that turn more than `beta_fast` times in the original length stay, those that turn fewer
    than `beta_slow` times are divided by the factor, and between them it goes over in a line.
    """
    original = scaling.get("original_max_position_embeddings", 4096)

    def place(num_turns: float) -> float:
        return size * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(place(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(place(scaling.get("beta_slow", 1))), size - 1)
    steps = torch.arange(size // 2, dtype=torch.float32)
    slow = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return slow / float(scaling["factor"]) + (1 - slow)


class _PlainAttention(nn.Module):
    """Heads with keys and values of their own, or shared by groups of them."""

    def __init__(self, config: DeepseekLanguageConfig, score_factor: float) -> None:
        super().__init__()
        size, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.head_size = size // heads
        kv_heads = config.num_key_value_heads or heads
        self.q_proj = nn.Linear(size, heads * self.head_size, bias=bias)
        self.k_proj = nn.Linear(size, kv_heads * self.head_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads * self.head_size, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_size, size, bias=bias)
        scale = self.head_size**-0.5 * score_factor
        self.attend = Attention(heads, self.head_size, scale, kv_heads)

    def forward(self, hidden: Tensor, table: Table) -> Tensor:
        query, key = (
            rotate_halves(project(hidden).unflatten(-1, (-1, self.head_size)), table).flatten(-2)
            for project in (self.q_proj, self.k_proj)
        )
        out: Tensor = self.o_proj(self.attend(query, key, self.v_proj(hidden)))
        return out


class _LatentAttention(Attention):
    """Keys and values come from one latent vector for each token, which all heads expand.

    Pages hold the latents (`models/latent/`), as `expand_kv` is called the way transformers' own
    layers of this kind call theirs.
    """

    def __init__(self, config: DeepseekLanguageConfig, score_factor: float) -> None:
        if config.kv_lora_rank is None:
            raise ModelLoadError("latent attention (use_mla) needs a kv_lora_rank")
        size, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        key_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        super().__init__(heads, key_size, key_size**-0.5 * score_factor)
        self.rotary_size = config.qk_rope_head_dim
        self.still_size, self.value_size = config.qk_nope_head_dim, config.v_head_dim
        self.latent_size = config.kv_lora_rank
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(size, heads * key_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * key_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(size, self.latent_size + self.rotary_size, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent_size, _LATENT_EPS)
        expanded = heads * (self.still_size + self.value_size)
        self.kv_b_proj = nn.Linear(self.latent_size, expanded, bias=False)
        self.o_proj = nn.Linear(heads * self.value_size, size, bias=bias)

    def expand_kv(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, T, ...] of `latent` and `turned` [1, 1, T, ...]."""
        expanded = self.kv_b_proj(latent[0, 0]).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        still, value = expanded.tensor_split([self.still_size], dim=-1)
        key = torch.cat([still, turned[0].expand(self.num_heads, -1, -1)], dim=-1)
        return key[None], value[None]

    def forward(self, hidden: Tensor, table: Table) -> Tensor:  # type: ignore[override]
        if self.q_lora_rank is None:
            query = self.q_proj(hidden)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query = query.unflatten(-1, (self.num_heads, -1))
        still, turning = query.tensor_split([self.still_size], dim=-1)
        query = torch.cat([still, rotate_halves(_apart(turning), table)], dim=-1)
        latent, turning = self.kv_a_proj_with_mqa(hidden).tensor_split([self.latent_size], dim=-1)
        turned = rotate_halves(_apart(turning[:, None]), table).transpose(0, 1)
        made = self.expand_kv(self.kv_a_layernorm(latent)[None, None], turned[None])
        key, value = (each[0].transpose(0, 1) for each in made)
        slot = slot_of(self)
        assert slot is not None, "a decoder's attention layer has no slot"
        projected: Tensor = self.o_proj(slot.attend(query, key, value, self.args).flatten(-2))
        return projected


def _apart(vectors: Tensor) -> Tensor:
    """Neighbours, which are turned together here, brought to the two halves of a vector."""
    pairs = vectors.reshape(*vectors.shape[:-1], -1, 2)
    return pairs.transpose(-1, -2).flatten(-2)


class _MLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class _Router(nn.Module):
    """Router: the experts a token goes to, and their weights.

    "greedy": the best `num_experts_per_tok`; "group_limited_greedy": of the groups with the best
    expert; "noaux_tc": of the groups with the best two, by scores with a correction that is learnt
    for the choice alone.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: DeepseekLanguageConfig) -> None:
        super().__init__()
        assert config.n_routed_experts is not None
        if (
            config.topk_method not in ("greedy", "group_limited_greedy", "noaux_tc")
            or config.scoring_func not in ("softmax", "sigmoid")
            or not config.num_experts_per_tok
        ):
            raise ModelLoadError(
                f"routing by topk_method {config.topk_method!r}, scoring_func "
                f"{config.scoring_func!r} and {config.num_experts_per_tok} experts for each token "
                "is not supported"
            )
        self.method, self.scoring = config.topk_method, config.scoring_func
        self.num_chosen = config.num_experts_per_tok
        self.num_groups = config.n_group or 1
        self.num_chosen_groups = config.topk_group or 1
        self.normalizes = config.norm_topk_prob and self.num_chosen > 1
        self.factor = config.routed_scaling_factor
        num_experts = config.n_routed_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        if self.method == "noaux_tc":
            # Small differences decide: it keeps its own type.
            correction = torch.zeros(num_experts, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", correction)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden` [T, size] -> experts int64 [T, k] and their shares, float32 at least."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits = linear(hidden.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        is_corrected = self.method == "noaux_tc"
        ranking = scores + self.e_score_correction_bias if is_corrected else scores
        if self.method != "greedy":
            ranking = self._within_groups(ranking)
        experts = ranking.topk(self.num_chosen, dim=-1).indices
        shares = (scores if is_corrected else ranking).gather(-1, experts)
        if self.normalizes:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return experts, shares * self.factor

    def _within_groups(self, ranking: Tensor) -> Tensor:
        """`ranking` [T, experts], 0 outside the chosen groups."""
        grouped = ranking.view(len(ranking), self.num_groups, -1)
        num_best = 2 if self.method == "noaux_tc" else 1
        best = grouped.topk(num_best, dim=-1).values.sum(-1)
        chosen = best.topk(self.num_chosen_groups, dim=-1).indices
        keep = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        return grouped.masked_fill(~keep[..., None], 0.0).flatten(-2)


class _Experts(nn.Module):
    """The routed experts of a layer, each an MLP."""

    def __init__(self, num_experts: int, size: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, size, inner))

    def forward(self, hidden: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """`hidden` [T, size], `experts` and `shares` [T, k] -> the sum of shares [T, size]."""
        if hidden.device.type != "cpu":
            return self._on_device(hidden, experts, shares)
        order = experts.flatten().argsort(stable=True)
        taken = hidden[order // experts.shape[1]]
        counts = torch.zeros(len(self.down_proj), dtype=torch.int64, device=hidden.device)
        counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(order))
        out = torch.empty_like(taken).index_copy(0, order, self._one_by_one(taken, counts))
        summed: Tensor = (out.view(*experts.shape, -1) * shares[..., None]).sum(1)
        return summed.to(hidden.dtype)

    def _on_device(self, hidden: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """Do the same where nothing may be read back."""
        weights = self.gate_up_proj.mT, self.down_proj.mT
        layout = lay_out_experts(experts, weights)
        gate, up = layout.linear(layout.take(hidden), weights[0]).chunk(2, dim=-1)
        out = layout.linear(silu(gate) * up, weights[1])
        return layout.combine(out, shares).to(hidden.dtype)

    def _one_by_one(self, taken: Tensor, counts: Tensor) -> Tensor:
        parts = []
        for expert, rows in enumerate(taken.split_with_sizes(counts.tolist())):
            if len(rows):
                gate, up = linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
                parts.append(linear(silu(gate) * up, self.down_proj[expert]))
        return torch.cat(parts)


class _MoE(nn.Module):
    def __init__(self, config: DeepseekLanguageConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.moe_intermediate_size
        assert config.n_routed_experts is not None
        self.gate = _Router(config)
        self.experts = _Experts(config.n_routed_experts, size, inner)
        self.shared_experts: nn.Module | None = None
        if config.n_shared_experts is not None:
            self.shared_experts = _MLP(size, inner * config.n_shared_experts)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.experts(hidden, *self.gate(hidden))
        return out if self.shared_experts is None else out + self.shared_experts(hidden)


class _Layer(nn.Module):
    def __init__(self, config: DeepseekLanguageConfig, index: int, score_factor: float) -> None:
        super().__init__()
        attention = _LatentAttention if config.use_mla else _PlainAttention
        self.self_attn = attention(config, score_factor)
        is_routed = (
            config.n_routed_experts is not None
            and index >= config.first_k_dense_replace
            and index % config.moe_layer_freq == 0
        )
        self.mlp: nn.Module = (
            _MoE(config) if is_routed else _MLP(config.hidden_size, config.intermediate_size)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, table: Table) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), table)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _Model(nn.Module):
    def __init__(self, config: DeepseekLanguageConfig, score_factor: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _Layer(config, index, score_factor) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekLanguageModel(nn.Module):
    """The decoder and its head. Raises ModelLoadError for settings that are not supported."""

    def __init__(self, config: DeepseekLanguageConfig) -> None:
        super().__init__()
        if config.hidden_act != "silu" or config.tie_word_embeddings:
            raise ModelLoadError("hidden_act must be silu, and tie_word_embeddings False")
        plain_size = config.hidden_size // config.num_attention_heads
        self.rotary = _Rotary(config.qk_rope_head_dim if config.use_mla else plain_size, config)
        self.model = _Model(config, self.rotary.score_factor)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, size] of embeddings [T, size] at `positions` [T]."""
        table = self.rotary(positions)
        for layer in self.model.layers:
            hidden = layer(hidden, table)
        normed: Tensor = self.model.norm(hidden)
        return normed

    def expert_weights(self) -> dict[str, Tensor]:
        """The checkpoint's name of each routed expert's weights -> the place they are copied to."""
        places = {}
        for index, layer in enumerate(self.model.layers):
            if not isinstance(layer.mlp, _MoE):
                continue
            experts = layer.mlp.experts
            for expert, (both, down) in enumerate(
                zip(experts.gate_up_proj, experts.down_proj, strict=True)
            ):
                path = f"model.layers.{index}.mlp.experts.{expert}"
                gate, up = both.chunk(2)
                places[f"{path}.gate_proj.weight"] = gate
                places[f"{path}.up_proj.weight"] = up
                places[f"{path}.down_proj.weight"] = down
        return places
