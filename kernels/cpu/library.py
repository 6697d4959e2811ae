"""The compiled operators: where they are, and whether they can be used.

A package that was built without a compiler has none; nothing then fails, and the backends in plain
PyTorch do the work.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import torch

__all__ = [
    "LIBRARY",
    "end_load",
    "end_team",
    "has_bfloat16",
    "has_bfloat16_attention",
    "instruction_set",
    "instruction_sets",
    "is_available",
    "use_instruction_set",
]

LIBRARY = Path(__file__).with_name("libaioengine_cpu.so")

_KNOWN = (
    *("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    *("neon", "neon_dotprod", "neon_bf16"),
)

logger = logging.getLogger(__name__)


@cache
def is_available() -> bool:
    """Load the operators, once in a process; whether they are there.

    A line in the log tells why not.
    """
    if not LIBRARY.exists():
        logger.warning(
            "the C++ kernels were not built (no compiler, or no headers of PyTorch, at the time): "
            "attention runs in plain PyTorch, which is slower"
        )
        return False
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        logger.warning("the C++ kernels cannot be loaded, PyTorch's own are used: %s", error)
        return False
    return True


def instruction_set() -> str:
    """Return the instruction set that the operators use: "generic", "avx2", "avx512",
    "avx512_vnni", "avx512_bf16" or "amx_bf16"; on ARM "neon", "neon_dotprod" or "neon_bf16"."""
    found: str = torch.ops.aioengine_cpu.instruction_set("")
    return found


def has_bfloat16() -> bool:
    """Return whether there are operators and their linear layers multiply bfloat16 as such."""
    return is_available() and instruction_set() in ("avx512_bf16", "amx_bf16", "neon_bf16")


def has_bfloat16_attention() -> bool:
    """Return whether there are operators and attention multiplies bfloat16 as such, not floats."""
    return is_available() and instruction_set() in ("avx512_bf16", "amx_bf16")


def instruction_sets() -> tuple[str, ...]:
    """List those that this CPU has, the best last."""
    before = instruction_set()
    found = tuple(name for name in _KNOWN if use_instruction_set(name) == name)
    use_instruction_set(before)
    return found


def use_instruction_set(name: str) -> str:
    """Choose one for the whole process, if this CPU has it; the one in use. For tests."""
    found: str = torch.ops.aioengine_cpu.instruction_set(name)
    return found


def end_load() -> None:
    """Have the allocator give back to the system what is free, and weights be moved together.

    glibc keeps what lies below anything in use: hundreds of MB of what weights were made of. Packed
    weights go to huge pages, on Linux, by a thread that ends when they have.
    """
    if is_available():
        torch.ops.aioengine_cpu.end_load()


def end_team() -> None:
    """End the threads that operators of the calling thread have been shared out to.

    A thread that has run operators calls it before it ends: what it leaves is freed by the next
    operator of any thread only, as the interpreter may have ended before it does.
    """
    if is_available():
        torch.ops.aioengine_cpu.end_team()
