"""Linear layers that are given the same tensor, multiplied as one.

Which layers these are, the code of the class that calls them says: calls `self.a(x)`, `self.b(x)`
between which `x` is not set anew. So queries, keys and values of one attention, or the two halves
of a gated layer, are found without knowing a model's name, and those of a cross-attention, whose
keys come from elsewhere, are not taken together.

That reading decides what pays, not what is right. Whichever of the layers is called first computes
the outputs of all, and the others hand theirs out if they are called with that very tensor. With
another one they compute again. Each output is handed out once; what nobody has asked for goes when
the input goes.
"""

from __future__ import annotations

import ast
import textwrap
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from aioengine.kernels.linear import PackedLinear

__all__ = ["Merged", "joined", "shared_inputs"]

_Branch: TypeAlias = tuple[tuple[int, str], ...]
_Event: TypeAlias = tuple[tuple[int, int], str, str | None, _Branch]
"""Where it takes effect, a variable, the child called with it or None where it is set, and the
branches around the call."""


class Merged:
    """One matmul for several layers. `sizes`: of the outputs, one after the other."""

    def __init__(self, packed: PackedLinear, sizes: Sequence[int]) -> None:
        self.packed = packed
        self.sizes = list(sizes)
        # What was computed last: of which input, and the parts that were not handed out yet.
        self._last: tuple[weakref.ref[Tensor], list[Tensor | None]] | None = None

    def part(self, index: int, x: Tensor) -> Tensor:
        """Layer `index`'s output of `x` [..., in]: [..., sizes[index]], contiguous."""
        last = self._last
        if last is None or last[0]() is not x or last[1][index] is None:
            outputs: list[Tensor | None] = [*torch.split(self.packed(x), self.sizes, -1)]
            last = self._last = (weakref.ref(x, self._forget), outputs)
        found = last[1][index]
        assert found is not None
        last[1][index] = None
        if self._last is last and not any(each is not None for each in last[1]):
            self._last = None
        return found.contiguous()

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        last = self._last
        if last is not None and last[0] is gone:
            self._last = None


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of out, in] and bias [sum of out] of all; zeros for biases that some lack."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    weights: tuple[Tensor, ...] = tuple(layer.weight for layer in layers)
    weight = torch.cat(weights)
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases: list[Tensor] = [
        weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        for layer in layers
    ]
    return weight, torch.cat(biases)


def shared_inputs(source: str) -> list[list[str]]:
    """Names of the children that a class calls with one and the same variable, group by group.

    `source`: the class's own code.
    """
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = (group for function in functions for group in _groups(function))
    return [names for names in found if len(names) > 1]


def _groups(function: ast.FunctionDef) -> Iterator[list[str]]:
    """The names called with each value of each variable in each branch, in order."""
    current: dict[str, dict[_Branch, list[str]]] = {}
    for _, variable, name, branch in sorted(_events(function, ()), key=lambda event: event[0]):
        if name is None:
            yield from current.pop(variable, {}).values()
            continue
        names = current.setdefault(variable, {}).setdefault(branch, [])
        if name not in names:
            names.append(name)
    for branches in current.values():
        yield from branches.values()


def _events(node: ast.AST, branch: _Branch) -> Iterator[_Event]:
    yield from _event(node, branch)
    for field, child in ast.iter_fields(node):
        inner = branch
        if isinstance(node, ast.If | ast.For | ast.While | ast.Try) and isinstance(child, list):
            # What may be left out is taken together with its own kind only.
            inner = (*branch, (node.lineno, field))
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _events(each, inner)


def _event(node: ast.AST, branch: _Branch) -> Iterator[_Event]:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=name),
            args=[ast.Name(id=variable)],
            keywords=[],
        ):
            yield (node.lineno, node.col_offset), variable, name, branch
        case ast.Call(func=ast.Attribute(value=ast.Name(id=variable), attr=method)):
            if method.endswith("_"):  # changes it in place
                yield _end(node), variable, None, ()
        case ast.Assign(targets=targets):
            for target in targets:
                yield from _set(target, node)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield from _set(target, node)


def _set(target: ast.expr, statement: ast.stmt) -> Iterator[_Event]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield _end(statement), node.id, None, ()


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0
