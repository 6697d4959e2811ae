"""Faster layers in the place of a loaded model's own, each only where a trial shows the same.

A pass looks for modules of one kind, tries the faster form, and swaps it in. `fuse_layers` runs
them in the order of `PASSES`; a pass finds what the ones before it have made.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from aioengine.errors import ModelLoadError
from aioengine.models.fusion.decoder_plan import plan_decoder
from aioengine.models.fusion.encoder_attention import route_encoders
from aioengine.models.fusion.encoder_layers import plan_encoders
from aioengine.models.fusion.fused_mlp import cut_last_layer, fuse_activations
from aioengine.models.fusion.fused_norm import fuse_norms
from aioengine.models.fusion.packed_conv1d import pack_convolutions
from aioengine.models.fusion.packed_linear import pack_layers
from aioengine.models.fusion.rotary import fuse_rotary
from aioengine.models.fusion.routed_experts import (
    fuse_routed_layers,
    pack_expert_layers,
    route_experts,
)
from aioengine.models.fusion.tied_head import pack_tables
from aioengine.models.quantization.grouped_layers import unpacked_names

__all__ = ["DECODER_PASSES", "PASSES", "ROUTES", "fuse_layers"]

PASSES: tuple[Callable[[nn.Module], int], ...] = (
    pack_expert_layers,
    pack_layers,  # gives the matmuls that the passes after it fuse into
    pack_convolutions,  # the same for convolutions over time
    pack_tables,  # takes the heads that have the embeddings' weight
    fuse_activations,  # joins packed matmuls with activations and gates
    fuse_routed_layers,  # joins packed experts with their router, and with shared experts
    fuse_norms,
    fuse_rotary,
    route_encoders,
    plan_encoders,  # of layers that ask for that attention
)
"""What is done to a whole model on a CPU, in order. Each mutates it and returns how many modules it
took."""
DECODER_PASSES = (pack_layers, fuse_activations, fuse_norms)
"""Those of them that a decoder on an accelerator gains from."""
ROUTES = (route_encoders, route_experts)
"""Those that a whole model gains from there too: no kernel is chosen for a shape, nothing waits."""


def fuse_layers(model: nn.Module, decoder: nn.Module) -> None:
    """Run the passes over `model`, then run its `decoder`, which consists of them, from a plan.

    On an accelerator only the decoder is fused. Raises ModelLoadError where weights were rounded
    that no pass has packed.
    """
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        for each in PASSES:
            each(model)
    else:
        for each in DECODER_PASSES:
            each(decoder)
        for each in ROUTES:
            each(model)
    left = unpacked_names(model)
    if left:
        raise ModelLoadError(
            f"{type(model).__name__} computes with weights that were rounded in a way of its own "
            f"({', '.join(left[:5])}): leave quantization out"
        )
    plan_decoder(decoder)
    cut_last_layer(decoder)
