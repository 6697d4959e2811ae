"""How much memory an engine takes: from its configuration, else a share of what is free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from aioengine.config import EngineConfig
from aioengine.errors import ModelLoadError
from aioengine.plan import Limits
from aioengine.types import KVGroup

__all__ = ["resolve_limits"]

KV_SHARE_CPU = 0.25
"""Of the host's available memory: an embedded engine is a guest there."""
ENCODER_STEPS = 4
"""The encoder cache holds the rows of so many full steps by default."""
ASSUMED_BYTES = 1 << 32
"""Where the system does not tell."""
UNLIMITED_LEN = 32_768
"""Tokens of one request where neither the model nor the configuration sets a limit."""


def resolve_limits(
    config: EngineConfig,
    *,
    kv_groups: Sequence[KVGroup],
    itemsize: int,
    hidden_size: int,
    max_position_embeddings: int | None,
    max_item_rows: int,
    device: torch.device,
) -> Limits:
    """What the scheduler may share out.

    `itemsize`: bytes of one number; `max_item_rows`: encoder rows of the largest media item, 0 for
    a model without media. Raises ModelLoadError, with the numbers, for sizes that cannot work.
    """
    model_len = max_position_embeddings or UNLIMITED_LEN
    if config.max_model_len is not None:
        if max_position_embeddings is not None and config.max_model_len > max_position_embeddings:
            raise ModelLoadError(
                f"max_model_len is {config.max_model_len}, but the model knows "
                f"{max_position_embeddings} positions; lower max_model_len"
            )
        model_len = config.max_model_len
    # Blocks of all groups are drawn from one pool, so each is as large as the largest.
    page_bytes = max(group.block_bytes(config.block_size, itemsize) for group in kv_groups)
    blocks_for_one = -(-model_len // config.block_size) * len(kv_groups)
    useful = blocks_for_one * config.max_num_seqs
    kv_bytes = config.kv_cache_bytes or min(_free_bytes(config, device), useful * page_bytes)
    num_blocks = kv_bytes // page_bytes
    if num_blocks < blocks_for_one:
        if config.max_model_len is not None or num_blocks < len(kv_groups):
            raise ModelLoadError(
                f"a request of {model_len} tokens needs {blocks_for_one * page_bytes} bytes of KV "
                f"cache, but there are {kv_bytes}; raise kv_cache_bytes or lower max_model_len"
            )
        model_len = num_blocks // len(kv_groups) * config.block_size
    encoder_rows = config.max_num_encoder_input_tokens or config.max_num_batched_tokens
    default_rows = ENCODER_STEPS * max(config.max_num_batched_tokens, max_item_rows)
    row_bytes = hidden_size * itemsize
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_groups=len(kv_groups),
        encoder_cache_bytes=config.encoder_cache_bytes
        or (default_rows * row_bytes if max_item_rows else 0),
        max_num_encoder_input_tokens=max(encoder_rows, max_item_rows),
        max_encode_items=1 if device.type == "cpu" else config.max_num_seqs,
        max_media_rows=default_rows,
        disable_chunked_mm_input=config.disable_chunked_mm_input,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _free_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the KV cache may take by default; the weights are loaded already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    return int(_available_bytes() * KV_SHARE_CPU)


def _available_bytes() -> int:
    """Bytes that this process could still use: the host's, or what its cgroup leaves."""
    limits = [_read_number("/proc/meminfo", "MemAvailable:") * 1024]
    cgroup = Path("/sys/fs/cgroup")
    most = _read_number(cgroup / "memory.max")
    if most:
        limits.append(most - _read_number(cgroup / "memory.current"))
    known = [limit for limit in limits if limit > 0]
    return min(known, default=ASSUMED_BYTES)


def _read_number(path: str | Path, label: str = "") -> int:
    """The number after `label` in a system file; 0 if there is none."""
    try:
        words = Path(path).read_text().split()
        return int(words[words.index(label) + 1] if label else words[0])
    except (OSError, ValueError, IndexError):
        return 0
