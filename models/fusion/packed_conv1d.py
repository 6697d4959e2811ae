"""Conv1d as a GEMM over overlapping rows, without an im2col copy.

The inputs under a kernel are `kernel * channels` numbers that lie side by side where a sequence is
laid out step by step, those of the next output `stride * channels` further on: rows of a matrix,
which overlap and so take no memory. What comes out lies step by step too, and whatever turns it
into rows of embeddings afterwards need not copy it; PyTorch's convolutions lay it out channel by
channel, and every operator after them goes through memory in leaps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aioengine.kernels.linear import PackedLinear, pack_linear
from aioengine.models.fusion.packed_linear import Pack, leave_empty, own_layers

__all__ = ["PackedConv1d", "pack_convolutions"]

_MULTIPLE = 32
"""What the inputs of a matmul are rounded up to, by weights of zero: some kernels ask for it."""


class PackedConv1d(nn.Conv1d):
    """A convolution whose weight is packed. Made of one by `pack_convolutions`, never by itself."""

    packed: PackedLinear

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in, length] -> [..., out, steps], contiguous when these are transposed.

        Raises RuntimeError, as PyTorch's does, for other channels or less than one step.
        """
        assert not isinstance(self.padding, str)
        (kernel,), (stride,), (padding,) = self.kernel_size, self.stride, self.padding
        channels, length = input.shape[-2:]
        if channels != self.in_channels or length + 2 * padding < kernel:
            raise RuntimeError(f"input {tuple(input.shape)} does not fit {self}")
        size, width = kernel * channels, _width(self)
        # The last step reads beyond its inputs, what is multiplied by zero.
        after = padding + -(-(width - size) // channels)
        rows = pad(input.transpose(-1, -2), (0, 0, padding, after)).contiguous()
        steps = (length + 2 * padding - kernel) // stride + 1
        windows = rows.as_strided(
            (*rows.shape[:-2], steps, width), (*rows.stride()[:-2], stride * channels, 1)
        )
        return self.packed(windows).transpose(-1, -2)


def pack_convolutions(model: nn.Module, pack: Pack = pack_linear) -> int:
    """Pack the convolutions over time that qualify, in place; how many were.

    Those with groups or gaps are left alone, and what `own_layers` leaves out.
    """
    count = 0
    with torch.no_grad():
        for layer in own_layers(model, nn.Conv1d).values():
            if not _is_usual(layer):
                continue
            by_step = layer.weight.transpose(1, 2).flatten(1)  # [out, kernel * in]
            packed = pack(pad(by_step, (0, _width(layer) - by_step.shape[1])), layer.bias)
            if packed is not None:
                leave_empty(layer, PackedConv1d, packed=packed)
                count += 1
    return count


def _width(layer: nn.Conv1d) -> int:
    """The inputs of one step, rounded up."""
    return -(-layer.kernel_size[0] * layer.in_channels // _MULTIPLE) * _MULTIPLE


def _is_usual(layer: nn.Conv1d) -> bool:
    return (
        layer.groups == 1
        and layer.dilation == (1,)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and not layer._forward_pre_hooks  # which may make the weight anew
    )
