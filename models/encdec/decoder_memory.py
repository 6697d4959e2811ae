"""Rows that a decoder attends to, asked of HF's own module.

What reaches the decoder is what the module's forward gives it: encoder states, perhaps projected,
and the mask of those that count. It is run up to there, with something that only notes them in the
place of the decoder. So families need no line that says how their encoders take features, or which
rows a convolution over padding leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from aioengine.errors import EngineError
from aioengine.models.runtime.whole_pass import given_to

__all__ = ["memory_of", "shapes_and_masks"]

_FILLED = ("aten::new_ones", "aten::new_zeros", "aten::new_full")


def memory_of(model: Any, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The states [n, rows, dim] that the decoder is given, and a mask [n, rows], where those that
    count are True, if there is one.

    `features` [n, ...] as forward takes them. The module is left as it is: another thread may run
    its decoder meanwhile.
    """
    (size,) = {len(each) for each in features.values()}
    first = next(iter(features.values()))
    ids = torch.zeros(size, 1, dtype=torch.int64, device=first.device)
    _, given = given_to(model, model.get_decoder(), {**features, "decoder_input_ids": ids})
    states, mask = map(given.get, ("encoder_hidden_states", "encoder_attention_mask"))
    if isinstance(states, Tensor) and states.dim() == 3:
        return states, None if mask is None else mask != 0
    raise EngineError(f"forward of {type(model).__name__} gives its decoder nothing to attend to")


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
