"""Steps of every family on the simulated device: no step of a decoder makes its thread wait, and
each is one copy to the device and one back.

Rows of tests/parity/measured_rows.py are tiny models. Each is loaded on the device, where it is
tried against its own module, and answers two of its prompts together, greedily and at random.
Encoders may wait; which of them do, and for what, is printed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.execution.model_runner import ModelRunner
from tests.parity.measure import make
from tests.parity.measured_rows import ROWS, Ask, Row, of_texts
from tests.simulated.device import DEVICE, ENCODER_THREAD
from tests.simulated.operators import CHOSEN

MAX_TOKENS = 5
SIBLINGS = (
    *("test_llava[siglip]", "test_glm4v", "test_deepseek_vl2[small]", "test_molmo[olmo]"),
    *("test_internvl_chat[qwen3]", "test_internvl_chat[llama]", "test_blip2_t5[flan-t5]"),
    *("test_internvl_chat[internlm2]", "test_gemma_n4[gemma4-dense]", "test_gemma_n4[small]"),
)
"""Rows of families that another row stands for here."""
LATENTS = Row(
    module="test_text_families", param="deepseek-v3", fixture="saved", asks=of_texts,
    options={"max_model_len": 256},
)  # fmt: skip
"""Which no class here names."""
CASES = [LATENTS, *(row for row in ROWS if row.name not in SIBLINGS)]
ROUTED = [
    row
    for row in CASES
    if row.name.endswith(
        ("[aria]", "[gpt-oss]", "[gemma4-experts]", "vl2[tiny]", "vl2[base]", "[deepseek-v3]")
    )
]
CHOOSING = {"aioengine/models/qwen_vl/modeling.py"}
"""Encoders in which PyTorch chooses: Qwen-VL's resampler is torch's, with images of one size."""
UNTRIED = {"test_families[qwen3-vl]"}
"""transformers makes its positions by `torch.tensor` of tensors, whose numbers it reads past every
dispatch mode: no prompt of a trial runs here. On a GPU they do."""
Waits = dict[str, Counter[tuple[str, str]]]


def waits_so_far() -> Counter[tuple[str, str]]:
    """Of this thread's stream, as the device counts them: the decoder's or the encoder's."""
    is_encoder = threading.current_thread().name == ENCODER_THREAD
    return (DEVICE.encoder_waits if is_encoder else DEVICE.waits).copy()


@contextmanager
def waits_by_job() -> Iterator[Waits]:
    """What made the launch thread wait in decode steps, in steps with prompts, and in encoders.

    And "copies" of each decode step beside which no encoder ran, as ("to the device", number).
    """
    found: Waits = {"decode": Counter(), "prompt": Counter(), "encode": Counter()}
    found |= {"steps": Counter(), "copies": Counter()}
    encoding = {"begun": 0, "ended": 0}
    originals = {"step": ModelRunner.step, "encode": ModelRunner.encode}

    def noting(name: str) -> Callable[..., Any]:
        def run(runner: ModelRunner, plan: Any, *others: Any) -> Any:
            before, copies, ended = waits_so_far(), DEVICE.copies.copy(), encoding["ended"]
            encoding["begun"] += name == "encode"
            done = originals[name](runner, plan, *others)
            encoding["ended"] += name == "encode"
            kind = name
            if name == "step":
                is_decode = all(s.output_index and s.end - s.start == 1 for s in plan.sequences)
                kind = "decode" if is_decode else "prompt"
                found["steps"][kind, ""] += 1
            if kind == "decode" and encoding["begun"] == ended:
                new = DEVICE.copies - copies
                found["copies"].update((each, str(count)) for each, count in new.items())
            found[kind] += waits_so_far() - before
            return done

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(ModelRunner, name, noting(name))
        yield found


async def answer(folder: Path, row: Row, asked: list[Ask], **more: Any) -> None:
    """Every prompt greedily and at random, all at once."""
    sizes = {"device": "cuda", "dtype": "float32", "block_size": 4, "kv_cache_bytes": 8 << 20}
    params = (
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    options = {**sizes, "max_num_batched_tokens": 1024, **row.options, **more}
    options["check_model"] = row.name not in UNTRIED
    async with AsyncEngine.from_pretrained(folder, **options) as engine:
        await asyncio.gather(
            *(engine.generate(ask.prompt, each, **ask.media) for ask in asked for each in params)
        )


def waits_of(row: Row, folder: Path, **options: Any) -> Waits:
    """Of an engine that answers the first and the last of the row's prompts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = [ask for ask, _ in make(row, folder)]
    with waits_by_job() as found:
        asyncio.run(answer(folder, row, [asked[0], asked[-1]], **options))
    DEVICE.waits.clear()  # those of encoders are known
    DEVICE.encoder_waits.clear()
    sys.stdout.write(f"\nENCODER: {dict(found['encode'])}\n")
    assert found["steps"]["decode", ""] >= MAX_TOKENS - 1
    copies = {key for key, count in found["copies"].items() if count}
    assert copies == {("to the device", "1"), ("to the host", "1")}, found["copies"]
    return found


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.name)
def test_steps_wait_for_nothing(row: Row, tmp_path: Path) -> None:
    found = waits_of(row, tmp_path)
    assert not found["decode"] and not found["prompt"]
    chosen = {place.rpartition(":")[0] for what, place in found["encode"] if what == CHOSEN}
    assert chosen <= CHOOSING, "PyTorch chooses a kernel for each shape"


@pytest.mark.parametrize("row", ROUTED, ids=lambda row: row.name)
def test_experts_in_half_precision(row: Row, tmp_path: Path) -> None:
    """Where the kernel for groups is taken, if sizes allow."""
    found = waits_of(row, tmp_path, dtype="bfloat16", check_model=False)
    assert not found["decode"] and not found["prompt"]
