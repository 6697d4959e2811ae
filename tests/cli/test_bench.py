"""`aioengine bench`: the load that it makes, and what it reports of it."""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioengine.cli import bench
from aioengine.cli.report import Record, make_report
from aioengine.types import EngineStatistics
from tests.cli.conftest import SIZES, Command
from tests.support.engines import running_engine
from tests.support.tiny import IMAGE, NUM_IMAGE_TOKENS

NO_ENGINE = EngineStatistics(
    **{name: 0 for name, f in EngineStatistics.__dataclass_fields__.items() if f.type == "int"},
    model_impl="native",
    stages={},
)


def options(**changes: Any) -> Namespace:
    settings = {
        "num_prompts": 3, "input_len": 20, "output_len": 4, "prefix_len": 0,
        "images_per_prompt": 0, "image_size": (24, 16), "request_rate": float("inf"), "seed": 0,
    }  # fmt: skip
    return Namespace(**{**settings, **changes})


def test_a_run_reports_what_it_did(command: Command, folder: Path) -> None:
    arguments = ("--num-prompts", "3", "--input-len", "20", "--output-len", "5", *SIZES)
    done = command("bench", folder, *arguments, "--json")
    assert done.status == 0
    *people, last = done.out.splitlines()
    report = json.loads(last)
    assert report["num_prompts"] == 3
    assert (report["prompt_tokens"], report["output_tokens"]) == (60, 15)
    assert report["encoder_items"] == report["preemptions"] == report["cached_prompt_tokens"] == 0
    assert report["output_tokens_per_s"] == pytest.approx(15 / report["duration_s"])
    assert report["total_tokens_per_s"] == pytest.approx(75 / report["duration_s"])
    for name in ("ttft_s", "itl_s", "e2e_s"):
        spread = report[name]
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= report["duration_s"]
    assert people[0].startswith("3 requests in ")
    assert people[2] == "60 prompt tokens, 0 of them cached; 15 output tokens; 0 preemptions"
    assert [line.split("  ")[0] for line in people[-3:]] == [
        "first token",
        "between tokens",
        "whole request",
    ]


def test_images_and_what_is_shared(command: Command, folder: Path) -> None:
    image_files = ("--images-per-prompt", "2", "--image-size", "40x36")
    shared = ("--prefix-len", "40", "--input-len", "48", "--max-num-seqs", "1")
    arguments = ("--num-prompts", "3", "--output-len", "1", *image_files, *shared, *SIZES)
    done = command("bench", folder, *arguments, "--json")
    report = json.loads(done.out.splitlines()[-1])
    # The tokenizer begins a prompt with a token of its own.
    assert report["prompt_tokens"] == 3 * (1 + 2 * NUM_IMAGE_TOKENS + 48)
    assert report["encoder_items"] == 6
    assert report["encoder_items_cached"] == 0
    assert report["itl_s"] is None
    assert "6 images, 0 cached" in done.out
    # Without images before it, the prefix is found by all but the first.
    done = command("bench", folder, "--num-prompts", "3", "--output-len", "1", *shared, *SIZES,
                   "--json")  # fmt: skip
    assert json.loads(done.out.splitlines()[-1])["cached_prompt_tokens"] == 2 * 32


def test_an_error_is_told_once(command: Command, folder: Path) -> None:
    done = command("bench", folder, "--input-len", "5000", *SIZES)
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[-1].startswith("aioengine: prompt has 50")
    assert "Traceback" not in done.err


async def test_the_seed_says_all(folder: Path) -> None:
    async with running_engine(folder) as engine:
        settings = {"images_per_prompt": 1, "prefix_len": 7}
        first, again, other = (
            bench._prompts(engine, options(seed=seed, **settings)) for seed in (1, 1, 2)
        )
    assert len(first) == 4
    assert [prompt.token_ids for prompt in first] == [prompt.token_ids for prompt in again]
    for prompt, same in zip(first, again, strict=True):
        (image,), (equal,) = prompt.media["image"], same.media["image"]
        assert image.shape == (16, 24, 3)
        assert np.array_equal(image, equal)
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True))
    assert len({tuple(prompt.token_ids or ())[-13:] for prompt in first}) == 4
    (prefix,) = {tuple(prompt.token_ids or ())[:-13] for prompt in first}
    assert len(prefix) == 1 + 1 + 7
    assert [i for i in prefix if i == IMAGE] == [IMAGE]


def test_requests_come_at_random_moments_of_the_given_rate() -> None:
    assert bench._moments(options()) == [0.0, 0.0, 0.0]
    moments = bench._moments(options(num_prompts=2000, request_rate=50.0))
    assert moments == bench._moments(options(num_prompts=2000, request_rate=50.0))
    gaps = [after - before for before, after in pairwise(moments)]
    assert min(gaps) > 0
    # Of an exponential distribution, mean and standard deviation are the same.
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.15)


def test_the_figures() -> None:
    records = [
        Record(10, [(0.5, 1), (0.7, 2), (1.1, 1)]),
        Record(20, [(1.5, 3)]),
    ]
    report = make_report(records, 2.0, NO_ENGINE, NO_ENGINE)
    assert report.requests_per_s == 1.0
    assert report.output_tokens_per_s == 3.5
    assert report.total_tokens_per_s == 18.5
    assert report.ttft_s.mean == report.ttft_s.p50 == pytest.approx(1.0)
    assert report.e2e_s.p50 == pytest.approx(1.3)
    assert report.itl_s is not None
    assert report.itl_s.p50 == pytest.approx(0.1), "two came together, each after half the wait"
    assert report.itl_s.mean == pytest.approx(0.2)
    alone = make_report(records[1:], 2.0, NO_ENGINE, NO_ENGINE)
    assert alone.itl_s is None
    assert alone.ttft_s.p99 == alone.ttft_s.p50 == pytest.approx(1.5)
