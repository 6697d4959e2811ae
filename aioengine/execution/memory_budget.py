"""Memory of an engine: as configured, else of what its largest step leaves.

The host's memory is what the machine has, less what this process's limits take: those of control
groups, versions 1 and 2, at every level above the process, and its own. Linux reports them;
elsewhere nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.core.plan import Limits
from aioengine.errors import ModelLoadError
from aioengine.kernels.pool import LayerPages, PageFormat, empty_pool
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.types import KVGroup

__all__ = ["ModelSizes", "allocate_pages", "available_bytes", "find_device", "resolve_limits"]

HOST_SHARE = 0.25
"""Of the host's available memory: an embedded engine is a guest there."""
ENCODER_STEPS = 4
"""The encoder cache holds the rows of so many full steps by default."""
ENCODER_SHARE = 8
"""But it takes at most one part in so many of the memory that there is, if that holds an item."""
ASSUMED_BYTES = 1 << 32
"""Where the system does not tell."""
UNLIMITED = 1 << 60
"""Control groups of version 1 say "no limit" by a number of this size."""
UNLIMITED_LEN = 32_768
"""Tokens of one request where neither the model nor the configuration sets a limit."""
MOST_TOGETHER = 4
"""Items of one encoder run. Few, so that the first results come early: on a CPU steps wait for the
run, on a GPU they share the device with it. The prompts behind the items then share a step."""
SNAPSHOTS = 4
"""Of states, for each request that may run: what prompts have in common, and their own ends."""
SNAPSHOT_SHARE = 8
"""But they take at most one part in so many of the memory of keys and values."""
PLENTY = 4
"""With so many times the memory that the caches could use, a CPU's step need not be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Properties of a model that decide how much memory it takes.

    `itemsize`: bytes of one number; `kv_row_bytes`: of a key or value of so many numbers;
    `state_bytes`: of a request's state, 0 where no layer keeps one;
    `row_size`: width of an encoder row; `max_item_rows`: encoder rows of the largest item to
    encode, 0 for a model without an encoder; `max_encoder_len`: rows that cross-attention may read,
    0 where there is none; `max_position_embeddings`: None where it knows no limit.
    """

    kv_groups: Sequence[KVGroup]
    itemsize: int
    kv_row_bytes: Callable[[int], int]
    row_size: int
    max_position_embeddings: int | None
    max_item_rows: int
    max_encoder_len: int = 0
    state_bytes: int = 0

    @property
    def num_cross_groups(self) -> int:
        """KV groups of cross-attention, which come after the others."""
        return sum(group.kind == "cross" for group in self.kv_groups)

    def num_blocks(self, model_len: int, block_size: int) -> int:
        """Blocks of a request of so many tokens, with what its cross-attention reads."""
        num_own = len(self.kv_groups) - self.num_cross_groups
        own = -(-model_len // block_size) * num_own
        return own + -(-self.max_encoder_len // block_size) * self.num_cross_groups


def resolve_limits(
    config: EngineConfig, sizes: ModelSizes, device: torch.device, measure: Callable[[Limits], int]
) -> Limits:
    """Compute what the scheduler may share out.

    `measure` finds how many bytes the largest step needs beside the caches; it is called where the
    configuration leaves a size open and memory could be what limits it. Raises ModelLoadError, with
    the numbers, for sizes that cannot work.
    """
    # Blocks of all groups are drawn from one pool, so each is as large as the largest.
    page_bytes = max(g.block_bytes(config.block_size, sizes.kv_row_bytes) for g in sizes.kv_groups)
    draft = _draft(config, sizes)
    useful_bytes = draft.num_blocks * config.max_num_seqs * page_bytes
    kv_bytes, encoder_bytes = config.kv_cache_bytes, config.encoder_cache_bytes
    budget = needed = 0
    if kv_bytes is None or (encoder_bytes is None and sizes.max_item_rows):
        budget = _free_bytes(config, device)
        if kv_bytes is None:
            scarce = (useful_bytes + draft.encoder_cache_bytes) * PLENTY > budget
        else:  # is one part in ENCODER_SHARE of what is left beyond doubt enough?
            scarce = draft.encoder_cache_bytes * ENCODER_SHARE * PLENTY > budget - kv_bytes
        if device.type == "cuda" or scarce:
            _check_memory(sizes, config.block_size, page_bytes, kv_bytes or budget)
            needed = measure(draft)
    if encoder_bytes is None:
        share = max(0, budget - needed - (kv_bytes or 0)) // ENCODER_SHARE
        item_bytes = sizes.max_item_rows * sizes.row_size * sizes.itemsize
        encoder_bytes = min(draft.encoder_cache_bytes, max(item_bytes, share))
    live_bytes = draft.num_states * sizes.state_bytes
    if kv_bytes is None:
        left = max(0, budget - needed - encoder_bytes - live_bytes)
        num_snapshots = _num_snapshots(draft, sizes, left)
        kv_bytes = min(left - num_snapshots * sizes.state_bytes, useful_bytes)
    else:
        num_snapshots = _num_snapshots(draft, sizes, kv_bytes)
    num_blocks = kv_bytes // page_bytes
    model_len = draft.max_model_len
    if num_blocks < draft.num_blocks:
        if config.max_model_len is not None or num_blocks < sizes.num_blocks(1, config.block_size):
            found = (
                f"but kv_cache_bytes is {kv_bytes}"
                if config.kv_cache_bytes is not None
                else f"but {kv_bytes} are left: {budget} may be taken, of which the largest step "
                f"needs {needed} and the encoder cache {encoder_bytes}"
            )
            if live_bytes and config.kv_cache_bytes is None:
                found += f", and the states of {draft.num_states} requests {live_bytes}"
            memory = sizes.num_blocks(0, config.block_size) * page_bytes
            inside = f", {memory} of them for what its encoder reads" if memory else ""
            raise ModelLoadError(
                f"a request of {model_len} tokens needs {draft.num_blocks * page_bytes} bytes of "
                f"KV cache{inside}, {found}; lower max_model_len or max_num_batched_tokens, or "
                f"raise kv_cache_bytes or gpu_memory_utilization"
            )
        rest = num_blocks - sizes.num_blocks(0, config.block_size)
        model_len = rest // draft.num_groups * config.block_size
    per_block = page_bytes * draft.num_groups
    interval = max(1, -(-sizes.state_bytes // per_block)) * config.block_size
    return replace(
        draft,
        max_model_len=model_len,
        num_blocks=num_blocks,
        num_states=draft.num_states + num_snapshots,
        state_interval=interval,
        encoder_cache_bytes=encoder_bytes,
    )


def _check_memory(sizes: ModelSizes, block_size: int, page_bytes: int, most_bytes: int) -> None:
    """Raise ModelLoadError where the rows that cross-attention reads of one prompt fit nowhere, as
    a step over all of them would be measured for long."""
    memory_bytes = sizes.num_blocks(0, block_size) * page_bytes
    if memory_bytes > most_bytes:
        raise ModelLoadError(
            f"what cross-attention may read of a prompt needs {memory_bytes} bytes of KV cache, "
            f"but {most_bytes} are the most; allow fewer items in limit_mm_per_prompt, or raise "
            "kv_cache_bytes or gpu_memory_utilization"
        )


def _num_snapshots(draft: Limits, sizes: ModelSizes, kv_bytes: int) -> int:
    if not sizes.state_bytes:
        return 0
    return min(SNAPSHOTS * draft.max_num_seqs, kv_bytes // SNAPSHOT_SHARE // sizes.state_bytes)


def _draft(config: EngineConfig, sizes: ModelSizes) -> Limits:
    """All that does not depend on memory: blocks for one request, rows for a few steps."""
    known = sizes.max_position_embeddings
    model_len = known or UNLIMITED_LEN
    if config.max_model_len is not None:
        if known is not None and config.max_model_len > known:
            raise ModelLoadError(
                f"max_model_len is {config.max_model_len}, but the model knows {known} positions; "
                f"lower max_model_len"
            )
        model_len = config.max_model_len
    encoder_rows = config.max_num_encoder_input_tokens or config.max_num_batched_tokens
    default_rows = ENCODER_STEPS * max(config.max_num_batched_tokens, sizes.max_item_rows)
    row_bytes = sizes.row_size * sizes.itemsize
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model_len,
        block_size=config.block_size,
        num_blocks=sizes.num_blocks(model_len, config.block_size),
        num_groups=len(sizes.kv_groups) - sizes.num_cross_groups,
        num_cross_groups=sizes.num_cross_groups,
        # One more than requests: that is how one can begin with a copy of another.
        num_states=config.max_num_seqs + 1 if sizes.state_bytes else 0,
        max_encoder_len=sizes.max_encoder_len,
        encoder_cache_bytes=default_rows * row_bytes if sizes.max_item_rows else 0,
        max_num_encoder_input_tokens=max(encoder_rows, sizes.max_item_rows),
        max_encode_items=MOST_TOGETHER,
        max_media_rows=default_rows,
        disable_chunked_mm_input=config.disable_chunked_mm_input,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def find_device(name: str) -> torch.device:
    """The device that `EngineConfig.device` means; a GPU has its number, 0 if none is named.

    Raises ModelLoadError.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelLoadError(f"device {name!r:.40} is not known; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {name!r:.40} is not supported; use auto, cpu or cuda")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        if count:
            has = f"torch finds {count} ({device.type}:0 to {device.type}:{count - 1})"
        elif torch.version.cuda is None and torch.version.hip is None:
            has = f"torch {torch.__version__} is built without CUDA; install a CUDA wheel of it"
        else:
            has = "torch finds no CUDA device; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        raise ModelLoadError(f"device {name!r:.40} is not there: {has}, or use cpu")
    # `torch.cuda.set_device` takes none without a number.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _free_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the engine may take beside its weights, which are loaded already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    available = available_bytes()
    return int((ASSUMED_BYTES if available is None else available) * HOST_SHARE)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that may still be taken, or None where the system does not tell.

    `root` is where `proc` and `sys` lie.
    """
    found = [*_machine(root), *_control_groups(root), *_own_limits(root)]
    return min((max(0, number) for number in found), default=None)


def _machine(root: Path) -> Iterator[int]:
    meminfo = _numbers(root / "proc/meminfo")
    if "MemAvailable:" in meminfo:
        yield meminfo["MemAvailable:"] * 1024


def _control_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        limit_name, usage_name, inactive_name = names
        # In a container the path may be the host's, and the group's files lie at the top.
        place = base / path.lstrip("/")
        for group in [place, *place.parents]:
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None and limit < UNLIMITED:
                # File pages that are not in use are given up before memory runs out.
                spare = _numbers(group / "memory.stat").get(inactive_name, 0)
                yield limit - usage + spare
            if group == base:
                break


def _own_limits(root: Path) -> Iterator[int]:
    status = _numbers(root / "proc/self/status")
    for line in _lines(root / "proc/self/limits"):
        for name, used in (("Max address space", "VmSize:"), ("Max data size", "VmData:")):
            words = line.removeprefix(name).split() if line.startswith(name) else []
            if words and words[0].isdecimal():
                yield int(words[0]) - status.get(used, 0) * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _number(path: Path) -> int | None:
    """The number that a file holds; None for none, and for "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file of `name number` lines."""
    words = (line.split() for line in _lines(path))
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}


def allocate_pages(
    model: TransformersModel, limits: Limits, form: PageFormat, num_spare: int
) -> list[LayerPages]:
    """Key and value pages per layer, views of one pool of bytes.

    A block is one page, which holds the block's keys and values of all layers of its group; all
    groups draw pages from the same pool. Within a block a head's rows lie one after the other: who
    attends with one head reads on and on.
    """
    num_blocks = limits.num_blocks + num_spare
    page_bytes = max(g.block_bytes(limits.block_size, form.row_bytes) for g in model.kv_groups)
    page_size = page_bytes // form.dtype.itemsize
    pool = empty_pool(num_blocks * page_size, form.dtype, model.device)

    def view(offset: int, heads: int, dim: int) -> Tensor:
        size = (num_blocks, limits.block_size, heads, dim)
        strides = (page_size, dim, limits.block_size * dim, 1)
        return pool.as_strided(size, strides, offset)

    pages: list[LayerPages] = []
    for group, index in model.layer_groups:
        spec = model.kv_groups[group]
        heads, *dims = spec.num_kv_heads, spec.key_dim, spec.value_dim
        key_dim, value_dim = map(form.row_size, dims)
        offset = index * limits.block_size * heads * (key_dim + value_dim)
        values = offset + limits.block_size * heads * key_dim
        pages.append(LayerPages((view(offset, heads, key_dim), view(values, heads, value_dim))))
    return pages
