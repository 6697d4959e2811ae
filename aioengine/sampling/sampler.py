"""Sampling of token ids from logits, for all sequences of a step at once.

Each sequence needs one uniform number, drawn from a hash of its seed and the token's index: the
same seed gives the same tokens alone, in company, and after a preemption, and no generator's state
has to be kept. The number picks a token by inverse transform sampling. Filters are applied in the
order of transformers' warpers: temperature, top-k, top-p (nucleus sampling, Holtzman et al. 2020),
min-p (Nguyen et al. 2024). Tokens that are exactly as probable as the last one kept are kept too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aioengine.kernels.transfer import upload
from aioengine.sampling.logits_processors import Adjuster, Adjustments
from aioengine.sampling.logprobs import Scores, chunk_rows, score

__all__ = ["Constraint", "Sampled", "Sampler", "Sampling", "choose", "uniform"]

HEAD = 256
"""Tokens that are looked at first for top-p on a CPU: they nearly always hold enough."""
COLDEST = 1e-37
"""Smaller temperatures are taken for this; it is a normal float32."""


class Constraint(Protocol):
    """Says which tokens may come. Used on the thread that launches steps only."""

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor:
        """The tokens that may be number `output_index` of the output, with which `token_ids` end.

        int32 [ceil(vocab / 32)], one bit for each. Raises InvalidRequestError.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Sampling:
    """Sampling settings of one completion.

    `logprobs`: of so many tokens beside the chosen one, or None; `prompt_logprobs`: the same for
    each of `prompt_token_ids`; `adjustments` and `constraint` come before all.
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids` [n] int64, and the scores of those `rows` that asked for log probabilities.

    `is_barred` [n] bool: nothing was left to choose from, and the token is one that may not come;
    None where all may.
    """

    token_ids: Tensor
    is_barred: Tensor | None
    rows: tuple[int, ...] = ()
    scores: Scores | None = None


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that chooses output token `index` of a request with this seed."""
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    word = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
    return (word >> 11) * 2.0**-53


class Sampler:
    """Chooses tokens, and remembers those of sequences whose penalties depend on them."""

    def __init__(self) -> None:
        self._adjuster = Adjuster()

    def sample(
        self,
        logits: Tensor,
        samplings: Sequence[Sampling],
        indices: Sequence[int],
        masks: Sequence[Tensor | None] = (),
    ) -> Sampled:
        """One token id per row of `logits` [n, vocab], which may be overwritten.

        `indices` are the output indices of the tokens; each sequence comes with 0, 1, 2 and so on.
        `masks`: one bit mask per row, or None (see `Adjuster`).
        """
        scored = tuple(row for row, s in enumerate(samplings) if s.logprobs is not None)
        places = upload(scored, logits.device) if scored else None
        raw = None if places is None else logits[places]
        asked = [(s.adjustments, s) for s in samplings]
        logits = self._adjuster.adjust(logits, asked, indices, masks)
        token_ids = choose(logits, samplings, indices)
        self._adjuster.note(token_ids, asked, indices)
        is_barred = None
        if any(s.adjustments or s.constraint for s in samplings):
            is_barred = logits.gather(-1, token_ids[:, None])[:, 0] == -torch.inf
        if raw is None or places is None:
            return Sampled(token_ids, is_barred)
        most = max(samplings[row].logprobs or 0 for row in scored)
        return Sampled(token_ids, is_barred, scored, score(raw, token_ids[places], most))


def choose(logits: Tensor, samplings: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """One token id per row of `logits` [n, vocab] -> int64 [n] on the same device."""
    token_ids = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    size = chunk_rows(logits)
    for first in range(0, len(drawn), size):
        rows = drawn[first : first + size]
        picks = [uniform(samplings[row].seed, indices[row]) for row in rows]
        places = upload(rows, logits.device)
        some = logits if len(rows) == len(logits) else logits[places]
        token_ids[places] = _draw(some, [samplings[row] for row in rows], picks)
    return token_ids


def _draw(logits: Tensor, samplings: Sequence[Sampling], picks: Sequence[float]) -> Tensor:
    """Random token ids [m] of `logits` [m, vocab], all with a positive temperature."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logits = logits.to(dtype)
    temperature = _column([max(s.temperature, COLDEST) for s in samplings], logits.device)
    # The largest becomes 0 before the division, so that a small temperature cannot overflow.
    weights = logits - logits.amax(dim=-1, keepdim=True)
    weights.div_(temperature.to(dtype)).exp_()
    # The largest weight is 1.
    floor = _column([s.min_p for s in samplings], logits.device).to(dtype)
    for rows, least in _thresholds(weights, samplings):
        floor[rows, 0] = torch.maximum(floor[rows, 0], least)
    if any(s.top_k or s.top_p < 1 or s.min_p for s in samplings):
        weights.masked_fill_(weights < floor, 0.0)
    return _invert(weights, _column(picks, logits.device))


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    """Numbers for the rows of a batch: float64 [m, 1]."""
    return upload(values, device, torch.float64)[:, None]


def _thresholds(weights: Tensor, samplings: Sequence[Sampling]) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows [r], and the least weight [r] that top-k and top-p leave to each of them."""
    vocab, device = weights.shape[-1], weights.device
    by_k = [row for row, s in enumerate(samplings) if 0 < s.top_k < vocab]
    if by_k:
        rows = upload(by_k, device)
        top_k = [samplings[row].top_k for row in by_k]
        head = _descending(weights[rows], max(top_k))
        rank = torch.arange(head.shape[-1], device=device)
        head.masked_fill_(rank >= upload(top_k, device)[:, None], 0.0)
        total = head.sum(-1, keepdim=True, dtype=torch.float64)
        yield rows, _nucleus(head, [samplings[row].top_p for row in by_k], total)
    by_p = [row for row, s in enumerate(samplings) if s.top_p < 1 and not 0 < s.top_k < vocab]
    if by_p and device.type == "cpu" and vocab > 8 * HEAD:
        rows = upload(by_p, device)
        some = weights[rows]
        head = _descending(some, HEAD)
        total = some.sum(-1, keepdim=True, dtype=torch.float64)
        least = _nucleus(head, [samplings[row].top_p for row in by_p], total)
        # The head holds the nucleus where its last token is not needed.
        is_enough = head[:, -1] < least
        yield rows[is_enough], least[is_enough]
        by_p = [row for row, yes in zip(by_p, is_enough.tolist(), strict=True) if not yes]
    if by_p:
        rows = upload(by_p, device)
        head = _descending(weights[rows], vocab)
        total = head.sum(-1, keepdim=True, dtype=torch.float64)
        yield rows, _nucleus(head, [samplings[row].top_p for row in by_p], total)


def _descending(weights: Tensor, width: int) -> Tensor:
    """The `width` largest weights of each row, the largest first."""
    if 8 * width <= weights.shape[-1]:
        return weights.topk(width, dim=-1).values
    return weights.sort(dim=-1, descending=True).values[:, :width]


def _nucleus(head: Tensor, top_p: Sequence[float], total: Tensor) -> Tensor:
    """The least weight [m] of the smallest set whose weights reach the share `top_p` of `total`.

    `head` [m, width] are the largest weights, descending, 0 where they do not count. Where they do
    not reach the share, the last of them that counts.
    """
    share = _column(top_p, head.device) * total
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
