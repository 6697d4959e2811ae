"""Tokens are drawn as the parameters say, by seed, whatever the company.

Distributions are compared by Pearson's chi-square test with fixed seeds, so a run is repeatable;
with a fresh seed each comparison would raise a false alarm once in a million.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from aioengine.sampling.logits_processors import Adjustments
from aioengine.sampling.logprobs import chunk_rows
from aioengine.sampling.sampler import Sampler, Sampling, choose, uniform

VOCAB = 40
NUM_DRAWS = 20_000
Z_ONE_IN_A_MILLION = 4.7534
Probabilities = np.ndarray


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference(logits: torch.Tensor, sampling: Sampling) -> Probabilities:
    """The probabilities that the parameters mean, spelt out for one row."""
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        total, kept = weights.sum(), 0.0
        for token_id in order:
            if kept >= sampling.top_p * total:
                weights[token_id] = 0
            kept += weights[token_id]
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


def chi_square_threshold(freedom: int) -> float:
    """The value passed once in a million (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + Z_ONE_IN_A_MILLION * math.sqrt(spread)) ** 3


def draw(logits: torch.Tensor, sampling: Sampling, count: int = NUM_DRAWS) -> torch.Tensor:
    """`count` successive output tokens, from the same logits each time."""
    return choose(logits.expand(count, -1).clone(), [sampling] * count, range(count))


FILTERS = {
    "plain": Sampling(temperature=1.0),
    "cool": Sampling(temperature=0.5),
    "hot": Sampling(temperature=3.0),
    "top-k": Sampling(temperature=1.0, top_k=7),
    "top-k of one": Sampling(temperature=1.0, top_k=1),
    "top-k of more than all": Sampling(temperature=1.0, top_k=1000),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "top-p of next to nothing": Sampling(temperature=1.0, top_p=1e-9),
    "min-p": Sampling(temperature=1.0, min_p=0.1),
    "min-p of one": Sampling(temperature=1.0, min_p=1.0),
    "all": Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_are_those_of_the_reference(name: str, seed: int) -> None:
    sampling = FILTERS[name]
    logits = logits_of(seed)
    expected = reference(logits, sampling) * NUM_DRAWS
    counts = np.bincount(draw(logits, sampling).numpy(), minlength=VOCAB)
    assert not counts[expected == 0].any(), "a token that is cut off was drawn"
    common = expected >= 5  # the rare ones together, as the test needs large counts
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_threshold(len(wanted) - 1)


@pytest.mark.parametrize("name", FILTERS)
def test_the_reference_keeps_what_transformers_keeps(name: str) -> None:
    sampling = FILTERS[name]
    scores = logits_of(3).double()[None] / sampling.temperature
    ids = torch.zeros(1, 1, dtype=torch.long)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    expected = scores.softmax(-1)[0].numpy()
    np.testing.assert_allclose(reference(logits_of(3), sampling), expected, atol=1e-12)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@given(rows=st.lists(st.tuples(samplings, st.integers(0, 100)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=100)
def test_company_changes_no_token(rows: list[tuple[Sampling, int]]) -> None:
    logits = torch.stack([logits_of(row) for row in range(len(rows))])
    chosen, indices = [s for s, _ in rows], [i for _, i in rows]
    together = choose(logits.clone(), chosen, indices).tolist()
    alone = [
        choose(logits[row : row + 1].clone(), [sampling], [index]).item()
        for row, (sampling, index) in enumerate(rows)
    ]
    assert together == alone


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_large_vocabularies(name: str, spread: float) -> None:
    """Where the likeliest few hold enough, and where it takes nearly all tokens."""
    sampling, vocab, count = FILTERS[name], 4000, 2000
    logits = logits_of(9, vocab, spread)
    expected = reference(logits, sampling)
    tokens = draw(logits, sampling, count).numpy()
    assert (expected[tokens] > 0).all()
    order = np.argsort(-expected, kind="stable")
    groups = np.array_split(order[expected[order] > 0], 10)
    wanted = np.array([expected[group].sum() * count for group in groups])
    observed = np.array([np.isin(tokens, group).sum() for group in groups])
    observed, wanted = observed[wanted >= 5], wanted[wanted >= 5]
    if len(wanted) > 1:
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        assert statistic < chi_square_threshold(len(wanted) - 1)


def test_equally_probable_tokens_are_kept_together() -> None:
    logits = torch.zeros(VOCAB)
    logits[:10] = 5.0
    for filters in ({"top_k": 3}, {"top_p": 0.2}):
        tokens = draw(logits, Sampling(temperature=1.0, **filters), 2000)  # type: ignore[arg-type]
        assert set(tokens.tolist()) == set(range(10))


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    logits = logits_of(4)
    first, again, other = (
        draw(logits, Sampling(temperature=1.0, seed=seed), 200).tolist() for seed in (7, 7, 8)
    )
    assert first == again != other
    assert len(set(first)) > 5


def test_zero_temperature_is_the_most_probable_token_whatever_the_filters() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(20)])
    sampling = Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)
    found = choose(logits.clone(), [sampling] * 20, range(20))
    assert torch.equal(found, logits.argmax(-1))
    assert found.dtype == torch.int64


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
def test_extreme_temperatures_and_logits(
    temperature: float, scale: float, filters: dict[str, float]
) -> None:
    logits = logits_of(5) * scale
    sampling = Sampling(temperature=temperature, **filters)  # type: ignore[arg-type]
    tokens = draw(logits, sampling, 200)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCAB
    if scale / temperature >= 1e3:
        assert (tokens == logits.argmax()).all()


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_hopeless_logits_still_give_a_token(
    value: float, temperature: float, filters: dict[str, float]
) -> None:
    """Whatever a broken model or a ban on everything leaves, an id that no model has is worse."""
    logits = torch.full((VOCAB,), value)
    tokens = draw(logits, Sampling(temperature=temperature, **filters), 50)  # type: ignore[arg-type]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCAB


def test_a_broken_row_harms_no_other() -> None:
    logits = torch.stack([logits_of(6), torch.full((VOCAB,), math.nan), logits_of(7)])
    sampling = Sampling(temperature=1.0, seed=3)
    found = choose(logits.clone(), [sampling] * 3, [0, 0, 0])
    for row in (0, 2):
        alone = choose(logits[row : row + 1].clone(), [sampling], [0])
        assert found[row] == alone[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tokens_without_a_chance_are_never_drawn(dtype: torch.dtype) -> None:
    logits = logits_of(8).to(dtype)
    logits[::2] = -torch.inf
    assert (draw(logits, Sampling(temperature=1.0), 2000) % 2 == 1).all()


def test_uniform_numbers_are_uniform() -> None:
    numbers = np.array([uniform(seed, index) for seed in range(-50, 50) for index in range(200)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert len(set(numbers)) == len(numbers)
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    statistic = ((counts - 200) ** 2 / 200).sum()
    assert statistic < chi_square_threshold(99)


def test_uniform_takes_every_seed_that_a_request_may_have() -> None:
    seeds = (-(2**63), -1, 0, 2**63, 2**64 - 1)
    assert len({uniform(seed, 0) for seed in seeds}) == len(seeds)


def test_scores_are_those_of_the_model_whatever_is_done_to_the_logits() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    plain = Sampling(temperature=0.0)
    changed = Adjustments(bias=((3, 50.0),))
    samplings = [Sampling(logprobs=2, adjustments=changed), plain, Sampling(logprobs=0)]
    sampled = Sampler().sample(logits.clone(), samplings, [0, 0, 0])
    assert sampled.rows == (0, 2)
    assert sampled.scores is not None
    first, last = sampled.scores.read([2, 0])
    logprobs = logits.log_softmax(-1)
    assert next(iter(first)) == 3 and first[3].logprob == pytest.approx(logprobs[0, 3].item())
    assert first[3].rank == (logits[0] > logits[0, 3]).sum() + 1
    best = logits[0].argsort(descending=True)[:2].tolist()
    assert [token_id for token_id in first if token_id != 3] == [i for i in best if i != 3]
    assert [first[token_id].rank for token_id in best] == [1, 2]
    top = int(logits[2].argmax())
    assert last == {top: (pytest.approx(logprobs[2, top].item()), 1)}


def test_a_device_works_on_many_rows_at_a_time() -> None:
    vocab = 150_000
    cpu, other = torch.device("cpu"), torch.device("cuda")
    assert 1 <= chunk_rows(cpu, vocab) < 256
    assert chunk_rows(other, vocab) >= 256
    assert chunk_rows(other, 1 << 27) == 1
