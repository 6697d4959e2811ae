"""What a trial shows of windows longer than its prompts, and of requests that begin anew."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from aioengine import AsyncEngine
from aioengine.errors import ModelLoadError
from aioengine.execution import load_trial
from aioengine.kernels import metadata
from aioengine.kernels.layer_slot import attach_slot, slot_of
from aioengine.kernels.metadata import _split_by_chunk
from aioengine.models import register_model
from aioengine.models.runtime import registry
from aioengine.models.runtime.whole_pass import narrowed
from aioengine.models.state.memory import StateMemory
from aioengine.models.text import TextModel
from tests.parity.families import TEXT
from tests.support.tiny import draw_weights, tiny_tokenizer

SIZES = {"device": "cpu", "max_model_len": 256, "kv_cache_bytes": 4 << 20, "block_size": 4}
WINDOW = 64
MODELS = {
    "mistral": lambda s: hf.MistralForCausalLM(hf.MistralConfig(**s, sliding_window=WINDOW)),
    "gemma3": lambda s: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**s, sliding_window=WINDOW, head_dim=16, sliding_window_pattern=2)
    ),
    "llama4": lambda s: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **s, attention_chunk_size=WINDOW, head_dim=16, moe_layers=[], no_rope_layers=[1, 0, 1]
        )
    ),
}


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = MODELS[request.param]({**TEXT, "vocab_size": len(tokenizer)})
    draw_weights(model)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("heavy_bytes", [load_trial.HEAVY_BYTES, -1])
async def test_a_window_is_seen(
    folder: Path,
    heavy_bytes: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_trial, "HEAVY_BYTES", heavy_bytes)
    with caplog.at_level(logging.INFO, "aioengine"):
        async with AsyncEngine.from_pretrained(folder, **SIZES, dtype="float32"):
            pass
    (said,) = (r.getMessage() for r in caplog.records if "what its own module" in r.getMessage())
    assert "not seen" not in said


class WiderByOne(TextModel):
    """Every layer with a window sees one token more."""

    def patch(self) -> None:
        super().patch()
        for spec in self.specs:
            module: Any = self.decoder().get_submodule(spec.name)
            slot: Any = slot_of(module)

            class Wider:
                wanted = None
                right = slot

                def attend(self, *rows: Any) -> Tensor:
                    *tensors, args = rows
                    if args.window is not None:
                        args = args._replace(window=args.window + 1)
                    found: Tensor = self.right.attend(*tensors, args)
                    return found

            attach_slot(module, Wider())


def split_late(block_size: int, chunk: int, *others: Any) -> Any:
    """Split sequences by chunks that are a block longer."""
    return _split_by_chunk(block_size, chunk + block_size, *others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_longer_window_off_by_one_is_refused(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "_split_by_chunk", split_late)
    register_model("MistralForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM")(WiderByOne)
    with pytest.raises(ModelLoadError, match="longer than its windows"):
        async with AsyncEngine.from_pretrained(folder, **SIZES, dtype=dtype):
            pass


@pytest.mark.parametrize("name", MODELS)
def test_windows_are_as_they_were(name: str) -> None:
    model = MODELS[name]({**TEXT, "vocab_size": 99})

    def windows() -> list[int]:
        holders = [
            *model.modules(),
            *(each.config for each in model.modules() if hasattr(each, "config")),
        ]
        field = "attention_chunk_size" if name == "llama4" else "sliding_window"
        found = (getattr(each, field, None) for each in holders)
        return [each for each in found if each is not None]

    before = windows()
    with narrowed(model, [WINDOW], 4):
        assert set(windows()) == {4}
    assert windows() == before


async def test_a_state_that_is_not_begun_anew_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hf.Lfm2Config(
        **{**TEXT, "vocab_size": len(tiny_tokenizer())},
        layer_types=["conv", "full_attention", "conv"],
    )
    with torch.random.fork_rng(devices=[]):
        model = hf.Lfm2ForCausalLM(config)
    draw_weights(model)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    own = StateMemory.begin
    monkeypatch.setattr(StateMemory, "begin", lambda self, _, *others: own(self, None, *others))
    with pytest.raises(ModelLoadError, match="logits of a prompt"):
        async with AsyncEngine.from_pretrained(tmp_path, **SIZES, dtype="float32"):
            pass
