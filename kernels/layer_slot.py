"""The seam between attention layers and kernels: what a layer needs in a step hangs on its module.

A slot knows a layer's pages and points to its own model's `StepHolder`, which has the step's
metadata. Nothing is kept in this file, so several models run side by side in one process, each in
its thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from aioengine.kernels.attention import AttentionArgs, AttentionBackend, AttentionMetadata

__all__ = ["LayerSlot", "Slot", "StepContext", "StepHolder", "attach_slot", "slot_of"]

_SLOT = "_aioengine_slot"


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """Context that the attention layers of one model need during one step.

    `metadata`: one for each KV group. `caches`: (key cache, value cache) of each layer. `backend`:
    the kernels that the engine chose. `positions` [T]: of the step's tokens. `memory` [R, dim]:
    what cross-attention layers are given, None where there are none. `wanted` [n]: rows that are
    read after the last layer, None for all. `states`: those of layers that keep one, as these know
    them.
    """

    metadata: Sequence[AttentionMetadata]
    caches: Sequence[tuple[Tensor, Tensor]]
    backend: AttentionBackend
    positions: Tensor | None = None
    memory: Tensor | None = None
    wanted: Tensor | None = None
    states: Any = None


class StepHolder:
    """One model's current step, shared by the slots of its layers."""

    def __init__(self) -> None:
        self.current: StepContext | None = None

    @contextmanager
    def hold(self, context: StepContext) -> Iterator[None]:
        """Make `context` the current step inside the block, however it is left."""
        assert self.current is None, "a step is running already"
        self.current = context
        try:
            yield
        finally:
            self.current = None


class Slot(Protocol):
    """Interface of what may be attached to an attention module: it takes the module's calls.

    `query` [T, Hq, Dk], `key` [T, Hkv, Dk], `value` [T, Hkv, Dv] -> [T, Hq, Dv].
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerSlot:
    """One attention layer's place: `layer` among the model's layers, its KV `group`.

    `stores`: False for a layer that reads what another has written in the same step.
    `is_last`: no other layer of attention comes after it. `distance_bias`: see `AttentionArgs`.
    """

    layer: int
    group: int
    holder: StepHolder
    distance_bias: Tensor | None = None
    stores: bool = True
    is_last: bool = False

    @property
    def wanted(self) -> Tensor | None:
        """The rows that are read of what comes after this layer, None for all."""
        step = self.holder.current
        return step.wanted if self.is_last and step is not None else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Write this step's keys and values into the layer's pages, then attend over them.

        Where the pages are another layer's, that has run before and has written the same.
        Where a layer of cross-attention has nothing new, what it is given stands for nothing.
        Tokens that see nothing of an encoder's are given zeros.
        """
        step = self.holder.current
        assert step is not None, "an attention layer was called outside a step"
        meta = step.metadata[self.group]
        if self.distance_bias is not None:
            args = args._replace(distance_bias=self.distance_bias)
        new = (key, value) if self.stores and meta.slot_blocks.shape[0] else None
        pages = step.caches[self.layer]
        if meta.readers is None:
            return step.backend.attend(query, pages, meta, args, new=new)
        found = query.new_zeros(*query.shape[:2], value.shape[-1])
        if meta.query_lens:
            reading = query[meta.readers]
            found[meta.readers] = step.backend.attend(reading, pages, meta, args, new=new)
        elif new is not None:
            step.backend.write_kv(new, pages, meta)
        return found


def attach_slot(module: nn.Module, slot: Slot | None) -> None:
    """Let `slot` take the attention calls of `module`, None nobody; mutates the module."""
    setattr(module, _SLOT, slot)


def slot_of(module: nn.Module) -> Slot | None:
    """The slot that takes the attention calls of `module`."""
    found: Slot | None = getattr(module, _SLOT, None)
    return found
