"""transformers' routed experts: on a CPU packed, on a GPU in blocks, both by `kernels.experts`.

On a CPU transformers runs an expert after the other, each of them some operators. Here the weights
of a layer are packed as those of linear layers are, or in groups if they are known so, and all
experts are one operator for each of the two matmuls. The layer is one whose own class does the
same to random rows.

On a GPU transformers looks a function up by name at every call. Its own read how many rows each
expert gets back to the host, or copy each row's weights. One of ours is registered, and modules are
made to ask for it by a copy of their config, as for attention.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from aioengine.kernels.experts import (
    ExpertBlocks,
    ExpertRows,
    PackedExperts,
    TorchExperts,
    pack_experts,
    pack_grouped_experts,
)
from aioengine.kernels.matmul import FORMULAS, Activation
from aioengine.models.fusion.swap import is_hooked, route, subclass, swap
from aioengine.models.fusion.trial import ROUNDINGS, agree, random_rows
from aioengine.models.quantization.grouped_layers import (
    expert_weights,
    forget,
    grouped_of,
    known_groups,
    stand_in,
)

__all__ = ["EXPERTS_NAME", "pack_expert_layers", "route_experts"]

EXPERTS_NAME = "aioengine_blocks"
_TRIAL_ROWS = 8
_USUAL_GATE = getattr(moe, "_default_apply_gate", None)
"""The gating of classes that have none of their own, where it is found."""


_Matmul: TypeAlias = PackedExperts | TorchExperts


def pack_expert_layers(root: nn.Module) -> int:
    """Pack the weights of the expert layers of `root` that are on a CPU; how many layers."""
    tried: dict[Hashable, bool] = {}
    with torch.no_grad():
        return sum(_pack(module, tried) for module in list(root.modules()))


def _pack(module: Any, tried: dict[Hashable, bool]) -> bool:
    weights = expert_weights(module)
    if not weights or hasattr(module, "aioengine_experts") or is_hooked(module):
        return False
    known = frozenset(known_groups(module))
    key = type(module), module.down_proj.dtype, known
    if not tried.get(key, True):
        return False
    up, down = (_matmul(module, name, weights[name]) for name in (_up_name(module), "down_proj"))
    if up is None or down is None:
        return False
    activation = _activation(module) if up.can_gate or not module.has_gate else None
    run = partial(_run_packed, up=up, down=down, activation=activation)
    # What is in groups is held by the trial at load: inputs may be rounded, plain weights gone.
    if key not in tried:
        tried[key] = bool(known) or _agrees(module, run, weights)
    if not tried[key]:
        return False
    swap(module, subclass(type(module), _forward), aioengine_experts=run)
    for name in weights:
        setattr(module, name, stand_in(getattr(module, name)))
    forget(module)
    return True


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _matmul(module: Any, name: str, weight: Tensor) -> _Matmul | None:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    grouped = grouped_of(module, name)
    if grouped is not None:
        return pack_grouped_experts(grouped, bias, len(weight))
    return pack_experts(weight, bias)


def _activation(module: Any) -> Activation | None:
    """The activation of a layer that the first matmul can apply, and gate by; None: it cannot."""
    if module.has_gate and (
        not module.is_concatenated or type(module)._apply_gate is not _USUAL_GATE
    ):
        return None
    x = torch.linspace(-12, 12, 1001, dtype=torch.float32)
    for activation, formula in FORMULAS.items():
        if agree(lambda: module.act_fn(x.clone()), partial(formula, x)):
            return activation
    return None


def _agrees(module: Any, run: Any, weights: dict[str, Tensor]) -> bool:
    """Return whether a layer does to random rows what its own class does."""
    num_experts, _, width = weights[_up_name(module)].shape
    rows = random_rows(_TRIAL_ROWS, width, like=module.down_proj)
    scores = random_rows(_TRIAL_ROWS, num_experts, seed=1).softmax(-1)
    shares, chosen = scores.topk(min(2, num_experts), dim=-1)
    given = rows, chosen, shares.to(rows.dtype)
    return agree(lambda: run(module, *given), lambda: module(*given), roundings=2 * ROUNDINGS)


def _forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' signature: `hidden_states` [T, size], the others [T, k] -> [T, size]."""
    found: Tensor = module.aioengine_experts(module, hidden_states, top_k_index, top_k_weights)
    return found


def _run_packed(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    up: _Matmul,
    down: _Matmul,
    activation: Activation | None,
) -> Tensor:
    """See `_forward`."""
    layout = ExpertRows.of(top_k_index, module.num_experts)
    rows = layout.take(hidden_states)
    if activation is not None:
        rows = up(rows, layout.ends, activation, module.has_gate)
    else:
        rows = up(rows, layout.ends)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = down(rows.contiguous(), layout.ends)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return layout.combine(rows, top_k_weights).to(hidden_states.dtype)


def route_experts(root: nn.Module) -> int:
    """Make the expert layers of `root` that are on a GPU ask for ours; how many did."""
    found = [
        module
        for module in root.modules()
        if any(each.device.type == "cuda" for each in expert_weights(module).values())
    ]
    route(found, EXPERTS_NAME, "_experts_implementation_internal")
    return len(found)


def _run_in_blocks(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """See `_forward`."""

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return blocks.linear(rows, weight if module.is_transposed else weight.mT, bias)

    blocks = ExpertBlocks.of(top_k_index, module.num_experts)
    rows = blocks.take(hidden_states)
    if module.has_gate:
        rows = module._apply_gate(linear(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(linear(rows, "up_proj"))
    rows = linear(rows, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return blocks.combine(rows, top_k_weights).to(hidden_states.dtype)


moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _run_in_blocks)
