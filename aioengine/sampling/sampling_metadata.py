"""Conversion of sampling parameters for the scheduler and the sampler."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aioengine.core.request import StopRule
from aioengine.errors import InvalidRequestError
from aioengine.sampling.logits_processors import Adjustments
from aioengine.sampling.own_processors import OwnProcessors
from aioengine.sampling.sampler import Constraint, Sampling
from aioengine.sampling_params import SamplingParams

__all__ = ["SamplingContext"]


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """Properties of the model that matter here. `vocab_size`: logits per position; `suppress`:
    tokens that it must never say, `begin_suppress`: nor begin with, by its generation config.
    """

    tokenizer: Any
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()

    def stop_rule(self, params: SamplingParams) -> StopRule:
        """Build the conditions under which a completion ends by itself."""
        return StopRule(
            max_tokens=params.max_tokens or self.max_model_len,
            min_tokens=params.min_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
        )

    def samplings(
        self,
        params: SamplingParams,
        prompt_token_ids: tuple[int, ...],
        constraints: Sequence[Constraint],
    ) -> list[Sampling]:
        """Build the sampling settings of each of the `n` completions.

        `constraints`: one for each, or none. The i-th uses the seed plus i, so that the first of
        several is what a single one would be. Raises InvalidRequestError for token ids that the
        model does not have.
        """
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", tuple(params.logit_bias or ()))
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        seed = secrets.randbits(63) if params.seed in (None, -1) else params.seed
        assert seed is not None
        adjustments = self._adjustments(params, prompt_token_ids)
        own = tuple(params.logits_processors or ())
        return [
            Sampling(
                temperature=params.temperature,
                top_k=max(0, params.top_k),
                top_p=params.top_p,
                min_p=params.min_p,
                seed=seed + index,
                logprobs=params.logprobs,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                prompt_token_ids=prompt_token_ids,
                adjustments=adjustments,
                constraint=constraints[index] if constraints else None,
                processors=OwnProcessors(own) if own else None,
            )
            for index in range(params.n)
        ]

    def forbidding(self, params: SamplingParams, token_ids: Sequence[int]) -> str | None:
        """Name the parameter by which an output cannot hold these tokens in a row; None if none."""
        if params.allowed_token_ids is not None and set(token_ids) - {*params.allowed_token_ids}:
            return "allowed_token_ids"
        row = tuple(token_ids)
        for word in self._bad_words(params.bad_words or ()):
            if any(row[start : start + len(word)] == word for start in range(len(row))):
                return "bad_words"
        return None

    def _adjustments(
        self, params: SamplingParams, prompt_token_ids: tuple[int, ...]
    ) -> Adjustments | None:
        """None where there is nothing to adjust, which is the usual case."""
        rule = self.stop_rule(params)
        ends = rule.eos_token_ids | rule.stop_token_ids if params.min_tokens else ()
        repeats = params.repetition_penalty != 1
        prompt = tuple(i for i in set(prompt_token_ids) if i < self.vocab_size) if repeats else ()
        bans = dict.fromkeys(self.begin_suppress, 1)
        bans |= {i: max(params.min_tokens, bans.get(i, 0)) for i in ends if i < self.vocab_size}
        biases = {i: float(bias) for i, bias in (params.logit_bias or {}).items() if bias}
        biases |= dict.fromkeys(self.suppress, float("-inf"))
        adjustments = Adjustments(
            allowed=None if params.allowed_token_ids is None else _sorted(params.allowed_token_ids),
            bias=tuple(biases.items()),
            banned=tuple(sorted(bans.items(), key=lambda ban: (-ban[1], ban[0]))),
            bad_words=self._bad_words(params.bad_words or ()),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            prompt_token_ids=prompt,
        )
        return adjustments if adjustments.is_active else None

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens, as they are at the beginning of a text and after a space."""
        forms = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
        encoded = [
            tuple(self.tokenizer.encode(form, add_special_tokens=False))
            for form in forms
            if form.strip()
        ]
        return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < self.vocab_size))

    def _check_ids(self, parameter: str, token_ids: Sequence[int]) -> None:
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            raise InvalidRequestError(
                f"{parameter} has the token id {largest}, but the model's go up to "
                f"{self.vocab_size - 1}; leave it out",
                parameter=parameter,
                value=largest,
            )


def _sorted(token_ids: Sequence[int]) -> Tensor:
    """The ids in order, each once: int64 [count]. They may be as many as the vocabulary."""
    return torch.from_numpy(np.unique(np.fromiter(token_ids, np.int64, len(token_ids))))
