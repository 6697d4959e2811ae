"""Logits processors of the caller's own, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.sampling.own_processors import OwnProcessors, process
from aioengine.sampling.sampler import Sampler, Sampling

VOCAB = 50


def test_tokens_are_noted_once() -> None:
    seen: list[Sequence[int]] = []

    def look(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(token_ids)
        return logits

    own = OwnProcessors([look])
    # The last input tokens of each step; one is planned again, with the prompt, after a preemption.
    for token_ids, index in (((8, 9), 0), ((1,), 1), ((2,), 2), ((8, 9, 1, 2), 2), ((3,), 3)):
        own.take(token_ids, index)
        own.run(torch.zeros(VOCAB))
    assert seen == [(), (1,), (1, 2), (1, 2), (1, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_other_rows_stay_as_they_are(dtype: torch.dtype) -> None:
    def nothing(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits.resize_(0)

    def zero(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits.zero_()

    def unfit(token_ids: Sequence[int], logits: Tensor) -> Any:
        return logits.fill_(float("inf"))

    given = torch.randn(5, VOCAB).to(dtype)
    asked = [
        (row, OwnProcessors(each)) for row, each in ((1, [nothing]), (2, [zero]), (4, [unfit]))
    ]
    logits, processed = process(given.clone(), asked)
    assert logits.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.equal(logits[[0, 1, 3]], given[[0, 1, 3]].to(logits.dtype))
    assert not logits[2].any()
    assert processed.are_numbers is not None
    assert [*processed.failures] == [1]
    assert sorted(processed.read(processed.are_numbers.tolist())) == [1, 4]
    assert processed.start <= processed.end


def test_log_probabilities_are_the_models_own() -> None:
    def first(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        logits[0] += 100
        return logits

    logits = torch.randn(2, VOCAB)
    plain = Sampling(logprobs=3)
    changed = Sampling(logprobs=3, processors=OwnProcessors([first]))
    assert plain.awaits_tokens is False and changed.awaits_tokens and not changed.is_plain
    found = Sampler().sample(logits.clone(), [changed, plain], [0, 0])
    assert found.token_ids.tolist() == [0, int(logits[1].argmax())]
    assert found.scores is not None
    own, _ = found.scores.read([3, 3])
    wanted = logits[0].log_softmax(-1)[0]
    assert own[0].logprob == pytest.approx(float(wanted), abs=1e-5)
