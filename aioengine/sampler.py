"""From logits to token ids, for all sequences of a step at once.

Each sequence needs one uniform number, drawn from a hash of its seed and the token's index: the
same seed gives the same tokens alone, in company, and after a preemption, and no generator's state
has to be kept. The number picks a token by inverse transform sampling. Filters are applied in the
order of transformers' warpers: temperature, top-k, top-p (nucleus sampling, Holtzman et al. 2020),
min-p (Nguyen et al. 2024).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampling", "sample", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request samples. `banned` token ids get no chance before `min_tokens` outputs."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    banned: tuple[int, ...] = ()

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are cut off."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that chooses output token `index` of a request with this seed."""
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    word = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
    return (word >> 11) * 2.0**-53


def sample(logits: Tensor, samplings: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """One token id per row of `logits` [n, vocab] -> int64 [n] on the same device.

    `indices` are the output indices of the tokens. May overwrite `logits`.
    """
    for row, (sampling, index) in enumerate(zip(samplings, indices, strict=True)):
        if index < sampling.min_tokens and sampling.banned:
            logits[row, list(sampling.banned)] = -torch.inf
    token_ids = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    # Apart, for one number picks different tokens from sorted and from unsorted weights.
    for is_filtered in (False, True):
        rows = [row for row in drawn if samplings[row].is_filtered is is_filtered]
        if rows:
            chosen = [(samplings[row], indices[row]) for row in rows]
            token_ids[rows] = _draw(logits[rows], chosen, is_filtered=is_filtered)
    return token_ids


def _draw(logits: Tensor, chosen: Sequence[tuple[Sampling, int]], *, is_filtered: bool) -> Tensor:
    """Random token ids [m] of `logits` [m, vocab], all with a positive temperature."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([sampling.temperature for sampling, _ in chosen])
    # The largest becomes 0 before the division, so that a tiny temperature cannot overflow.
    scores = logits.double() - logits.double().amax(dim=-1, keepdim=True)
    weights = torch.exp(scores / temperature)
    picks = column([uniform(sampling.seed, index) for sampling, index in chosen])
    if not is_filtered:
        return _invert(weights, picks)
    weights, order = weights.sort(dim=-1, descending=True, stable=True)
    weights = _cut(weights, [sampling for sampling, _ in chosen])
    return order.gather(-1, _invert(weights, picks)[:, None])[:, 0]


def _cut(weights: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Zero the weights [m, vocab], sorted downwards, that the filters cut off; one is kept."""
    vocab = weights.shape[-1]
    device = weights.device
    top_k = torch.tensor([s.top_k if s.top_k > 0 else vocab for s in samplings], device=device)
    rank = torch.arange(vocab, device=device)
    weights = weights.masked_fill(rank >= top_k[:, None], 0.0)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    before = weights.cumsum(-1) - weights
    beyond = (before >= top_p[:, None] * weights.sum(-1, keepdim=True)) & (top_p[:, None] < 1)
    min_p = torch.tensor([s.min_p for s in samplings], dtype=torch.float64, device=device)
    beyond |= weights < min_p[:, None] * weights[:, :1]
    beyond[:, 0] = False
    return weights.masked_fill(beyond, 0.0)


def _invert(weights: Tensor, picks: Tensor) -> Tensor:
    """The index [m] at which the cumulated `weights` [m, vocab] pass the share `picks` [m, 1]."""
    cumulated = weights.cumsum(-1)
    index = torch.searchsorted(cumulated, picks * cumulated[:, -1:], right=True)[:, 0]
    # Rounding may point past the last token that has a weight.
    last = (weights > 0).long().mul(torch.arange(1, weights.shape[-1] + 1, device=weights.device))
    # Logits that are not numbers leave no weight at all: any token will do, but it must be one.
    return torch.minimum(index, last.amax(-1) - 1).clamp_min(0)
