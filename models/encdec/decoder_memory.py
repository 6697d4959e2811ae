"""Rows that a decoder attends to, asked of HF's own module.

What reaches the decoder is what the module's forward gives it: encoder states, perhaps projected,
and the mask of those that count. It is run up to there, with something that only notes them in the
place of the decoder. So families need no line that says how their encoders take features, or which
rows a convolution over padding leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from aioengine.errors import EngineError

__all__ = ["memory_of", "shapes_and_masks"]

_FILLED = ("aten::new_ones", "aten::new_zeros", "aten::new_full")


class _CalledError(Exception):
    """Ends a forward at its decoder, with what that was given."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__("the decoder was called")
        self.given = given


class _Listener(nn.Module):
    """Stands where the decoder does."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.config = decoder.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _CalledError(kwargs)


def memory_of(model: Any, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The states [n, rows, dim] that the decoder is given, and a mask [n, rows], where those that
    count are True, if there is one.

    `features` [n, ...] as forward takes them. The module is left as it is: another thread may run
    its decoder meanwhile.
    """
    whole = _standing_in(model, model.get_decoder())
    (size,) = {len(each) for each in features.values()}
    first = next(iter(features.values()))
    ids = torch.zeros(size, 1, dtype=torch.int64, device=first.device)
    try:
        whole(**features, decoder_input_ids=ids, use_cache=False)
    except _CalledError as error:
        states, mask = (
            error.given.get(name) for name in ("encoder_hidden_states", "encoder_attention_mask")
        )
        if isinstance(states, Tensor) and states.dim() == 3:
            return states, None if mask is None else mask != 0
    raise EngineError(f"forward of {type(model).__name__} gives its decoder nothing to attend to")


def _standing_in(model: Any, decoder: nn.Module) -> Any:
    """A model with the very modules of `model`, but for its decoder."""
    path = next(path for path, module in model.named_modules() if module is decoder)
    *owners, name = path.split(".")
    found = owner = _copied(model)
    for each in owners:
        # The copy is put into its owner's list before it becomes the owner.
        owner._modules[each] = owner = _copied(owner._modules[each])
    owner._modules[name] = _Listener(decoder)
    return found


def _copied(module: Any) -> Any:
    """The module with a list of children that may be changed; the children are the same."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


class _ShapesAndMasks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes what follows from sizes and masks; of weights and features the shapes alone.

    What has no data makes what has none, and only that does: a tensor that is filled with a number
    has data, whatever device it is made for.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name.startswith(_FILLED):
            args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
            kwargs["device"] = torch.device("cpu")
        elif any(each.is_meta for each in tensors):
            if name.endswith("_"):
                if not args[0].is_meta:
                    raise RuntimeError("features decide which rows count")
                return args[0]  # its shape stays
            args, kwargs = tree_map_only(Tensor, lambda each: each.to("meta"), (args, kwargs))
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
        elif "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def shapes_and_masks() -> AbstractContextManager[object]:
    """Enter a mode in which modules on the meta device run to what follows from sizes."""
    return _ShapesAndMasks()  # type: ignore[no-untyped-call]
