"""transformers' routed experts on a GPU, by `kernels.experts`.

transformers looks a function up by name at every call. Its own read how many rows each expert gets
back to the host, or copy each row's weights. One of ours is registered, and modules are made to ask
for it by a copy of their config, as for attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from aioengine.kernels.experts import ExpertBlocks
from aioengine.models.fusion.swap import route

__all__ = ["EXPERTS_NAME", "route_experts"]

EXPERTS_NAME = "aioengine_blocks"


def route_experts(root: nn.Module) -> int:
    """Make the expert layers of `root` that are on a GPU ask for ours; how many did."""
    found = [module for module in root.modules() if _is_routed(module)]
    route(found, EXPERTS_NAME, "_experts_implementation_internal")
    return len(found)


def _is_routed(module: nn.Module) -> bool:
    down = module._parameters.get("down_proj")
    return (
        isinstance(down, Tensor)
        and down.device.type == "cuda"
        and getattr(getattr(module, "config", None), "_experts_implementation", None) is not None
        and hasattr(module, "is_transposed")
    )


def _run_in_blocks(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' signature: `hidden_states` [T, size], the others [T, k] -> [T, size]."""

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


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _run_in_blocks)
