"""Keys and values in 8 bits: what an engine answers with them, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.execution import model_runner
from aioengine.execution.memory_budget import allocate_pages
from aioengine.kernels import attention
from aioengine.kernels.attention import register_backend
from aioengine.kernels.cpu import library
from aioengine.kernels.pool import BYTES, PageFormat
from aioengine.kernels.reference import ReferenceBackend
from tests.parity.trials import compare, makers
from tests.support.engines import running_engine
from tests.support.grids import rest_is_slow
from tests.support.tiny import save_tiny_llava, tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
FAMILIES = (
    "text llama", "text gemma2", "text gemma3", "text gpt2", "text qwen3", "text gpt-oss",
    "text gemma4", "gemma3", "qwen2-vl", "paligemma", "bart", "t5", "whisper",
)  # fmt: skip
BACKENDS = ("gather", "reference", *(["cpu"] if library.is_available() else []))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes") / "llava"
    save_tiny_llava(folder, hidden_size=128, intermediate_size=192)
    return folder


async def answer(folder: Path, **options: Any) -> RequestOutput:
    async with running_engine(folder, dtype="float32", **options) as engine:
        return await engine.generate(
            "See <image> and say more of it.", PARAMS, images=[tiny_image(1)]
        )


def scores(output: RequestOutput) -> list[float]:
    assert output.outputs[0].logprobs is not None
    return [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]


async def test_every_backend_reads_them_alike(folder: Path) -> None:
    plain = await answer(folder)
    found = [
        await answer(folder, kv_cache_dtype="int8", attention_backend=name) for name in BACKENDS
    ]
    for output in found:
        assert output.token_ids == found[0].token_ids
        assert scores(output) == pytest.approx(scores(found[0]), abs=2e-3)
    # The first token's keys and values are rounded too, and by little.
    assert 0 < abs(scores(found[0])[0] - scores(plain)[0]) < 0.1


async def test_a_block_takes_half_of_16_bits(folder: Path) -> None:
    totals = []
    for kind in ("auto", "int8"):
        async with running_engine(folder, dtype="bfloat16", kv_cache_dtype=kind) as engine:
            totals.append(engine.statistics().kv_blocks_total)
    plain, packed = totals
    dim = 128 // 4  # two bytes of scale to 32 of numbers
    assert packed / plain == pytest.approx(2 * dim / (dim + 2), rel=0.01)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", rest_is_slow(["auto", "gather"], ["auto"]))
def test_families_stay_near_their_own_module(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, windows, sinks, shared layers, media and cross-attention, by the trial's prompts."""

    def in_bytes(model: Any, limits: Any, _: PageFormat, num_spare: int) -> Any:
        return allocate_pages(model, limits, PageFormat(BYTES), num_spare)

    folder = tmp_path / "model"
    makers()[name](folder).save_pretrained(folder)
    plain = compare(folder, torch.float32, 1, backend)
    monkeypatch.setattr(model_runner, "allocate_pages", in_bytes)
    packed = compare(folder, torch.float32, 1, backend)
    for before, after in zip(plain, packed, strict=True):
        assert before.distance < 1e-4
        # Random weights drawn wide: what reads something else is some 1.4 apart.
        assert 1e-4 < after.distance < 0.25


async def test_what_cannot_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype") as caught:
        AsyncEngine.from_pretrained(folder, kv_cache_dtype="fp8")
    assert caught.value.parameter == "kv_cache_dtype"

    class Plain(ReferenceBackend):
        name = "plain"
        takes_bytes = False

    monkeypatch.setattr(attention, "_FACTORIES", dict(attention._FACTORIES))
    register_backend("plain", Plain)
    with pytest.raises(ModelLoadError, match=r"int8.*'plain'.*takes_bytes"):
        await answer(folder, kv_cache_dtype="int8", attention_backend="plain")
