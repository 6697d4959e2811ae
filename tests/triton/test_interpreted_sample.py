"""Tokens chosen by Triton's kernel: those that the sampler chooses in PyTorch."""

from __future__ import annotations

import random as pseudo

import numpy as np
import pytest
import torch
from torch import Tensor

from aioengine.kernels.triton.sample import draw
from aioengine.sampling import sampler
from aioengine.sampling.sampler import Sampling, choose

VOCABS = (1, 7, 300, 5000)


def random_logits(count: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, vocab, generator=generator)).to(dtype)


def choices_of(samplings: list[Sampling], index: int) -> Tensor:
    return torch.tensor([s.choice(index) for s in samplings], dtype=torch.float64)


def random_samplings(count: int, vocab: int, seed: int) -> list[Sampling]:
    source = pseudo.Random(seed)
    return [
        Sampling(
            temperature=source.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=source.choice([0, 0, 1, 3, 40, vocab, vocab + 5]),
            top_p=source.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
            min_p=source.choice([0.0, 0.0, 0.05, 0.5]),
            seed=number,
        )
        for number in range(count)
    ]


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with takes none of our operators."""
    monkeypatch.setattr(sampler, "draws", lambda _: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_kind_of_choice(vocab: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        logits, samplings = random_logits(12, vocab, seed, dtype), random_samplings(12, vocab, seed)
        expected = choose(logits.clone(), samplings, [seed] * 12)
        assert draw(logits, choices_of(samplings, seed)).tolist() == expected.tolist()


def test_a_choice_does_not_depend_on_company() -> None:
    logits, samplings = random_logits(6, 300, 0), random_samplings(6, 300, 0)
    choices = choices_of(samplings, 1)
    together = draw(logits, choices).tolist()
    assert [draw(logits[i : i + 1], choices[i : i + 1]).item() for i in range(6)] == together


def test_tokens_come_as_often_as_they_are_probable() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    count = 400
    samplings = [Sampling(temperature=1.0, top_k=3, seed=seed) for seed in range(count)]
    found = draw(logits.expand(count, 4).contiguous(), choices_of(samplings, 0))
    shares = torch.bincount(found, minlength=4) / count
    expected = logits[0, :3].softmax(0)
    assert shares[3] == 0 and (shares[:3] - expected).abs().max() < 0.06


def test_equal_tokens_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    samplings = [Sampling(temperature=1.0, top_k=2, seed=seed) for seed in range(40)]
    found = draw(logits.expand(40, 5).contiguous(), choices_of(samplings, 0)).tolist()
    assert set(found) == {1, 2, 3}
    assert found == choose(logits.expand(40, 5), samplings, [0] * 40).tolist()


def test_banned_tokens_never_come() -> None:
    logits, vocab = random_logits(3, 300, 5), 300
    best = logits.argsort(descending=True)
    banned = [best[0, :200].tolist(), [], [best[2, 0].item()]]
    flat = torch.tensor([token for each in banned for token in each], dtype=torch.int32)
    starts = torch.tensor([0, 200, 200, 201], dtype=torch.int32)
    samplings = [Sampling(), Sampling(), Sampling(temperature=1.0, top_k=1)]
    assert vocab == logits.shape[1]
    found = draw(logits, choices_of(samplings, 0), flat, starts).tolist()
    assert found == [best[0, 200].item(), best[1, 0].item(), best[2, 1].item()]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_any_token_comes_of_what_are_no_logits(value: float) -> None:
    logits = torch.full((4, 300), value)
    logits[1, 7], logits[3, 9] = 1.0, 2.0
    samplings = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=2.0, top_p=0.5)]
    samplings.append(Sampling(temperature=1.0, top_k=4, min_p=0.1))
    with np.errstate(all="ignore"):
        found = draw(logits, choices_of(samplings, 0)).tolist()
    assert all(0 <= token < 300 for token in found)


def test_rows_that_lie_apart_and_none() -> None:
    logits, samplings = random_logits(5, 600, 2), random_samplings(5, 300, 2)
    expected = choose(logits[:, :300].clone(), samplings, [0] * 5)
    assert draw(logits[:, :300], choices_of(samplings, 0)).tolist() == expected.tolist()
    assert draw(logits[:0], choices_of([], 0)).shape == (0,)
