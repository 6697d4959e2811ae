"""transformers' routed experts: on a CPU packed, on a GPU in blocks, both by `kernels.experts`.

On a CPU transformers runs an expert after the other, each of them some operators. Here the weights
of a layer are packed as those of linear layers are, or in groups if they are known so, and all
experts are one operator for each of the two matmuls. Where a module is a router, such experts and
perhaps shared ones, it is one operator (`RoutedFeedForward`), which a decoder's plan takes. Either
is a layer whose own class does the same to random rows.

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

from aioengine.kernels.cpu.layer_operators import run_chosen_experts, run_experts
from aioengine.kernels.cpu.linear import PANEL, NativeLinear, native_way
from aioengine.kernels.experts import (
    ExpertRows,
    PackedExperts,
    TorchExperts,
    lay_out_experts,
    pack_experts,
    pack_grouped_experts,
)
from aioengine.kernels.layer_plan import ExpertsPlan, RoutedPlan
from aioengine.kernels.matmul import FORMULAS, NO_LIMIT, Activation, Gating, activated
from aioengine.models.fusion.fused_mlp import ActivatedFeedForward
from aioengine.models.fusion.swap import is_hooked, route, subclass, swap
from aioengine.models.fusion.trial import ROUNDINGS, agree, random_rows
from aioengine.models.quantization.grouped_layers import (
    expert_weights,
    forget,
    grouped_of,
    known_groups,
    stand_in,
)

__all__ = [
    "EXPERTS_NAME",
    "RoutedFeedForward",
    "fuse_routed_layers",
    "pack_expert_layers",
    "route_experts",
]

EXPERTS_NAME = "aioengine_blocks"
_EXPERTS_FIELD = "_experts_implementation_internal"
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_ROUTED = (torch.float32, torch.bfloat16)
"""Dtypes of layers that are one operator."""
_TRIAL_ROWS = 8
_ROUTER_ROWS = 128
_WIDER = 8
_LEAST_SHARE = 1e-6
"""An error of a share that says nothing."""
_LEAST_ERROR = 1e-5
_FAR = 1e6
"""An output that is beyond any limit of a gating."""

_Matmul: TypeAlias = PackedExperts | TorchExperts


def pack_expert_layers(root: nn.Module) -> int:
    """Pack the weights of the expert layers of `root` that are on a CPU; how many layers."""
    tried: dict[Hashable, bool] = {}
    with torch.no_grad():
        count = sum(_pack(module, tried) for module in list(root.modules()))
    # PyTorch's matmul of groups, which transformers asks for elsewhere, knows fewer dtypes.
    others = [
        module
        for module in root.modules()
        if any(each.dtype not in _GROUPED for each in expert_weights(module).values())
    ]
    route(others, "eager", _EXPERTS_FIELD)
    return count


def _pack(module: Any, tried: dict[Hashable, bool]) -> bool:
    weights = expert_weights(module)
    if not weights or hasattr(module, "aioengine_experts") or is_hooked(module):
        return False
    known = frozenset(known_groups(module))
    key = type(module), module.down_proj.dtype, known
    if not tried.get(key, True):
        return False
    name = _up_name(module)
    can_gate = not module.has_gate or weights[name].shape[1] % (2 * PANEL) == 0
    known_gate = _gate(module) if can_gate else None
    is_mixed = module.has_gate and not module.is_concatenated and known_gate is not None
    up = _matmul(module, name, weights[name], is_mixed=is_mixed)
    down = _matmul(module, "down_proj", weights["down_proj"])
    if up is None or down is None:
        return False
    activation, gating = known_gate or (None, NO_LIMIT)
    run = partial(_run_packed, up=up, down=down, activation=activation, gating=gating)
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


def _matmul(module: Any, name: str, weight: Tensor, *, is_mixed: bool = False) -> _Matmul | None:
    """The matmul of a parameter, packed. `is_mixed`: gates and what they multiply take turns in its
    outputs, and gates are to come first."""
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    grouped, num_experts = grouped_of(module, name), len(weight)
    if is_mixed:
        pairs = torch.arange(num_experts * weight.shape[1]).view(num_experts, -1, 2)
        order = pairs.mT.flatten()
        bias = None if bias is None else bias.flatten()[order].view_as(bias)
        if grouped is None:
            weight = torch.cat([weight[:, ::2], weight[:, 1::2]], 1)
        else:
            grouped = grouped.taken(order)
    if grouped is not None:
        return pack_grouped_experts(grouped, bias, num_experts)
    return pack_experts(weight, bias)


def _gate(module: Any) -> tuple[Activation, Gating] | None:
    """The activation of a layer that the first matmul can apply, and how it gates; None: it cannot.

    A gating is asked what it makes of a gate of 1, and outputs of 0 and beyond any limit.
    """
    x = torch.linspace(-12, 12, 1001, dtype=torch.float32)
    if not module.has_gate:
        for activation, formula in FORMULAS.items():
            if agree(lambda: module.act_fn(x.clone()), partial(formula, x)):
                return activation, NO_LIMIT
        return None
    one = torch.ones(1, dtype=torch.float64)
    try:
        least, middle, most = (float(_gated(module, one, one * y)) for y in (-_FAR, 0, _FAR))
    except Exception:
        return None  # it wants something else
    for activation, formula in FORMULAS.items():
        factor = float(formula(one))
        limit, shift = (most - least) / 2 / factor, middle / factor
        gating = NO_LIMIT
        if limit < 0.9 * _FAR:
            gating = Gating(*torch.tensor([limit, shift], dtype=torch.float32).tolist())
        gates = torch.cat([x, gating.limit * torch.linspace(-2, 2, 999, dtype=torch.float32)])
        outputs = gates.flip(0).roll(1)
        both = torch.cat([gates, outputs])
        if agree(
            partial(_gated, module, gates, outputs),
            partial(activated, both, activation, True, gating),
        ):
            return activation, gating
    return None


def _gated(module: Any, gates: Tensor, outputs: Tensor) -> Tensor:
    """Apply a layer's gating to `gates` [n] and the `outputs` [n] that they multiply."""
    is_joined = module.is_concatenated
    both = torch.cat([gates, outputs]) if is_joined else torch.stack([gates, outputs], 1).flatten()
    found: Tensor = module._apply_gate(both[None])[0]
    return found


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
    gating: Gating,
) -> Tensor:
    """See `_forward`."""
    has_norm = getattr(module, "has_post_expert_norm", False)
    is_known = hidden_states.dtype in _ROUTED and not has_norm
    if is_known and activation is not None and not isinstance(up, TorchExperts):
        assert not isinstance(down, TorchExperts)
        plan = ExpertsPlan(
            up=up, activation=activation, is_gated=module.has_gate, gating=gating, down=down
        )
        chosen, shares = top_k_index.long().contiguous(), top_k_weights.float().contiguous()
        return run_chosen_experts(plan, hidden_states.contiguous(), chosen, shares)
    layout = ExpertRows.of(top_k_index, module.num_experts)
    rows = layout.take(hidden_states)
    if activation is not None:
        rows = up(rows, layout.ends, activation, module.has_gate, gating)
    else:
        rows = up(rows, layout.ends)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = down(rows.contiguous(), layout.ends)
    if has_norm:
        rows = module.post_expert_norm(rows)
    return layout.combine(rows, top_k_weights).to(hidden_states.dtype)


class RoutedFeedForward(nn.Module):
    """Made of a module by `fuse_routed_layers`, never by itself."""

    routed: RoutedPlan
    num_more: int
    """What its own class gives beside the result: decoder layers pass it by, and None is there."""

    def forward(self, hidden_states: Tensor) -> Any:
        """`hidden_states` [..., dim] -> [..., dim], alone or as the first of several."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        found = run_experts(self.routed, rows).view(hidden_states.shape)
        return (found, *[None] * self.num_more) if self.num_more else found


class PackedRouter(nn.Module):
    """Made of a router by `fuse_routed_layers`, never by itself."""

    packed: NativeLinear
    top_k: int
    is_normalized: bool

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden_states` [..., dim] -> logits [T, E], shares and int64 experts [T, k]."""
        return _routes(self.packed, self.top_k, self.is_normalized, hidden_states)


def _routes(
    matmul: NativeLinear, num_chosen: int, is_normalized: bool, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `PackedRouter.forward`."""
    logits = matmul(x.reshape(-1, x.shape[-1]))
    scores = logits.softmax(-1, dtype=torch.float32)
    shares, chosen = scores.topk(num_chosen, dim=-1)
    if is_normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    return logits, shares.to(logits.dtype), chosen


def fuse_routed_layers(root: nn.Module) -> int:
    """Fuse the feed-forward layers of `root` that are packed experts and their router, in place.

    Of other layers with packed experts the router alone, whose logits PyTorch rounds by the number
    of rows. Returns how many layers were fused. Each is tried: layers of one class may differ.
    """
    with torch.no_grad():
        return sum(map(_fuse, list(root.modules())))


def _fuse(module: nn.Module) -> bool:
    children: list[Any] = list(module.children())
    experts = next((each for each in children if hasattr(each, "aioengine_experts")), None)
    if experts is None or any(map(is_hooked, (module, *children))):
        return False
    routers = [each for each in children if _is_router(each, experts.num_experts)]
    if len(routers) != 1:
        return False
    (router,) = routers
    is_normalized = _normalization(router)
    matmul = native_way(router.weight, router._parameters.get("bias"))
    if matmul is None or is_normalized is None:
        return False
    plan = None if _has_own(module) else _plan(children, router, experts, matmul, is_normalized)
    num_more = None if plan is None else _does_the_same(module, router, plan)
    if num_more is not None:
        swap(module, RoutedFeedForward, routed=plan, num_more=num_more)
        return True
    x = random_rows(_TRIAL_ROWS, router.weight.shape[1], like=router.weight)
    if agree(lambda: matmul(x), lambda: router(x)[0]):
        swap(router, PackedRouter, packed=matmul, is_normalized=is_normalized)
    return False


def _is_router(module: Any, num_experts: int) -> bool:
    """Return whether a module may be a router whose logits are one matmul."""
    weight, num_chosen = module._parameters.get("weight"), getattr(module, "top_k", None)
    if weight is None or weight.dtype not in _ROUTED or not isinstance(num_chosen, int):
        return False
    is_one = weight.dim() == 2 and len(weight) == num_experts and not [*module.children()]
    return is_one and not _has_own(module, "weight", "bias") and 0 < num_chosen <= num_experts


def _has_own(module: nn.Module, *names: str) -> bool:
    """Return whether a module itself has other parameters or buffers than these."""
    own = {**module._parameters, **module._buffers}
    return any(value is not None for name, value in own.items() if name not in names)


def _plan(
    children: list[Any], router: Any, experts: Any, matmul: NativeLinear, is_normalized: bool
) -> RoutedPlan | None:
    """Guess the plan of a layer, if it holds such parts and nothing else."""
    run = experts.aioengine_experts.keywords
    shared = [each for each in children if each is not router and each is not experts]
    plans = [
        each.plan(NativeLinear) if isinstance(each, ActivatedFeedForward) else None
        for each in shared
    ]
    is_whole = isinstance(run["up"], PackedExperts) and isinstance(run["down"], PackedExperts)
    if not is_whole or run["activation"] is None or None in plans or len(plans) > 1:
        return None
    if getattr(experts, "has_post_expert_norm", False):
        return None
    return RoutedPlan(
        router=matmul,
        num_chosen=router.top_k,
        is_normalized=is_normalized,
        **run,
        is_gated=bool(experts.has_gate),
        shared=plans[0] if plans else None,
    )


def _normalization(router: Any) -> bool | None:
    """Find whether a router's shares are normalized; None where they are not those of a softmax,
    or its experts not those with the largest logits.

    Its own logits say what both have to be, so that rounding in its matmul does not count.
    """
    x = random_rows(_ROUTER_ROWS, router.weight.shape[1], like=router.weight)
    x[1::2] *= _WIDER  # small logits do not tell a softmax from others
    try:
        logits, shares, chosen = router(x)
        wide, found = logits.float(), shares.float()
        best = wide.topk(router.top_k, dim=-1).values
        is_best = torch.equal(wide.gather(-1, chosen).sort(-1, descending=True).values, best)
    except Exception:
        return None  # it wants other arguments, or gives something else
    if not is_best or logits.dtype != router.weight.dtype or found.shape != best.shape:
        return None
    of_all = wide.softmax(-1).gather(-1, chosen)
    errors = {}
    for is_normalized in (True, False):
        wanted = of_all / of_all.sum(-1, keepdim=True) if is_normalized else of_all
        errors[is_normalized] = float(((found - wanted).abs() - _LEAST_SHARE).div(wanted).max())
    better = errors[True] <= errors[False]
    return better if errors[better] <= 4 * torch.finfo(shares.dtype).eps else None


def _does_the_same(module: Any, router: Any, plan: RoutedPlan) -> int | None:
    """Count the results of a layer beside the one that a plan comes to; None where it does not.

    On rows whose experts no rounding changes, and by the norm of the difference: a factor of a few
    hundredths is no rounding of many numbers.
    """
    x = random_rows(_ROUTER_ROWS, router.weight.shape[1], like=router.weight)
    logits = router(x)[0].float().sort(-1, descending=True).values
    if router.top_k < logits.shape[-1]:
        margins = logits[:, router.top_k - 1] - logits[:, router.top_k]
        x = x[margins.argsort(descending=True)[:_TRIAL_ROWS]].contiguous()
    try:
        given = module(x[None])
        wanted, *more = given if isinstance(given, tuple) else (given,)
        if not isinstance(wanted, Tensor) or wanted.shape != x[None].shape:
            return None
        found, wanted = run_experts(plan, x).double(), wanted[0].double()
    except Exception:
        return None
    bound = max(2 * torch.finfo(x.dtype).eps, _LEAST_ERROR)
    return len(more) if (found - wanted).norm() <= bound * wanted.norm() else None


def route_experts(root: nn.Module) -> int:
    """Make the expert layers of `root` that are on a GPU ask for ours; how many did."""
    found = [
        module
        for module in root.modules()
        if any(each.device.type == "cuda" for each in expert_weights(module).values())
    ]
    route(found, EXPERTS_NAME, _EXPERTS_FIELD)
    return len(found)


def _run_on_device(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """See `_forward`."""
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    stored = (getattr(module, name) for name in names)
    up, down = (each if module.is_transposed else each.mT for each in stored)
    biases = (getattr(module, f"{name}_bias") if module.has_bias else None for name in names)
    up_bias, down_bias = biases
    layout = lay_out_experts(top_k_index, (up, down))
    rows = layout.linear(layout.take(hidden_states), up, up_bias)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = layout.linear(rows, down, down_bias)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return layout.combine(rows, top_k_weights).to(hidden_states.dtype)


moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _run_on_device)
