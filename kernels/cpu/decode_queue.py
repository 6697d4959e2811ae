"""Decode steps that follow each other without Python in between.

The loop's thread writes a step into the queue, as numbers, and goes on; the launch thread is inside
`run`, in C++ (kernels/cpu/layers/decode.cpp), and computes what is there, from ids to ids. A file
tells the loop that steps are done. So neither waits for the interpreter's lock to let the other go
on, which any thread of the application may hold for milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.cpu.library import LIBRARY
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.layer_plan import Angles

__all__ = ["DecodeParts", "DecodeQueue", "QueuedToken"]

MOST_STEPS = 16
"""Steps in the queue."""
MOST_BANNED = 256
"""Tokens that may not come, of one sequence."""
_CHOICE_NUMBERS = 5
_NUM_WORDS = 6
"""Of a sequence in a step, beside its blocks and the tokens that are banned."""
ANGLE_BLOCK = 512
"""Positions whose angles are made at a time, on the loop."""


class QueuedToken(NamedTuple):
    """One sequence's part of a step.

    `token`: its id, or -1 less the place of a sequence in the step before, whose token it is.
    `position`: for its angles. `length`: of its context, itself included. `shift`: 1 where the
    pages hold its keys and values already, and they are written to the next token's place, where
    nobody reads them. `num_memory_rows`: of an encoder, that cross-attention reads. `banned`:
    tokens that may not come next. `choice`: how that is drawn, see `Choice` in `kernels.logits`.
    """

    token: int
    position: int
    length: int
    shift: int = 0
    num_memory_rows: int = 0
    banned: Sequence[int] = ()
    choice: Sequence[float] = (0.0, 0.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecodeParts:
    """The parts of a decoder, from token ids to logits.

    `plan`: of its layers, as `pack_plan` packs it. `table` [vocab, hidden]: embeddings, or a packed
    weight whose outputs they are; they are multiplied by `scale`. `places` [n, hidden]: a row of
    which is added to a token's, by its position. `make_angles`: of positions [n], cosines and sines
    [n, dim] of each kind. `cap`: of logits, 0 for none.
    """

    plan: Tensor
    table: Tensor | NativeLinear
    scale: float
    places: Tensor | None
    head: NativeLinear
    make_angles: Callable[[Tensor], Sequence[Angles]]
    cap: float = 0.0


class DecodeQueue:
    """A queue of steps of one engine. `run` is called by its launch thread, all else by its loop.

    `dtype`: of the layers. `caches`: keys and values of each layer's attention, in turns.
    `is_cross`: of each KV group;
    `max_blocks`: of a sequence in a group. `last` [m] int64: the tokens of the step before, of m
    sequences at most, which may be written between two steps. `max_len`: positions that there are.
    Raises RuntimeError where these do not go together.
    """

    def __init__(
        self,
        parts: DecodeParts,
        dtype: torch.dtype,
        caches: Sequence[Tensor],
        *,
        is_cross: Sequence[bool],
        max_blocks: int,
        max_len: int,
        last: Tensor,
    ) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # At the process's end the launch thread may still tell of steps: the system closes it.
        weakref.finalize(self, os.close, self.event).atexit = False
        groups, most = len(is_cross), len(last)
        self._make_angles = parts.make_angles
        # A token has to be left.
        self._most_banned = min(MOST_BANNED, parts.head.num_outputs - 1)
        kinds = parts.make_angles(torch.zeros(1, dtype=torch.int64))
        # Most of it is never written, and takes no memory.
        flat = [each for pair in kinds for each in pair]
        self._angles = [torch.empty(max_len, each.shape[-1], dtype=each.dtype) for each in flat]
        self._blocks: set[int] = set()  # of angles that are made
        self._max_len = max_len if parts.places is None else min(max_len, len(parts.places))
        num_words = 1 + groups + most * (_NUM_WORDS + groups * max_blocks + MOST_BANNED)
        steps = torch.empty(MOST_STEPS, num_words, dtype=torch.int32)
        choices = torch.zeros(MOST_STEPS, most * _CHOICE_NUMBERS, dtype=torch.float64)
        results = torch.empty(MOST_STEPS, 2 + most, dtype=torch.int64)
        self._steps, self._choices, self._results = (
            each.numpy() for each in (steps, choices, results)
        )
        self._decoder: Tensor = torch.ops.aioengine_cpu.pack_decoder(
            parts.plan,
            *_operands(parts.table),
            parts.scale,
            parts.places,
            *parts.head.operands,
            parts.head.num_outputs,
            parts.cap,
            torch.empty(0, dtype=dtype),
            [*caches],
            self._angles,
            [*map(int, is_cross)],
            steps,
            choices,
            results,
            last,
            self.event,
        )
        self._address = self._decoder.data_ptr()
        self._set = _setter()
        self.num_put = 0
        self.num_done = 0

    def put(
        self, tokens: Sequence[QueuedToken], tables: Sequence[Sequence[Sequence[int]]]
    ) -> int | None:
        """Write a step; `tables[g]`: the blocks of each sequence in a KV group. Returns its number.

        None where the queue is full, a position lies beyond those that there are, or more tokens
        are banned than there is room for. Nothing is computed before the next `let`.
        """
        if self.num_put - self.num_done >= MOST_STEPS:
            return None
        if not self._make_room(tokens):
            return None
        if any(len(token.banned) > self._most_banned for token in tokens):
            return None
        words = [len(tokens)]
        widths = [max(map(len, group)) for group in tables]
        words += widths
        for token in tokens:
            words += (token.token, token.position, token.length, token.shift)
            words += (token.num_memory_rows, len(token.banned))
        for width, group in zip(widths, tables, strict=True):
            for blocks in group:
                words += blocks
                words += [0] * (width - len(blocks))
        for token in tokens:
            words += token.banned
        place = self.num_put % MOST_STEPS
        self._steps[place, : len(words)] = words
        numbers = [number for token in tokens for number in token.choice]
        self._choices[place, : len(numbers)] = numbers
        self.num_put += 1
        return self.num_put - 1

    def let(self, limit: int | None = None) -> None:
        """Let the launch thread compute what is put, up to the step `limit`, None for all; it waits
        for more only where there is none."""
        self._set(self._address, self.num_put, sys.maxsize if limit is None else limit)

    def see(self) -> int:
        """Take note of the steps that are done, for which `event` was readable; how many are."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.event)
        self.num_done = self._set(self._address, -1, -1)
        return self.num_done

    def read(self, number: int, count: int) -> tuple[list[int], float, float]:
        """The `count` tokens of a step that is done, and when it began and ended, in seconds."""
        began, ended, *tokens = self._results[number % MOST_STEPS, : 2 + count].tolist()
        return tokens, began / 1e9, ended / 1e9

    def run(self, patience_s: float) -> int:
        """Compute what is put, until nothing has come for so long. Returns how many are done.

        Raises RuntimeError for a step that says what cannot be.
        """
        found: int = torch.ops.aioengine_cpu.decode(self._decoder, round(patience_s * 1e6))
        return found

    def logits(self, count: int) -> Tensor:
        """Logits [count, vocab] of the last step, in the dtype of the layers; nothing may run."""
        found: Tensor = torch.ops.aioengine_cpu.decoder_logits(self._decoder, count)
        return found

    def _make_room(self, tokens: Sequence[QueuedToken]) -> bool:
        """Make the angles of the tokens' positions, a block at a time; False: there are none."""
        blocks = {token.position // ANGLE_BLOCK for token in tokens}
        if any(not 0 <= token.position < self._max_len for token in tokens):
            return False
        for block in blocks - self._blocks:
            first, end = (
                min(each * ANGLE_BLOCK, len(self._angles[0]) if self._angles else 0)
                for each in (block, block + 1)
            )
            with torch.inference_mode():
                made = self._make_angles(torch.arange(first, end))
                flat = [each for pair in made for each in pair]
                for table, found in zip(self._angles, flat, strict=True):
                    table[first:end] = found
            self._blocks.add(block)
        return True


def _operands(table: Tensor | NativeLinear) -> tuple[Tensor, Tensor | None, int]:
    """Embeddings as the operators take them: with factors of a packed weight, and how many."""
    if isinstance(table, NativeLinear):
        return *table.operands[:2], table.num_outputs
    return table, None, len(table)


@cache
def _setter() -> Callable[[int, int, int], int]:
    """A call that keeps the interpreter's lock, as it takes less time than to get that again."""
    function = ctypes.PyDLL(str(LIBRARY)).aioengine_decoder_set
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int64
    found: Callable[[int, int, int], int] = function
    return found
