"""Changes to a request's logits before a token is chosen.

Behind the caller's own processors, in this order: allowed tokens, bias, bans, bad words, the mask
of a grammar, then penalties (for repetition, Keskar et al. 2019; for frequency and presence, as
OpenAI's API defines them). The tokens that penalties look at are kept on the device, so that a step
may be launched before the host knows the token of the step before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels.transfer import Staged, StepBuffer, to_device, upload

__all__ = ["Adjuster", "Adjusting", "Adjustments"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Adjustments:
    """Changes that one request asks for. Token ids are below the vocabulary's size.

    `allowed`: the only tokens that may come (int64 on the CPU), or None for all; `bias`: token id
    and what is added to its logit; `banned`: token id and the output token before which it gets no
    chance, the latest first;
    `bad_words`: token sequences that the output must not contain; `prompt_token_ids` count for the
    repetition penalty.
    """

    allowed: Tensor | None = None
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[tuple[int, int], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def is_active(self) -> bool:
        """Return whether there is anything to do."""
        lists = self.allowed is not None, self.bias, self.banned, self.bad_words
        return any(lists) or self.has_penalties

    @property
    def only_bans(self) -> bool:
        """Return whether nothing is asked for but that some tokens do not come."""
        if self.allowed is not None or self.bad_words or self.has_penalties:
            return False
        return all(value == -math.inf for _, value in self.bias)

    def banned_at(self, length: int) -> list[int]:
        """The tokens that may not come behind `length` output tokens, where there are only bans."""
        ever = [token_id for token_id, _ in self.bias]
        return ever + [token_id for token_id, until in self.banned if length < until]

    @property
    def has_penalties(self) -> bool:
        """Return whether tokens that have come before cost."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def needs_history(self) -> bool:
        """Return whether the tokens chosen before matter."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)


Asked = tuple[Adjustments | None, object]
"""What is asked for a row, and whose row it is: the completion that goes on from step to step."""


class Adjuster:
    """Applies adjustments to whole batches. Holds the output tokens of those that need them."""

    def __init__(self) -> None:
        self._histories = _Histories()
        self._fixed: weakref.WeakKeyDictionary[Adjustments, _Fixed] = weakref.WeakKeyDictionary()

    def prepare(
        self, buffer: StepBuffer, rows: Sequence[Asked], indices: Sequence[int]
    ) -> Adjusting:
        """Stage what a step's adjustments need.

        Completions may share their `Adjustments`, but not their owner. `indices`: how many output
        tokens each has.
        """
        asked = [
            _Row(row, index, a, owner, self._fixed_of(a, buffer))
            for row, ((a, owner), index) in enumerate(zip(rows, indices, strict=True))
            if a is not None
        ]
        noted = [each for each in asked if each.adjustments.needs_history]
        penalised = [each for each in asked if each.adjustments.has_penalties]
        return Adjusting(
            rows=asked,
            noted=_Places(buffer, noted, self._histories) if noted else None,
            penalties=_Penalties(buffer, penalised, self._histories) if penalised else None,
            histories=self._histories,
        )

    def _fixed_of(self, adjustments: Adjustments, buffer: StepBuffer) -> _Fixed:
        found = self._fixed.get(adjustments)
        if found is None:
            found = self._fixed[adjustments] = _Fixed(adjustments, buffer)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Adjusting:
    """One step's adjustments, as `Adjuster.prepare` has staged them. Used once they are sent."""

    rows: Sequence[_Row]
    noted: _Places | None
    penalties: _Penalties | None
    histories: _Histories

    def adjust(self, logits: Tensor, masks: Sequence[Tensor | None] = ()) -> Tensor:
        """`logits` [n, vocab] adjusted, in float32 at least; they may be overwritten.

        `masks`: for each row None or int32 [ceil(vocab / 32)] on the CPU, in which the bits of the
        tokens that may come are set.
        """
        masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
        if not self.rows and not masked:
            return logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        for row in self.rows:
            row.fixed.hold()
        self._add_fixed(logits)
        self._forbid_bad_words(logits)
        if masked:
            _apply_masks(logits, masked)
        if self.penalties is not None:
            self.penalties.apply(logits)
        return logits

    def note(self, token_ids: Tensor) -> None:
        """Remember the tokens [n] that were chosen, where later ones depend on them."""
        if self.noted is not None:
            self.noted.append(token_ids)

    def _add_fixed(self, logits: Tensor) -> None:
        """Apply what does not depend on the tokens so far, but for the end of a ban."""
        rows, columns, values = [], [], []
        for row, length, a, _, fixed in self.rows:
            if fixed.allowed is not None:
                kept = logits[row, fixed.allowed]
                logits[row] = -torch.inf
                logits[row, fixed.allowed] = kept
            # Those whose time has come stand at the end.
            count = len(a.bias) + sum(length < until for _, until in a.banned)
            if count:
                rows.append(torch.full((count,), row, device=logits.device))
                columns.append(fixed.columns[:count])
                values.append(fixed.values[:count])
        if rows:
            places = (torch.cat(rows), torch.cat(columns))
            logits.index_put_(places, torch.cat(values).to(logits.dtype), accumulate=True)

    def _forbid_bad_words(self, logits: Tensor) -> None:
        for row, length, a, owner, words in self.rows:
            if not a.bad_words:
                continue
            come = torch.zeros(len(words.last), dtype=logits.dtype, device=logits.device)
            if words.heads.shape[1]:
                tail = self.histories.tail(owner, length, words.heads)
                stands = ((words.heads == tail) | (words.heads < 0)).all(-1)
            else:
                stands = torch.ones_like(words.last, dtype=torch.bool)
            come.masked_fill_(stands, -torch.inf)
            logits[row].index_put_((words.last,), come, accumulate=True)


class _Row(NamedTuple):
    """A row of logits that is adjusted. `length`: output tokens that its completion has."""

    row: int
    length: int
    adjustments: Adjustments
    owner: object
    fixed: _Fixed


class _Fixed:
    """An `Adjustments` as tensors on the device, once they have been staged and held."""

    allowed: Tensor | None
    columns: Tensor
    values: Tensor
    prompt: Tensor
    last: Tensor
    heads: Tensor

    def __init__(self, adjustments: Adjustments, buffer: StepBuffer) -> None:
        a = adjustments
        added = [value for _, value in a.bias] + [-torch.inf] * len(a.banned)
        # Before the last token of each bad word, those before it, filled with -1 on the left.
        longest = max((len(word) for word in a.bad_words), default=1) - 1
        heads = [[-1] * (longest - len(word) + 1) + list(word[:-1]) for word in a.bad_words]
        self._shape = len(heads), longest
        self._allowed = None if a.allowed is None else buffer.put(a.allowed)
        self._values: Staged | None = buffer.put(added, torch.float64)
        self._ids = [
            buffer.put(token_id for token_id, _ in (*a.bias, *a.banned)),
            buffer.put(sorted(set(a.prompt_token_ids))),
            buffer.put(word[-1] for word in a.bad_words),
            buffer.put(token_id for head in heads for token_id in head),
        ]

    def hold(self) -> None:
        """Take the staged numbers out of the buffer, the first time."""
        if self._values is None:
            return
        self.allowed = None if self._allowed is None else self._allowed.tensor.clone()
        self.values = self._values.tensor.float()
        self.columns, self.prompt, self.last, heads = (each.tensor.clone() for each in self._ids)
        self.heads = heads.view(self._shape)
        self._allowed = self._values = None
        self._ids.clear()


class _Histories:
    """Output tokens by row of one table, [slots, capacity], on the device."""

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._slots: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._num_slots = 0
        self._free: list[int] = []  # given back on whatever thread forgets the owner last

    def slot(self, owner: object) -> int:
        """The row of a completion, which has it until it is gone."""
        slot = self._slots.get(owner)
        if slot is None:
            if not self._free:
                self._free.append(self._num_slots)
                self._num_slots += 1
            slot = self._slots[owner] = self._free.pop()
            weakref.finalize(owner, self._free.append, slot).atexit = False
        return slot

    def table(self, length: int, device: torch.device) -> Tensor:
        """The table, made larger where it has less than all slots and `length` columns."""
        old = self._table
        had = (0, 0) if old is None else old.shape
        if old is not None and had[0] >= self._num_slots and had[1] >= length:
            return old
        wanted = zip((self._num_slots, length), had, strict=True)
        size = [has if want <= has else max(want, 2 * has) for want, has in wanted]
        self._table = torch.zeros(size, dtype=torch.int64, device=device)
        if old is not None:
            self._table[: had[0], : had[1]] = old
        return self._table

    def tail(self, owner: object, length: int, like: Tensor) -> Tensor:
        """The last tokens, as many as `like` [w, count] has columns; -2 where there are none."""
        count = like.shape[1]
        tail = torch.full_like(like[0], -2)
        some = min(count, length)
        if some:
            assert self._table is not None
            tail[count - some :] = self._table[self._slots[owner], length - some : length]
        return tail


class _Places:
    """Some rows of logits, where the table has their tokens, and how many: staged, [m] each."""

    def __init__(self, buffer: StepBuffer, rows: Sequence[_Row], histories: _Histories) -> None:
        self.rows = buffer.put(row.row for row in rows)
        self.slots = buffer.put(histories.slot(row.owner) for row in rows)
        self.lengths = buffer.put(row.length for row in rows)
        self.longest = max(row.length for row in rows)
        self._table = partial(histories.table, self.longest + 1, buffer.device)

    def append(self, token_ids: Tensor) -> None:
        """Put each row's token of `token_ids` [n] behind those that it has."""
        chosen = token_ids[self.rows.tensor]
        self._table().index_put_((self.slots.tensor, self.lengths.tensor), chosen)

    def counts(self, like: Tensor) -> Tensor:
        """Count how often each row has each token: [m, vocab], in the dtype of `like`."""
        limit = self.lengths.tensor[:, None]
        counts = torch.zeros(len(limit), like.shape[-1], dtype=like.dtype, device=like.device)
        if self.longest:
            tokens = self._table()[self.slots.tensor, : self.longest]
            is_there = torch.arange(self.longest, device=like.device) < limit
            counts.scatter_add_(-1, tokens.masked_fill(~is_there, 0), is_there.to(like.dtype))
        return counts


class _Penalties(_Places):
    """Penalties of some rows for the tokens that have come before."""

    def __init__(self, buffer: StepBuffer, rows: Sequence[_Row], histories: _Histories) -> None:
        super().__init__(buffer, rows, histories)
        asked = [row.adjustments for row in rows]
        self._prompts = [
            (place, row.fixed)
            for place, row in enumerate(rows)
            if row.adjustments.repetition_penalty != 1 and row.adjustments.prompt_token_ids
        ]
        self._factors = self._frequency = self._presence = None
        if any(a.repetition_penalty != 1 for a in asked):
            self._factors = buffer.put((a.repetition_penalty for a in asked), torch.float64)
        if any(a.frequency_penalty or a.presence_penalty for a in asked):
            self._frequency = buffer.put((a.frequency_penalty for a in asked), torch.float64)
            self._presence = buffer.put((a.presence_penalty for a in asked), torch.float64)

    def apply(self, logits: Tensor) -> None:
        """Penalise the rows of `logits` [n, vocab], in place."""
        counts, places = self.counts(logits), self.rows.tensor
        scores = logits[places]

        def column(staged: Staged) -> Tensor:
            return staged.tensor[:, None].to(logits.dtype)

        if self._factors is not None:
            seen = counts > 0
            for place, fixed in self._prompts:
                seen[place, fixed.prompt] = True
            factor = column(self._factors)
            worse = torch.where(scores > 0, scores / factor, scores * factor)
            scores = torch.where(seen, worse, scores)
        if self._frequency is not None and self._presence is not None:
            scores -= column(self._frequency) * counts
            scores -= column(self._presence) * (counts > 0)
        logits[places] = scores


def _apply_masks(logits: Tensor, masked: list[tuple[int, Tensor]]) -> None:
    """Give no chance to tokens whose bit is not set.

    They come in copies of their own: a grammar is asked while the device computes the logits.
    """
    if logits.device.type == "cpu":
        # Not by torch: on whole rows each of its operators would wait for a team of threads.
        for row, mask in masked:
            octets = mask.numpy().view(np.uint8)
            is_open = np.unpackbits(octets, count=logits.shape[-1], bitorder="little")
            np.copyto(logits[row].numpy(), -np.inf, where=is_open == 0)
        return
    rows = upload([row for row, _ in masked], logits.device)
    words = to_device(torch.stack([mask for _, mask in masked]), logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    may_come = (words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]].bool()
    logits[rows] = logits[rows].masked_fill(~may_come, -torch.inf)
