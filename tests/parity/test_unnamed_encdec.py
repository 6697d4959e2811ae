"""Encoder-decoders of text that no class here names: as `generate`, or refused in words."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine
from aioengine.errors import ModelLoadError
from aioengine.models.encdec import text
from aioengine.models.runtime.registry import choose
from aioengine.models.runtime.transformers_model import TransformersModel
from tests.parity.test_encdec import (
    DECODERS,
    PARAMS,
    TEXTS,
    Saved,
    check_all,
    expect,
    options,
    prompts,
    save,
)
from tests.parity.unnamed_encdec import REFUSED, UNNAMED

DRAW = torch.Generator().manual_seed(5)


def save_unnamed(name: str, folder: Path) -> Saved:
    """The model is read again: sinusoidal positions are computed, and not saved."""
    model, tokenizer = save(UNNAMED[name], folder)
    if name.startswith("seamless"):  # which its checkpoints have
        hf.SeamlessM4TFeatureExtractor().save_pretrained(folder)
    model = type(model).from_pretrained(folder, dtype=torch.float64).eval()
    expected = [
        tuple(expect(model, tokenizer, text, decoder))
        for text, decoder in zip(TEXTS, DECODERS, strict=True)
    ]
    assert len(set(expected)) == len(expected), expected  # else equal tokens would prove nothing
    return Saved(folder, expected)


@pytest.fixture(scope="module", params=UNNAMED)
def unnamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_unnamed(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("budget", [512, 3])
async def test_tokens_equal_generate(unnamed: Saved, budget: int) -> None:
    async with AsyncEngine.from_pretrained(
        unnamed.folder, **options(max_num_batched_tokens=budget)
    ) as engine:
        assert engine.statistics().model_impl == "transformers"
        for index in (1, 3):
            output = await engine.generate(prompts()[index], PARAMS)
            assert output.token_ids == unnamed.expected[index]
        await engine.reset_caches()
        await check_all(engine, unnamed)
        await check_all(engine, unnamed)  # with prefix, encoder and cross-attention caches warm
        assert engine.statistics().prefix_hit_tokens > 0
        check_encoder_batches(engine._core.loaded.runner.model)


@torch.inference_mode()
def check_encoder_batches(model: TransformersModel) -> None:
    """Assert that what else an encoder reads at the same time changes nothing."""
    items = [{"input_ids": torch.randint(3, 300, (29,), generator=DRAW)} for _ in range(3)]
    for item, rows in zip(items, model.encode("text", items), strict=True):
        (alone,) = model.encode("text", [item])
        torch.testing.assert_close(rows, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_run_is_refused_without_its_weights(architecture: str) -> None:
    make, words = REFUSED[architecture]
    hf_config = make()
    hf_config.architectures = [architecture]
    begun = time.perf_counter()
    with pytest.raises(ModelLoadError, match=words) as caught:
        choose(hf_config).model_class.probe(hf_config)
    assert time.perf_counter() - begun < 5  # a second, on a machine that does nothing else
    assert architecture.removesuffix("ForConditionalGeneration") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "asked"), [("m2m100", "embeddings_by_position"), ("umt5", "bias_by_distance")]
)
async def test_the_trial_refuses_wrong_places(
    name: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_unnamed(name, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no verdict of another test
    right = getattr(text, asked)
    monkeypatch.setattr(text, asked, lambda *args: right(*args).roll(1, dims=-2))
    with pytest.raises(ModelLoadError, match="does not compute what the checkpoint's own module"):
        await AsyncEngine.from_pretrained(tmp_path, **options()).start()
