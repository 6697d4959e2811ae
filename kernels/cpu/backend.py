"""The attention backend that calls the operators in C++; what they do not know, `gather` does."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata, KeyValue
from aioengine.kernels.cpu.library import instruction_set, is_available
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.pool import BYTES

__all__ = ["CpuBackend", "places_of"]


class CpuBackend:
    """See `AttentionBackend`. For float32 and bfloat16, and float16 where the CPU converts it.

    Raises RuntimeError where the operators were not built.
    """

    name = "cpu"
    takes_bytes = True

    def __init__(self) -> None:
        if not is_available():
            raise RuntimeError("the C++ kernels were not built; choose another attention backend")
        self._ops = torch.ops.aioengine_cpu
        self._others = GatherBackend()
        self._dtypes = {torch.float32, torch.bfloat16}
        if instruction_set() != "generic":
            self._dtypes.add(torch.float16)

    def write_kv(self, new: KeyValue, pages: KeyValue, meta: AttentionMetadata) -> None:
        """Put keys [T, Hkv, Dk] and values [T, Hkv, Dv] into their slots; mutates the pages."""
        if not self.knows(new[0], pages[0]):
            self._others.write_kv(new, pages, meta)
            return
        self._ops.write_kv(*map(_close, new), *pages, meta.slot_blocks, meta.slot_offsets)

    def attend(
        self,
        query: Tensor,
        pages: KeyValue,
        meta: AttentionMetadata,
        args: AttentionArgs,
        *,
        new: KeyValue | None = None,
    ) -> Tensor:
        """Attention of `query` [T, Hq, Dk] over each sequence's pages -> [T, Hq, Dv]."""
        if not self.knows(query, pages[0]):
            return self._others.attend(query, pages, meta, args, new=new)
        rows = (None, None) if new is None else map(_close, new)
        biases = _floats(args.sinks), _floats(args.distance_bias)
        settings = args.scale, args.softcap or 0.0, args.window or 0
        flags = meta.is_causal, meta.blocks_in_window
        out: Tensor = self._ops.attend(
            _close(query), *rows, *pages, *places_of(meta), *biases, *settings, *flags
        )
        return out

    def knows(self, query: Tensor, key_cache: Tensor) -> bool:
        """Return whether the operators take these queries and pages."""
        fits = key_cache.dtype in (query.dtype, BYTES)
        return fits and query.dtype in self._dtypes and query.device.type == "cpu"


def places_of(meta: AttentionMetadata) -> tuple[Tensor | None, ...]:
    """Metadata of where new rows go and which ones each token reads, in the operators' order."""
    return (
        meta.slot_blocks,
        meta.slot_offsets,
        meta.query_start,
        meta.seq_lens,
        meta.block_table,
        meta.block_ids,
    )


def _close(rows: Tensor) -> Tensor:
    """Return it with the numbers of a row side by side, which they nearly always are."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _floats(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.to(torch.float32).contiguous()
