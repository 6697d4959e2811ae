"""Log probabilities of tokens as the model gives them, before adjustments and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aioengine.kernels.transfer import to_host
from aioengine.sampling.prompt_logprobs import ScoreColumns
from aioengine.types import Logprob, TokenLogprobs

__all__ = ["CHUNK_NUMBERS", "Scores", "score"]

CHUNK_NUMBERS = 1 << 22
"""Logits that are worked on at a time, here and in sampling, which bounds the memory taken."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities at m positions: the given tokens and the `k` most probable ones.

    `token_ids`, `ranks` int64 [m] and `logprobs` float32 [m]; `top_ids` int64 and `top_logprobs`
    float32 [m, k].
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_host(self) -> Scores:
        """The same on its way to the host: to be read when the work launched so far is done."""
        columns = self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs
        return Scores(*map(to_host, columns))

    def columns(self) -> ScoreColumns:
        """The same as arrays, of the host; shares their memory."""
        return ScoreColumns(
            *(
                column.numpy()
                for column in (
                    self.token_ids,
                    self.logprobs,
                    self.ranks,
                    self.top_ids,
                    self.top_logprobs,
                )
            )
        )

    def read(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """List for each position the given token, then so many (`counts`) of the most probable
        ones."""
        read: list[TokenLogprobs] = []
        rows = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            counts,
            strict=True,
        )
        for token_id, logprob, rank, top_ids, top_logprobs, count in rows:
            found = {token_id: Logprob(logprob, rank)}
            others = zip(top_ids[:count], top_logprobs[:count], strict=True)
            for place, (other, value) in enumerate(others, 1):
                found.setdefault(other, Logprob(value, place))
            read.append(found)
        return read


def score(logits: Tensor, token_ids: Tensor, count: int) -> Scores:
    """Scores of `token_ids` [m] and of the `count` most probable tokens, from `logits` [m, vocab].

    The rank of a token is one more than the number of tokens that are more probable.
    """
    size = max(1, CHUNK_NUMBERS // logits.shape[-1])
    count = min(count, logits.shape[-1])
    parts = []
    for first in range(0, len(logits), size):
        logprobs = logits[first : first + size].float().log_softmax(-1)
        given = token_ids[first : first + size, None]
        chosen = logprobs.gather(-1, given)
        ranks = (logprobs > chosen).sum(-1) + 1
        top = logprobs.topk(count, dim=-1)
        parts.append((given[:, 0], chosen[:, 0], ranks, top.indices, top.values))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))
