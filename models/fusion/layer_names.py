"""Names under which modules hold the layers that can be fused, as one table.

The table says where it pays to look, not what is right: that two layers are given the same tensor
is checked at every call, and that a fused layer computes what it did is shown by a trial. Only a
forward that changes a tensor in place between two layers of a group must not be named. A class that
the table does not find may name its layers itself, in a class attribute `layer_names`:

    class GatedMLP(nn.Module):
        layer_names = LayerNames(merged=[("w1", "w3")])
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

__all__ = ["FeedForward", "LayerNames", "layer_names_of"]


class FeedForward(NamedTuple):
    """Names of the parts of `down(act(up(x)))`, or `down(act(gate(x)) * up(x))` with a gate."""

    down: str
    activation: str
    up: str
    gate: str | None = None


class LayerNames(NamedTuple):
    """Names of a module's children.

    `merged`: linear layers with the same input, in the order of their outputs.
    `feed_forward`: what the whole module consists of. `activated`: an activation, and the linear
    layer whose output it is applied to, in a module that does more.
    """

    merged: Sequence[tuple[str, ...]] = ()
    feed_forward: FeedForward | None = None
    activated: tuple[str, str] | None = None


_QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
_GATE_UP = (("gate_proj", "up_proj"), ("wi_0", "wi_1"), ("w1", "w3"))
_FEED_FORWARD = (
    FeedForward("down_proj", "act_fn", "up_proj", "gate_proj"),
    FeedForward("fc2", "activation_fn", "fc1"),
    FeedForward("fc2", "act_fn", "fc1"),
    FeedForward("fc2", "act", "fc1"),
    FeedForward("down_proj", "act_fn", "up_proj"),
    FeedForward("linear_fc2", "act_fn", "linear_fc1"),
    FeedForward("linear_2", "act", "linear_1"),
    FeedForward("linear2", "activation", "linear1"),
    FeedForward("linear_out", "act", "linear_in"),
    FeedForward("lin2", "act", "lin1"),
    FeedForward("dense_4h_to_h", "act", "dense_h_to_4h"),
)
_KEYS_FROM_ELSEWHERE = frozenset(
    {
        "context",
        "cross_attention_states",
        "encoder_hidden_states",
        "inputs_kv",
        "key_value_states",
        "shared_kv_states",
    }
)
"""Arguments of a forward whose keys and values are of another tensor than its queries."""


_OF_ONE_INPUT = frozenset({"self_attn", "SelfAttention"})
"""Names of attention modules whose class takes keys from elsewhere, and which are not given any."""


def layer_names_of(module: nn.Module, name: str = "") -> LayerNames:
    """Look up the names of the layers of `module`: its class's own, or the table's.

    `name`: what the module that holds it calls it.
    """
    own = getattr(type(module), "layer_names", None)
    if isinstance(own, LayerNames):
        return own
    found = next((names for names in _FEED_FORWARD if _has(module, names)), None)
    activated = None if found is None or found.gate else (found.activation, found.up)
    return LayerNames([*_merged(module, name)], found, activated)


def _merged(module: nn.Module, name: str) -> Iterator[tuple[str, ...]]:
    for names in _QUERY_KEY_VALUE:
        if _has(module, names[1:]):
            known = inspect.signature(type(module).forward).parameters
            is_one = name in _OF_ONE_INPUT or _KEYS_FROM_ELSEWHERE.isdisjoint(known)
            yield names if is_one else names[1:]
    yield from (names for names in _GATE_UP if _has(module, names))


def _has(module: nn.Module, names: Sequence[str | None]) -> bool:
    return all(callable(getattr(module, name, None)) for name in names if name is not None)
