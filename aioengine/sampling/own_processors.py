"""Logits processors of the caller's own: functions that change the logits of one completion.

They run on the thread that samples, one row after the other, before anything else is done to the
logits. What is wrong with what they do ends their own request: an exception and a wrong form at
once, a number that is none when the step is read, so that nothing waits for the device here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError

__all__ = ["OwnProcessors", "Processed", "process"]

PARAMETER = "logits_processors"

Function = Callable[[Sequence[int], Tensor], Tensor]


class OwnProcessors:
    """The functions of one completion, and its output tokens. For the thread that samples."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = tuple(functions)
        self._token_ids: list[int] = []

    def take(self, token_ids: Sequence[int], output_index: int) -> None:
        """Note the tokens that come before output token `output_index`.

        `token_ids` end with them, from the first on that has not been noted.
        """
        count = output_index - len(self._token_ids)
        self._token_ids += token_ids[len(token_ids) - count :] if count else ()

    def run(self, row: Tensor) -> Tensor:
        """Change the logits `row` [vocab] in place.

        Returns bool [functions + 1]: whether all logits were below infinity, and numbers, at first
        and behind each function. Raises InvalidRequestError, and leaves the row as it was.
        """
        token_ids, logits = tuple(self._token_ids), row.clone()
        are_numbers = [(logits < torch.inf).all()]
        for number, function in enumerate(self._functions):
            name = f"{PARAMETER}[{number}]"
            try:
                logits = next(_called(function, token_ids, logits))
                fault = _fault(logits, row)
                if not fault:
                    are_numbers.append((logits < torch.inf).all())
            except BaseException as error:  # SystemExit too, which is no end of this thread
                raise _failed(name, error) from error
            if fault:
                raise InvalidRequestError(f"{name} must return {fault}", parameter=name)
        row.copy_(logits)
        return torch.stack(are_numbers)


class Processed(NamedTuple):
    """Outcome of the callers' functions in a step.

    `failures`: by row; `rows`: those whose functions have returned, with their parts of
    `are_numbers` (bool, see `OwnProcessors.run`), by their sizes; `start` and `end` in seconds of
    `time.perf_counter()`.
    """

    failures: dict[int, Exception]
    rows: dict[int, int]
    are_numbers: Tensor | None
    start: float
    end: float

    def read(self, are_numbers: Sequence[bool]) -> dict[int, Exception]:
        """Return all failures by row, once `are_numbers` are on the host."""
        found, first = dict(self.failures), 0
        for row, size in self.rows.items():
            part = are_numbers[first : first + size]
            first += size
            # What the model itself has made of its weights is not the functions' fault.
            if part[0] and not all(part):
                name = f"{PARAMETER}[{part.index(False) - 1}]"
                message = f"{name} must return numbers below infinity, or -inf to bar a token"
                found[row] = InvalidRequestError(message, parameter=name)
        return found


def process(logits: Tensor, asked: Sequence[tuple[int, OwnProcessors]]) -> tuple[Tensor, Processed]:
    """Run the functions of some rows of `logits` [n, vocab], which may be changed in place.

    Returns them in float32 at least.
    """
    start = time.perf_counter()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    failures: dict[int, Exception] = {}
    parts: dict[int, Tensor] = {}
    for row, processors in asked:
        try:
            parts[row] = processors.run(logits[row])
        except InvalidRequestError as error:
            failures[row] = error.with_traceback(None)
    are_numbers = torch.cat([*parts.values()]) if parts else None
    sizes = {row: len(part) for row, part in parts.items()}
    return logits, Processed(failures, sizes, are_numbers, start, time.perf_counter())


def _called(function: Function, token_ids: Sequence[int], logits: Tensor) -> Iterator[Tensor]:
    """Call a function in a frame behind which there is no other, once it has ended.

    An exception holds its frames, and these all those that have called them: with them, whoever
    keeps it would keep the logits of the whole step, and the model.
    """
    yield function(token_ids, logits)


def _fault(found: object, like: Tensor) -> str:
    """Say what a function has to return and has not, or nothing."""
    form = f"a tensor [{len(like)}] of {like.dtype} on {like.device}, as it is given"
    if not isinstance(found, Tensor):
        return f"{form}, not {type(found).__name__}"
    has_form = found.shape == like.shape and found.layout == torch.strided
    if has_form and found.dtype == like.dtype and found.device == like.device:
        return ""
    return f"{form}, not {[*found.shape]} of {found.dtype} on {found.device}"


def _failed(name: str, error: BaseException) -> InvalidRequestError:
    """Build the error of a function that has raised; its text may hold payload, so it is the cause
    alone."""
    trace = error.__traceback__
    for _ in range(2):  # frames of our own
        trace = None if trace is None else trace.tb_next
    error.__traceback__ = trace
    message = f"{name} has raised {type(error).__name__}; __cause__ says where"
    return InvalidRequestError(message, parameter=name)
