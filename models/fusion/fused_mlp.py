"""Fuse a feed-forward layer's activation and gating into its first matmul.

`down(act(up(x)))` and `down(act(gate(x)) * up(x))` are found by the code of a class, which must do
nothing else, and the activation by a trial. So is the whole, for one layer of each class: what
becomes of random rows must be what the layer itself makes of them. Between the two matmuls nothing
is written then but what the second one reads.

In a class that does more, as a layer with its feed-forward part written out, `act(up(x))` is taken
where it stands for the only use of either.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from aioengine.kernels.cpu.linear import Activation, NativeLinear
from aioengine.models.fusion.packed_linear import Packed, PackedPart, source_of

__all__ = [
    "ActivatedFeedForward",
    "ActivatedLinear",
    "activated_child",
    "feed_forward",
    "fuse_activations",
]

_FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.GELU: gelu,
}
_ROUNDINGS = 8
"""Units in the last place of the largest output that two ways of computing may be apart."""


class FeedForward(NamedTuple):
    """Names of a class's children. `gate`: what is activated then, or None where `up` is."""

    down: str
    activation: str
    up: str
    gate: str | None


class ActivatedFeedForward(nn.Module):
    """Made of a module by `fuse_activations`, never by itself."""

    fused: tuple[FeedForward, NativeLinear, Activation]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., dim] -> [..., dim]."""
        return _fused_forward(self, *self.fused, hidden_states)


class ActivatedLinear(nn.Linear):
    """A packed layer with the activation that its caller applies to it, made by the same."""

    activated: tuple[NativeLinear, Activation]

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        product, activation = self.activated
        return product(input, activation)


def fuse_activations(model: nn.Module) -> int:
    """Fuse the feed-forward layers of `model` whose matmuls are ours, in place; how many were."""
    with torch.no_grad():
        return _fuse_layers(model) + _fuse_parts(model)


def _fuse_layers(model: nn.Module) -> int:
    """Fuse those that are modules of their own."""
    count = 0
    found: dict[type[nn.Module], FeedForward | None] = {}
    tried: dict[tuple[type[nn.Module], Activation], bool] = {}
    for module in list(model.modules()):
        kind = type(module)
        if kind not in found:
            found[kind] = feed_forward(kind)
        names = found[kind]
        product = None if names is None else _product(module, names)
        if names is None or product is None:
            continue
        activation = _activation(getattr(module, names.activation))
        if activation is None:
            continue
        if (kind, activation) not in tried:
            tried[kind, activation] = _is_the_same(module, names, product, activation)
        if not tried[kind, activation]:
            continue
        module.__class__ = ActivatedFeedForward
        setattr(module, "fused", (names, product, activation))  # noqa: B010 - as in fused.py
        count += 1
    return count


def _fuse_parts(model: nn.Module) -> int:
    """Fuse those that are written out in another module's code."""
    count = 0
    found: dict[type[nn.Module], tuple[str, str] | None] = {}
    parents = Counter(id(child) for module in model.modules() for child in module.children())
    for module in list(model.modules()):
        kind = type(module)
        if kind not in found:
            found[kind] = activated_child(kind)
        match found[kind]:
            case str(name), str(up):
                product = _product(module, FeedForward("", name, up, None))
            case _:
                continue
        if product is None or parents[id(getattr(module, up))] > 1:
            continue
        activation = _activation(getattr(module, name))
        if activation is None:
            continue
        layer = getattr(module, up)
        layer.__class__ = ActivatedLinear
        layer.activated = (product, activation)
        setattr(module, name, nn.Identity())
        count += 1
    return count


def activated_child(kind: type[nn.Module]) -> tuple[str, str] | None:
    """An activation and the layer it is applied to, if a class uses neither for anything else."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source_of(kind) or ""))))
    uses = Counter(
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, ast.Load)
    )
    for node in nodes:
        name, inner = _called(node)
        up, argument = _called(inner)
        if isinstance(argument, ast.Name) and uses[name] == uses[up] == 1:
            return name, up
    return None


def feed_forward(kind: type[nn.Module]) -> FeedForward | None:
    """Read what a class computes, if its forward says that and no more."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    match tree.body:
        case [ast.FunctionDef(args=ast.arguments(args=[_, ast.arg(arg=given)])) as function]:
            result = _result(function)
            return None if result is None else _named(result, given)
    return None


def _named(result: ast.expr, given: str) -> FeedForward | None:
    down, inner = _called(result)
    gate: str | None
    match inner:
        case ast.BinOp(op=ast.Mult(), left=activated, right=others):
            activation, first = _called(activated)
            gate, x = _called(first)
            up, y = _called(others)
        case _:
            activation, first = _called(inner)
            up, x = _called(first)
            gate, y = None, x
    for argument in (x, y):
        if not (isinstance(argument, ast.Name) and argument.id == given):
            return None
    return FeedForward(down, activation, up, gate)


def _called(node: ast.AST | None) -> tuple[str, ast.expr | None]:
    """The child and the argument of `self.child(argument)`; of anything else "" and None."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[argument], keywords=[]
        ):
            return name, argument
    return "", None


class _Substitution(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def _result(function: ast.FunctionDef) -> ast.expr | None:
    """Resolve what is returned, with variables replaced by what they were set to; None for other
    code."""
    values: dict[str, ast.expr] = {}
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _Substitution(values).visit(value)
            case ast.Return(value=ast.expr() as value):
                found: ast.expr = _Substitution(values).visit(value)
                return found
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case _:
                return None
    return None


def _product(module: nn.Module, names: FeedForward) -> NativeLinear | None:
    """The matmul of `up`, or of `gate` and `up` together, if it is packed, ours and not hooked."""
    up = getattr(module, names.up, None)
    gate = up if names.gate is None else getattr(module, names.gate, None)
    if any(
        isinstance(each, nn.Module) and (each._forward_hooks or each._forward_pre_hooks)
        for each in (up, gate, getattr(module, names.activation, None))
    ):
        return None
    if names.gate is None:
        packed = up.packed if isinstance(up, Packed) else None
        return packed if isinstance(packed, NativeLinear) else None
    if not isinstance(up, PackedPart) or not isinstance(gate, PackedPart):
        return None
    merged = gate.merged
    if merged is not up.merged or (gate.index, up.index) != (0, 1):
        return None
    product = merged.packed
    is_halved = len(merged.sizes) == 2 and merged.sizes[0] == merged.sizes[1]
    return product if is_halved and isinstance(product, NativeLinear) and product.can_gate else None


def _activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return None  # a norm, say
    x = torch.linspace(-12, 12, 1001)
    try:
        found = function(x.clone())
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    for activation, formula in _FORMULAS.items():
        if torch.allclose(found, formula(x), rtol=1e-5, atol=1e-6):
            return activation
    return None


def _fused_forward(
    module: nn.Module, names: FeedForward, product: NativeLinear, activation: Activation, x: Tensor
) -> Tensor:
    inner = product(x, activation, is_gated=names.gate is not None)
    found: Tensor = getattr(module, names.down)(inner)
    return found


def _is_the_same(
    module: nn.Module, names: FeedForward, product: NativeLinear, activation: Activation
) -> bool:
    up: nn.Linear = getattr(module, names.up)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, up.in_features, generator=generator).to(up.weight.dtype)
    wanted = module(x).double()
    found = _fused_forward(module, names, product, activation, x).double()
    error = (found - wanted).abs().max()
    return bool(error <= _ROUNDINGS * torch.finfo(x.dtype).eps * wanted.abs().max())
