"""Sampling of token ids from logits, for all sequences of a step at once.

Each sequence needs one uniform number, drawn from a hash of its seed and the token's index: the
same seed gives the same tokens alone, in company, and after a preemption, and no generator's state
has to be kept. The number picks a token by inverse transform sampling. Filters are applied in the
order of transformers' warpers: temperature, top-k, top-p (nucleus sampling, Holtzman et al. 2020),
min-p (Nguyen et al. 2024). Tokens that are exactly as probable as the last one kept are kept too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from aioengine.kernels.logits import MOST_PROBABLE, Choice, argmax, draw, draws, draws_on
from aioengine.kernels.transfer import Staged, StepBuffer
from aioengine.sampling.logits_processors import Adjuster, Adjustments
from aioengine.sampling.logprobs import Scores, chunk_rows, score
from aioengine.sampling.own_processors import OwnProcessors, Processed, process

__all__ = ["Constraint", "Sampled", "Sampler", "Sampling", "choose", "uniform"]

HEAD = 256
"""Tokens that are looked at first for top-p on a CPU: they nearly always hold enough."""
COLDEST = 1e-37
"""Smaller temperatures are taken for this; it is a normal float32."""


class Constraint(Protocol):
    """Says which tokens may come. Used on the thread that launches steps only."""

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor | None:
        """The tokens that may be number `output_index` of the output, with which `token_ids` end.

        int32 [ceil(vocab / 32)], one bit for each; None: all. Raises InvalidRequestError.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Sampling:
    """Sampling settings of one completion.

    `logprobs`: of so many tokens beside the chosen one, or None; `prompt_logprobs`: the same for
    each of `prompt_token_ids`; `processors`, then `adjustments` and `constraint`, come before all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_token_ids: tuple[int, ...] = ()
    adjustments: Adjustments | None = None
    constraint: Constraint | None = None
    processors: OwnProcessors | None = None

    @property
    def awaits_tokens(self) -> bool:
        """Return whether a token's logits cannot be changed before the one before is known."""
        return self.constraint is not None or self.processors is not None

    @property
    def may_bar_all(self) -> bool:
        """Return whether there may be no token left to choose."""
        return self.adjustments is not None or self.awaits_tokens

    @property
    def is_plain(self) -> bool:
        """Return whether all that is wanted is a token that is not banned."""
        if self.logprobs is not None or self.prompt_logprobs is not None or self.awaits_tokens:
            return False
        return self.adjustments is None or self.adjustments.only_bans

    def bans_at(self, index: int) -> Sequence[int]:
        """The tokens that may not be output token `index`, where there are only bans."""
        return () if self.adjustments is None else self.adjustments.banned_at(index)

    def choice(self, index: int) -> Choice:
        """The draw of output token `index`."""
        if not self.temperature:
            return MOST_PROBABLE
        temperature = max(self.temperature, COLDEST)
        pick = uniform(self.seed, index)
        return Choice(temperature, self.top_k, self.top_p, self.min_p, pick)


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids` [n] int64, and the scores of those `rows` that asked for log probabilities.

    `is_barred` [n] bool: nothing was left to choose from, and the token is one that may not come;
    None where all may. `processed`: what has come of the callers' own processors.
    """

    token_ids: Tensor
    is_barred: Tensor | None
    rows: tuple[int, ...] = ()
    scores: Scores | None = None
    processed: Processed | None = None


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that chooses output token `index` of a request with this seed."""
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    word = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
    return (word >> 11) * 2.0**-53


class Sampler:
    """Chooses tokens, and remembers those of sequences whose penalties depend on them."""

    def __init__(self) -> None:
        self._adjuster = Adjuster()

    @staticmethod
    def is_one_launch(device: torch.device) -> bool:
        """Return whether tokens that want nothing else are chosen by one launch, bans and all."""
        return draws_on(device)

    def sample(
        self,
        logits: Tensor,
        samplings: Sequence[Sampling],
        indices: Sequence[int],
        masks: Sequence[Tensor | None] = (),
    ) -> Sampled:
        """One token id per row of `logits` [n, vocab], by a buffer of its own: see `prepare`."""
        buffer = StepBuffer(logits.device)
        chosen_of = self.prepare(buffer, samplings, indices, logits.shape[-1])
        buffer.send()
        return chosen_of(logits, masks)

    def prepare(
        self,
        buffer: StepBuffer,
        samplings: Sequence[Sampling],
        indices: Sequence[int],
        vocab_size: int,
    ) -> Callable[[Tensor, Sequence[Tensor | None]], Sampled]:
        """Stage what the choice of a token for each of n sequences needs.

        `indices` are the output indices of the tokens; each sequence comes with 0, 1, 2 and so on.
        Returns what chooses, once the buffer has been sent: of logits [n, vocab], which may be
        overwritten, and one bit mask per row, or None (see `Adjuster`).
        """
        plain = _prepare_plain(buffer, samplings, indices, vocab_size)
        if plain is None:
            return self._prepare(buffer, samplings, indices, vocab_size)

        def chosen_of(logits: Tensor, masks: Sequence[Tensor | None]) -> Sampled:
            if not draws(logits):  # of a dtype that the operators of a CPU do not know
                return self._prepare(buffer, samplings, indices, vocab_size)(logits, masks)
            return Sampled(plain(logits), None)

        return chosen_of

    def _prepare(
        self,
        buffer: StepBuffer,
        samplings: Sequence[Sampling],
        indices: Sequence[int],
        vocab_size: int,
    ) -> Callable[[Tensor, Sequence[Tensor | None]], Sampled]:
        """The same for all that may be asked for."""
        scored = tuple(row for row, s in enumerate(samplings) if s.logprobs is not None)
        places = buffer.put(scored) if scored else None
        most = max((samplings[row].logprobs or 0 for row in scored), default=0)
        may_bar_all = any(s.may_bar_all for s in samplings)
        own = [(row, s.processors) for row, s in enumerate(samplings) if s.processors is not None]
        adjusting = self._adjuster.prepare(buffer, [(s.adjustments, s) for s in samplings], indices)
        drawn = _prepare_draws(buffer, samplings, indices, vocab_size)

        def chosen_of(logits: Tensor, masks: Sequence[Tensor | None]) -> Sampled:
            raw = None if places is None else logits[places.tensor]
            logits, processed = process(logits, own) if own else (logits, None)
            logits = adjusting.adjust(logits, masks)
            token_ids = _choose(logits, drawn)
            adjusting.note(token_ids)
            is_barred = None
            if may_bar_all:
                is_barred = logits.gather(-1, token_ids[:, None])[:, 0] == -torch.inf
            if raw is None or places is None:
                return Sampled(token_ids, is_barred, processed=processed)
            scores = score(raw, token_ids[places.tensor], most)
            return Sampled(token_ids, is_barred, scored, scores, processed)

        return chosen_of


def _prepare_plain(
    buffer: StepBuffer, samplings: Sequence[Sampling], indices: Sequence[int], vocab_size: int
) -> Callable[[Tensor], Tensor] | None:
    """Stage choices of tokens that want nothing else, for operators of our own.

    What is returned makes them, int64 [n] of logits [n, vocab]. None where there is more to do, or
    no such operator.
    """
    has_starts = draws_on(buffer.device)
    has_operator = has_starts or buffer.device.type == "cpu"
    if not has_operator or not all(s.is_plain for s in samplings):
        return None
    asked = [*zip(samplings, indices, strict=True)]
    banned = [() if s.adjustments is None else s.bans_at(index) for s, index in asked]
    if max(map(len, banned), default=0) >= vocab_size:
        return None
    numbers = [s.choice(index) if s.temperature else MOST_PROBABLE for s, index in asked]
    choices = buffer.put(chain.from_iterable(numbers), torch.float64)
    bans = buffer.put_varying(chain.from_iterable(banned))
    counts = [*map(len, banned)]
    where = accumulate(counts, initial=bans.first) if has_starts else counts
    places = buffer.put(where, torch.int32)

    def chosen_of(logits: Tensor) -> Tensor:
        return draw(logits, choices.tensor.view(len(asked), -1), bans.base, places.tensor)

    return chosen_of


@dataclass(frozen=True, slots=True, eq=False)
class _Filter:
    """The rows of a draw that a filter is for, by index [r] and on the device."""

    rows: Staged
    top_p: Staged
    top_k: Staged | None
    largest_k: int


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """Some sequences, all with a positive temperature, whose tokens are drawn at a time.

    `rows` [m]: in the batch, None for all of it; `temperature`, `min_p` and `picks` [m] float64;
    `choices` [m * 5] float64: all of it, for operators that take it so.
    """

    rows: Staged | None
    temperature: Staged
    min_p: Staged
    picks: Staged
    is_filtered: bool
    by_k: _Filter | None
    by_p: _Filter | None
    choices: Staged | None


def choose(logits: Tensor, samplings: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """One token id per row of `logits` [n, vocab] -> int64 [n] on the same device."""
    buffer = StepBuffer(logits.device)
    drawn = _prepare_draws(buffer, samplings, indices, logits.shape[-1])
    buffer.send()
    return _choose(logits, drawn)


def _prepare_draws(
    buffer: StepBuffer, samplings: Sequence[Sampling], indices: Sequence[int], vocab_size: int
) -> list[_Draw]:
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    size = chunk_rows(buffer.device, vocab_size)
    return [
        _prepare_draw(buffer, drawn[first : first + size], samplings, indices, vocab_size)
        for first in range(0, len(drawn), size)
    ]


def _prepare_draw(
    buffer: StepBuffer,
    rows: Sequence[int],
    samplings: Sequence[Sampling],
    indices: Sequence[int],
    vocab_size: int,
) -> _Draw:
    chosen = [samplings[row] for row in rows]

    def floats(values: Iterable[float]) -> Staged:
        return buffer.put(values, torch.float64)

    def filtered(places: list[int], *, by_k: bool) -> _Filter | None:
        if not places:
            return None
        top_k = [chosen[place].top_k for place in places]
        top_p = floats(chosen[place].top_p for place in places)
        staged = buffer.put(places), top_p, buffer.put(top_k) if by_k else None
        return _Filter(*staged, max(top_k))

    has_operator = buffer.device.type == "cpu" or draws_on(buffer.device)
    has_k = [0 < s.top_k < vocab_size for s in chosen]
    by_p = [i for i, s in enumerate(chosen) if s.top_p < 1 and not has_k[i]]
    return _Draw(
        rows=None if len(rows) == len(samplings) else buffer.put(rows),
        temperature=floats(max(s.temperature, COLDEST) for s in chosen),
        min_p=floats(s.min_p for s in chosen),
        picks=floats(uniform(samplings[row].seed, indices[row]) for row in rows),
        is_filtered=any(s.top_k or s.top_p < 1 or s.min_p for s in chosen),
        by_k=filtered([i for i, has in enumerate(has_k) if has], by_k=True),
        by_p=filtered(by_p, by_k=False),
        choices=floats(number for row in rows for number in samplings[row].choice(indices[row]))
        if has_operator
        else None,
    )


def _choose(logits: Tensor, drawn: Sequence[_Draw]) -> Tensor:
    """The most probable tokens [n] of `logits` [n, vocab], or those that are drawn."""
    token_ids = None
    for part in drawn:
        if part.rows is None:
            return _drawn(logits, part)
        token_ids = argmax(logits) if token_ids is None else token_ids
        token_ids[part.rows.tensor] = _drawn(logits[part.rows.tensor], part)
    return argmax(logits) if token_ids is None else token_ids


def _drawn(logits: Tensor, rows: _Draw) -> Tensor:
    """Random token ids [m] of `logits` [m, vocab]."""
    if rows.choices is not None and draws(logits):
        return draw(logits, rows.choices.tensor.view(len(logits), -1))
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logits = logits.to(dtype)
    # The largest becomes 0 before the division, so that a small temperature cannot overflow.
    weights = logits - logits.amax(dim=-1, keepdim=True)
    weights.div_(rows.temperature.tensor[:, None].to(dtype)).exp_()
    if rows.is_filtered:
        # The largest weight is 1.
        floor = rows.min_p.tensor[:, None].to(dtype, copy=True)
        for places, least in _thresholds(weights, rows):
            floor[places, 0] = torch.maximum(floor[places, 0], least)
        weights.masked_fill_(weights < floor, 0.0)
    return _invert(weights, rows.picks.tensor[:, None])


def _thresholds(weights: Tensor, draw: _Draw) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows [r], and the least weight [r] that top-k and top-p leave to each of them."""
    vocab, device = weights.shape[-1], weights.device
    if draw.by_k is not None and draw.by_k.top_k is not None:
        rows = draw.by_k.rows.tensor
        head = _descending(weights[rows], draw.by_k.largest_k)
        rank = torch.arange(head.shape[-1], device=device)
        head.masked_fill_(rank >= draw.by_k.top_k.tensor[:, None], 0.0)
        total = head.sum(-1, keepdim=True, dtype=torch.float64)
        yield rows, _nucleus(head, draw.by_k.top_p.tensor, total)
    if draw.by_p is None:
        return
    rows, top_p = draw.by_p.rows.tensor, draw.by_p.top_p.tensor
    if device.type == "cpu" and vocab > 8 * HEAD:
        some = weights[rows]
        head = _descending(some, HEAD)
        total = some.sum(-1, keepdim=True, dtype=torch.float64)
        least = _nucleus(head, top_p, total)
        # The head holds the nucleus where its last token is not needed.
        is_enough = head[:, -1] < least
        yield rows[is_enough], least[is_enough]
        rows, top_p = rows[~is_enough], top_p[~is_enough]
        if not len(rows):
            return
    head = _descending(weights[rows], vocab)
    total = head.sum(-1, keepdim=True, dtype=torch.float64)
    yield rows, _nucleus(head, top_p, total)


def _descending(weights: Tensor, width: int) -> Tensor:
    """The `width` largest weights of each row, the largest first."""
    if 8 * width <= weights.shape[-1]:
        return weights.topk(width, dim=-1).values
    return weights.sort(dim=-1, descending=True).values[:, :width]


def _nucleus(head: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """The least weight [m] of the smallest set that reaches the share `top_p` [m] of `total`.

    `head` [m, width] are the largest weights, descending, 0 where they do not count. Where they do
    not reach the share, the last of them that counts.
    """
    share = top_p[:, None] * total
    before = head.cumsum(-1, dtype=torch.float64) - head
    kept = (before < share) & (head > 0)
    last = kept.sum(-1, keepdim=True) - 1
    return head.gather(-1, last.clamp_min(0))[:, 0]


def _invert(weights: Tensor, picks: Tensor) -> Tensor:
    """The index [m] at which the cumulated `weights` [m, vocab] pass the share `picks` [m, 1]."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # Rounding must not reach the total: past it lie only tokens without a chance.
    target = torch.minimum(picks * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target, right=True)[:, 0]
    # Logits that are not numbers leave no weight at all: any token will do, but it must be one.
    return index.clamp_max(weights.shape[-1] - 1)
