"""Embeddings, and output heads that share their weight.

A weight that is packed is somewhere else, and embeddings are read by rows: the head would take
memory for a second time. So the kernels read a plain weight: for a single row as fast as a packed
one, for many slower where the CPU has no tiles (docs/decisions/decode-queue.md), and faster than
PyTorch's. A weight in groups is packed once, and both read that.
"""

from __future__ import annotations

from torch import Tensor, nn

from aioengine.kernels.cpu.linear import PlainLinear, reads_plain
from aioengine.kernels.grouped import pack_grouped
from aioengine.kernels.linear import PackedLinear
from aioengine.models.fusion.packed_linear import Packed, leave_empty
from aioengine.models.fusion.swap import swap
from aioengine.models.quantization.grouped_layers import GroupedRows, grouped_of, joined_groups

__all__ = ["TiedLinear", "read_tables"]


class TiedLinear(nn.Linear):
    """Made of a linear layer by `read_tables`, never by itself."""

    matmul: PlainLinear

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        return self.matmul(input)


def read_tables(model: nn.Module) -> int:
    """Let our kernels multiply with weights that are embeddings too, and read those in groups; how
    many layers they serve."""
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    count = 0
    for layer in model.modules():
        if type(layer) is not nn.Linear or grouped_of(layer) is not None:
            continue
        if id(layer.weight) in tables and reads_plain(layer.weight):
            swap(layer, TiedLinear, matmul=PlainLinear(layer.weight, layer.bias))
            count += 1
    return count + _pack_groups(model)


def _pack_groups(model: nn.Module) -> int:
    packed: dict[int, PackedLinear] = {}  # by the weight that it is of
    modules = [each for each in model.modules() if grouped_of(each) is not None]
    for module in modules:
        assert isinstance(module, nn.Linear | nn.Embedding)
        bias = module.bias if isinstance(module, nn.Linear) else None
        key = id(grouped_of(module))
        weight = joined_groups([module])
        assert weight is not None
        if key not in packed or bias is not None:
            packed[key] = pack_grouped(weight, bias)
        if isinstance(module, nn.Linear):
            leave_empty(module, Packed, packed=packed[key])
            continue
        # What scales its rows calls the next class's `forward`: this one's.
        kind = type(module)
        bases = (GroupedRows,) if kind is nn.Embedding else (kind, GroupedRows)
        leave_empty(module, type(kind.__name__, bases, {}), packed=packed[key])
    return len(modules)
