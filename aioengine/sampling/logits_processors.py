"""Changes to a request's logits before a token is chosen.

In this order: allowed tokens, bias, bans, bad words, the mask of a grammar, then penalties (for
repetition, Keskar et al. 2019; for frequency and presence, as OpenAI's API defines them). The
tokens that penalties look at are kept on the device, so that a step may be launched before the
host knows the token of the step before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aioengine.kernels.transfer import to_device, upload

__all__ = ["Adjuster", "Adjustments"]


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

    def adjust(
        self,
        logits: Tensor,
        rows: Sequence[Asked],
        indices: Sequence[int],
        masks: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """`logits` [n, vocab] adjusted, in float32 at least; they may be overwritten.

        Completions may share their `Adjustments`, but not their owner. `indices`: how many output
        tokens each has. `masks`: for each row None or int32 [ceil(vocab / 32)] on the CPU, in which
        the bits of the tokens that may come are set.
        """
        asked = [(row, a, owner) for row, (a, owner) in enumerate(rows) if a is not None]
        masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
        if not asked and not masked:
            return logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        self._add_fixed(logits, asked, indices)
        self._forbid_bad_words(logits, [row for row in asked if row[1].bad_words], indices)
        if masked:
            _apply_masks(logits, masked)
        self._penalise(logits, [row for row in asked if row[1].has_penalties], indices)
        return logits

    def note(self, token_ids: Tensor, rows: Sequence[Asked], indices: Sequence[int]) -> None:
        """Remember the tokens [n] that were chosen, where later ones depend on them."""
        asked = [row for row, (a, _) in enumerate(rows) if a is not None and a.needs_history]
        if asked:
            chosen = token_ids[upload(asked, token_ids.device)]
            owners = [rows[row][1] for row in asked]
            self._histories.append(owners, chosen, [indices[row] for row in asked])

    def _add_fixed(
        self, logits: Tensor, asked: list[tuple[int, Adjustments, object]], indices: Sequence[int]
    ) -> None:
        """Apply what does not depend on the tokens so far, but for the end of a ban."""
        rows, columns, values = [], [], []
        for row, a, _ in asked:
            if a not in self._fixed:
                self._fixed[a] = _Fixed(a, logits.device)
            fixed = self._fixed[a]
            if fixed.allowed is not None:
                kept = logits[row, fixed.allowed]
                logits[row] = -torch.inf
                logits[row, fixed.allowed] = kept
            # Those whose time has come stand at the end.
            num_banned = sum(indices[row] < until for _, until in a.banned)
            count = len(a.bias) + num_banned
            if count:
                rows.append(torch.full((count,), row, device=logits.device))
                columns.append(fixed.columns[:count])
                values.append(fixed.values[:count])
        if rows:
            places = (torch.cat(rows), torch.cat(columns))
            logits.index_put_(places, torch.cat(values).to(logits.dtype), accumulate=True)

    def _forbid_bad_words(
        self, logits: Tensor, asked: list[tuple[int, Adjustments, object]], indices: Sequence[int]
    ) -> None:
        for row, a, owner in asked:
            words = self._fixed[a]
            come = torch.zeros(len(words.last), dtype=logits.dtype, device=logits.device)
            if words.heads.shape[1]:
                tail = self._histories.tail(owner, indices[row], words.heads)
                stands = ((words.heads == tail) | (words.heads < 0)).all(-1)
            else:
                stands = torch.ones_like(words.last, dtype=torch.bool)
            come.masked_fill_(stands, -torch.inf)
            logits[row].index_put_((words.last,), come, accumulate=True)

    def _penalise(
        self, logits: Tensor, asked: list[tuple[int, Adjustments, object]], indices: Sequence[int]
    ) -> None:
        if not asked:
            return
        rows = [row for row, _, _ in asked]
        lengths = [indices[row] for row in rows]
        counts = self._histories.counts([owner for _, _, owner in asked], lengths, logits)
        settings = [a for _, a, _ in asked]
        places = upload(rows, logits.device)
        scores = logits[places]

        def column(values: list[float]) -> Tensor:
            return upload(values, logits.device, logits.dtype)[:, None]

        if any(a.repetition_penalty != 1 for a in settings):
            seen = counts > 0
            for place, a in enumerate(settings):
                if a.repetition_penalty != 1 and a.prompt_token_ids:
                    seen[place, self._fixed[a].prompt] = True
            factor = column([a.repetition_penalty for a in settings])
            worse = torch.where(scores > 0, scores / factor, scores * factor)
            scores = torch.where(seen, worse, scores)
        if any(a.frequency_penalty or a.presence_penalty for a in settings):
            scores -= column([a.frequency_penalty for a in settings]) * counts
            scores -= column([a.presence_penalty for a in settings]) * (counts > 0)
        logits[places] = scores


class _Fixed:
    """An `Adjustments` as tensors on the device."""

    def __init__(self, adjustments: Adjustments, device: torch.device) -> None:
        a = adjustments

        def ids(values: Sequence[int]) -> Tensor:
            return upload(values, device)

        self.allowed = None if a.allowed is None else to_device(a.allowed, device)
        self.columns = ids([token_id for token_id, _ in (*a.bias, *a.banned)])
        added = [value for _, value in a.bias] + [-torch.inf] * len(a.banned)
        self.values = upload(added, device, torch.float32)
        self.prompt = ids(sorted(set(a.prompt_token_ids)))
        # The last token of each bad word, and those before it, filled with -1 on the left.
        self.last = ids([word[-1] for word in a.bad_words])
        longest = max((len(word) for word in a.bad_words), default=1) - 1
        heads = [[-1] * (longest - len(word) + 1) + list(word[:-1]) for word in a.bad_words]
        self.heads = ids([t for head in heads for t in head]).reshape(len(heads), longest)


class _Histories:
    """Output tokens by row of one table, [slots, capacity], on the device."""

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._slots: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._num_slots = 0
        self._free: list[int] = []  # given back on whatever thread forgets the owner last

    def append(self, owners: Sequence[object], token_ids: Tensor, lengths: list[int]) -> None:
        """Put each token behind the `lengths` that its sequence has."""
        slots = [self._slot(owner) for owner in owners]
        table = self._fit(max(lengths) + 1, token_ids.device)
        places = upload(slots, table.device), upload(lengths, table.device)
        table.index_put_(places, token_ids)

    def counts(self, owners: Sequence[object], lengths: Sequence[int], like: Tensor) -> Tensor:
        """Count how often each sequence has each token: [m, vocab], in the dtype of `like`."""
        counts = torch.zeros(len(owners), like.shape[-1], dtype=like.dtype, device=like.device)
        longest = max(lengths)
        if longest:
            # One without tokens has no slot yet; none of the slot's tokens are counted for it.
            slots = upload([self._slots.get(o, 0) for o in owners], like.device)
            assert self._table is not None
            tokens = self._table[slots, :longest]
            limit = upload(lengths, like.device)[:, None]
            is_there = torch.arange(longest, device=like.device) < limit
            counts.scatter_add_(-1, tokens.masked_fill(~is_there, 0), is_there.to(like.dtype))
        return counts

    def tail(self, owner: object, length: int, like: Tensor) -> Tensor:
        """The last tokens, as many as `like` [w, count] has columns; -2 where there are none."""
        count = like.shape[1]
        tail = torch.full_like(like[0], -2)
        some = min(count, length)
        if some:
            assert self._table is not None
            tail[count - some :] = self._table[self._slots[owner], length - some : length]
        return tail

    def _slot(self, owner: object) -> int:
        slot = self._slots.get(owner)
        if slot is None:
            if not self._free:
                self._free.append(self._num_slots)
                self._num_slots += 1
            slot = self._slots[owner] = self._free.pop()
            weakref.finalize(owner, self._free.append, slot).atexit = False
        return slot

    def _fit(self, length: int, device: torch.device) -> Tensor:
        """The table, made larger where it has to be."""
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


def _apply_masks(logits: Tensor, masked: list[tuple[int, Tensor]]) -> None:
    """Give no chance to tokens whose bit is not set."""
    rows = upload([row for row, _ in masked], logits.device)
    words = to_device(torch.stack([mask for _, mask in masked]), logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    may_come = (words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]].bool()
    logits[rows] = logits[rows].masked_fill(~may_come, -torch.inf)
