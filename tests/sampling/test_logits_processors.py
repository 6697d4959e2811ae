"""Logits are adjusted as transformers' processors do it, row by row whatever the company."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from aioengine.kernels.transfer import StepBuffer
from aioengine.sampling.logits_processors import Adjuster, Adjusting, Adjustments, Asked

VOCAB = 24
EOS = 5


class Owner:
    """A completion."""


def logits_of(*seeds: int) -> Tensor:
    rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3 for seed in seeds]
    return torch.stack(rows)


def reference(logits: Tensor, a: Adjustments, output: list[int]) -> Tensor:
    """One row through transformers' own processors; penalties by OpenAI's formula."""
    whole = torch.tensor([[*a.prompt_token_ids, *output]])
    scores = logits[None].clone()
    if a.allowed is not None:
        suppressed = [i for i in range(VOCAB) if i not in a.allowed]
        scores = SuppressTokensLogitsProcessor(suppressed)(whole, scores)
    early = LogitsProcessorList()
    if a.bias:
        early.append(SequenceBiasLogitsProcessor({(i,): value for i, value in a.bias}))
    if a.banned:
        start = len(a.prompt_token_ids)
        for token_id, until in a.banned:
            early.append(MinNewTokensLengthLogitsProcessor(start, until, [token_id]))
    scores = early(whole, scores)
    if a.bad_words:
        # Only what the output holds counts. The number before it is in no word: some versions take
        # a word for one only where there are as many tokens before its last as it has in all.
        words = [list(word) for word in a.bad_words]
        mine = torch.tensor([[VOCAB, *output]])
        scores = NoBadWordsLogitsProcessor(words)(mine, scores)
    if a.repetition_penalty != 1 and whole.numel():
        scores = RepetitionPenaltyLogitsProcessor(a.repetition_penalty)(whole, scores)
    for token_id in set(output):
        scores[0, token_id] -= a.frequency_penalty * output.count(token_id) + a.presence_penalty
    return scores[0]


def prepared(adjuster: Adjuster, rows: Sequence[Asked], lengths: Sequence[int]) -> Adjusting:
    """A step's adjustments, staged and sent."""
    buffer = StepBuffer("cpu")
    adjusting = adjuster.prepare(buffer, rows, lengths)
    buffer.send()
    return adjusting


tokens = st.integers(0, VOCAB - 1)
adjustments = st.builds(
    Adjustments,
    allowed=st.none() | st.lists(tokens, min_size=1, unique=True).map(torch.tensor),
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.5, 100.0])).map(
        lambda found: tuple(found.items())
    ),
    banned=st.sampled_from([(), ((EOS, 0),), ((EOS, 3),), ((EOS, 3), (1, 1)), ((2, 2), (EOS, 1))]),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    prompt_token_ids=st.lists(tokens, max_size=6).map(tuple),
)


@given(
    owners=st.lists(st.none() | adjustments, min_size=1, max_size=5),
    choices=st.lists(tokens, min_size=40, max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_rows_are_what_transformers_makes_of_them(
    owners: list[Adjustments | None], choices: list[int]
) -> None:
    adjuster, drawn = Adjuster(), itertools.cycle(choices)
    outputs: list[list[int]] = [[] for _ in owners]
    rows = [(owner, Owner()) for owner in owners]
    for step in range(5):
        logits = logits_of(*(100 * step + row for row in range(len(owners))))
        adjusting = prepared(adjuster, rows, [step] * len(owners))
        found = adjusting.adjust(logits.clone())
        for row, owner in enumerate(owners):
            wanted = logits[row] if owner is None else reference(logits[row], owner, outputs[row])
            torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=1e-5)
        chosen = torch.tensor([next(drawn) for _ in owners])
        adjusting.note(chosen)
        for output, token_id in zip(outputs, chosen.tolist(), strict=True):
            output.append(token_id)


def test_sequences_come_and_go() -> None:
    """What one sequence has said is not held against the next one in its place."""
    adjuster = Adjuster()
    penalty = Adjustments(frequency_penalty=1.0)
    stays = penalty, Owner()
    for round_number in range(20):
        owners = [stays, *((penalty, Owner()) for _ in range(3))]
        logits = torch.zeros(4, VOCAB)
        adjusting = prepared(adjuster, owners, [round_number, 0, 0, 0])
        found = adjusting.adjust(logits)
        assert found[0].sum() == -round_number
        assert not found[1:].any()
        adjusting.note(torch.tensor([3, 4, 4, 4]))
        del owners, adjusting
        gc.collect()
    assert adjuster._histories._table is not None
    assert len(adjuster._histories._table) < 16, "the slots of those that are gone are used again"


def test_nothing_asked_is_nothing_done() -> None:
    logits = logits_of(1, 2).to(torch.bfloat16)
    assert prepared(Adjuster(), [(None, Owner())] * 2, [0, 0]).adjust(logits) is logits
    assert not Adjustments().is_active


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype(dtype: torch.dtype) -> None:
    owner = Adjustments(bias=((1, 2.0),), repetition_penalty=2.0, prompt_token_ids=(2,))
    logits = logits_of(1).to(dtype)
    found = prepared(Adjuster(), [(owner, Owner())], [0]).adjust(logits.clone())
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = reference(logits[0].to(found.dtype), owner, [])
    torch.testing.assert_close(found[0], wanted)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_bit_masks(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    may_come = torch.rand(2, vocab, generator=generator) < 0.5
    words = torch.zeros(2, -(-vocab // 32), dtype=torch.int64)
    for row, column in may_come.nonzero().tolist():
        words[row, column // 32] |= 1 << column % 32
    masks = words.to(torch.int32)
    logits = torch.randn(3, vocab, generator=generator)
    rows = [(None, Owner())] * 3
    found = prepared(Adjuster(), rows, [0] * 3).adjust(logits.clone(), [masks[0], None, masks[1]])
    torch.testing.assert_close(found[1], logits[1])
    for row, place in ((0, 0), (2, 1)):
        wanted = logits[row].masked_fill(~may_come[place], -torch.inf)
        torch.testing.assert_close(found[row], wanted)
