"""Where all products run in our kernels, a request gets the same to the last bit in any company.

float64 tells nothing apart that rounding would; here the narrow types themselves are held to it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioengine import RequestOutput, SamplingParams
from aioengine.kernels.cpu import library
from tests.support.engines import encoded, running_engine
from tests.support.tiny import save_tiny_llava, tiny_image

pytestmark = pytest.mark.skipif(
    not library.is_available() or library.instruction_set() == "generic",
    reason="here PyTorch multiplies, whose rounding depends on the number of rows",
)

TEXTS = ["hello", "What is this? " * 7, "one two three " * 12, "a"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bits") / "llava"
    # As wide as the instructions for bfloat16 want it.
    save_tiny_llava(folder, hidden_size=128, intermediate_size=192)
    return folder


def bits(output: RequestOutput) -> Any:
    return output.token_ids, output.outputs[0].logprobs


async def ask(engine: Any, number: int) -> RequestOutput:
    text = TEXTS[number % len(TEXTS)]
    if number < len(TEXTS):
        return await engine.generate(text, PARAMS)
    image = encoded(tiny_image(number))
    return await engine.generate(f"<image>{text}", PARAMS, images=[image])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_in_any_company(folder: Path, dtype: str, kv_cache_dtype: str) -> None:
    """Alone, all at once, with the prefixes of before, and cut into chunks of 16 tokens."""
    count = 2 * len(TEXTS)
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    async with running_engine(folder, **options) as engine:
        alone = []
        for number in range(count):
            await engine.reset_caches()
            alone.append(bits(await ask(engine, number)))
        await engine.reset_caches()
        together = await asyncio.gather(*(ask(engine, number) for number in range(count)))
        again = await asyncio.gather(*(ask(engine, number) for number in range(count)))
        assert any(output.usage.cached_tokens for output in again)
    assert len({str(each) for each in alone}) == count
    assert [bits(output) for output in together] == alone
    assert [bits(output) for output in again] == alone
    async with running_engine(folder, **options, max_num_batched_tokens=16) as engine:
        in_chunks = await asyncio.gather(*(ask(engine, number) for number in range(count)))
    assert [bits(output) for output in in_chunks] == alone


async def test_scores_of_prompts(folder: Path) -> None:
    """They want all rows of the last layer: beside others, and with those who want one row each."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    found = []
    for is_packed in (True, False):
        async with running_engine(folder, dtype="float32", packed_layers=is_packed) as engine:
            asked = [engine.generate(text, params) for text in TEXTS]
            outputs = await asyncio.gather(*asked, *(ask(engine, n) for n in range(len(TEXTS))))
        scores = [output.prompt_logprobs for output in outputs[: len(TEXTS)]]
        found.append([[max(s.logprob for s in each.values()) for each in of[1:]] for of in scores])
    assert any(len(scores) > 20 for scores in found[0])
    for packed, plain in zip(*found, strict=True):
        assert packed == pytest.approx(plain, abs=1e-4)
