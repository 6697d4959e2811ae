"""The parts of a planned decoder from token ids to logits, for steps without Python in between.

What is found here is a guess by what the modules are; whether it computes what the model does is
for a trial to show (`aioengine.execution.decode_steps`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aioengine.kernels.cpu.decode_queue import DecodeParts
from aioengine.kernels.cpu.layer_operators import NativeOperators
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.layer_plan import Angles, DecoderPlan
from aioengine.models.fusion.packed_linear import Packed
from aioengine.models.fusion.tied_head import PackedRows

__all__ = ["find_decode_parts"]

_SCALES = ("embed_scale", "scalar_embed_scale")
"""What transformers' embeddings call the number that they multiply their rows by."""


def find_decode_parts(
    model: Any, plan: DecoderPlan, operators: object
) -> tuple[NativeOperators, DecodeParts] | None:
    """The operators and parts of transformers' `model`, whose decoder has this plan."""
    table, head = _table(model.get_input_embeddings()), _head(model.get_output_embeddings())
    if not isinstance(operators, NativeOperators) or operators.whole is None:
        return None
    if table is None or head is None:
        return None
    rows, scale = table
    weight = model.get_input_embeddings().weight.detach()

    def make_angles(positions: Tensor) -> list[Angles]:
        found = plan.make_angles(weight.new_empty(len(positions), weight.shape[1]), positions)
        return [(cos.to(weight.dtype), sin.to(weight.dtype)) for cos, sin in found]

    return operators, DecodeParts(
        plan=operators.whole,
        table=rows,
        scale=scale,
        places=plan.places,
        head=head,
        make_angles=make_angles,
        cap=_cap(model.config),
    )


def _cap(config: Any) -> float:
    """The soft cap of logits, 0 for none."""
    found = getattr(config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return float(found or 0)


def _table(embedding: nn.Module | None) -> tuple[Tensor | NativeLinear, float] | None:
    """Rows [vocab, hidden], plain or packed, and what they are multiplied by."""
    if not isinstance(embedding, nn.Embedding):
        return None
    weight = embedding.weight.detach()
    rows: object = weight
    if isinstance(embedding, PackedRows):
        rows = embedding.packed
    elif not weight.is_contiguous():
        return None
    if not isinstance(rows, Tensor | NativeLinear):
        return None
    scale: object = next(
        (getattr(embedding, name) for name in _SCALES if hasattr(embedding, name)), 1.0
    )
    number = scale if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
    return (rows, float(number.to(weight.dtype))) if number.numel() == 1 else None


def _head(module: nn.Module | None) -> NativeLinear | None:
    if isinstance(module, Packed) and isinstance(module.packed, NativeLinear):
        return module.packed
    return None
