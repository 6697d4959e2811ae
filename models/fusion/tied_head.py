"""Output heads that share the embeddings' weight, which is multiplied where it lies.

A weight that is packed is somewhere else, and embeddings are read by rows: the head would take
memory for a second time. So the kernels read a plain weight: for a single row as fast as a packed
one, for many slower where the CPU has no tiles (docs/decisions/decode-queue.md), and faster than
PyTorch's.
"""

from __future__ import annotations

from torch import Tensor, nn

from aioengine.kernels.cpu.linear import PlainLinear, reads_plain
from aioengine.models.fusion.swap import swap

__all__ = ["TiedLinear", "read_tied_heads"]


class TiedLinear(nn.Linear):
    """Made of a linear layer by `read_tied_heads`, never by itself."""

    matmul: PlainLinear

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        return self.matmul(input)


def read_tied_heads(model: nn.Module) -> int:
    """Let our kernels multiply with weights that are embeddings too; how many layers they serve."""
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    count = 0
    for layer in model.modules():
        if type(layer) is nn.Linear and id(layer.weight) in tables and reads_plain(layer.weight):
            swap(layer, TiedLinear, matmul=PlainLinear(layer.weight, layer.bias))
            count += 1
    return count
