"""Loading from a folder, and what it leaves behind."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    DogeConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    MptConfig,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from transformers.utils import logging as transformers_logging

from aioengine.errors import ModelLoadError
from aioengine.models.runtime.hf_loading import limit_of, load_pretrained, pin_rotary
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.text import TextModel
from tests.models.driver import Driver, Request
from tests.support.tiny import BOS, draw_weights, save_tiny_llava, tiny_llama, tiny_llava


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "llava"
    save_tiny_llava(path)
    return path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    config = AutoConfig.from_pretrained(folder)
    return TransformersModel.load(folder, hf_config=config, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_is_the_asked_one_and_the_default_stays(folder: Path, dtype: torch.dtype) -> None:
    model = load(folder, dtype)
    assert model.dtype == dtype
    assert torch.get_default_dtype() == torch.float32
    assert not model.model.training
    assert not any(p.requires_grad for p in model.model.parameters())
    assert {p.dtype for p in model.model.parameters()} == {dtype}
    request = Request([BOS, 5, 6, 7])
    Driver(model).step([(request, 4)])
    assert request.all_logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_weights_are_the_saved_ones(folder: Path) -> None:
    saved = tiny_llava(torch.float32).state_dict()
    loaded = load(folder).model.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_progress_bars_are_left_as_they_were(folder: Path) -> None:
    before = transformers_logging.is_progress_bar_enabled()
    load(folder)
    assert transformers_logging.is_progress_bar_enabled() is before


def test_two_loads_at_once(folder: Path) -> None:
    found: list[torch.dtype] = []
    threads = [
        threading.Thread(target=lambda d=dtype: found.append(load(folder, d).dtype))  # type: ignore[misc]
        for dtype in (torch.float64, torch.bfloat16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {torch.float64, torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def without_weights(folder: Path, copy: Path) -> Any:
    """Everything but the weights, in another folder; returns the config."""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, copy)
    return AutoConfig.from_pretrained(copy)


def test_missing_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    config = without_weights(folder, tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="q_proj"):
        TransformersModel.load(tmp_path, hf_config=config, dtype=torch.float32, device="cpu")


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    config = without_weights(folder, tmp_path)
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        TransformersModel.load(tmp_path, hf_config=config, dtype=torch.float32, device="cpu")


def test_damaged_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    config = without_weights(folder, tmp_path)
    damaged = (folder / "model.safetensors").read_bytes()[:-100]
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        TransformersModel.load(tmp_path, hf_config=config, dtype=torch.float32, device="cpu")


def longrope(short: float, long: float, max_position_embeddings: int = 64) -> Phi3ForCausalLM:
    """A Phi3 whose rotation changes once a sequence is longer than 16 tokens."""
    config = Phi3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [short] * 4,
            "long_factor": [long] * 4,
            "original_max_position_embeddings": 16,
            "factor": max_position_embeddings / 16,
        },
        pad_token_id=0,
        bos_token_id=BOS,
        eos_token_id=2,
    )
    config.architectures = ["Phi3ForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        model = Phi3ForCausalLM(config)
    draw_weights(model)
    return model.double().eval()  # type: ignore[no-any-return]


def run_beside(model: TransformersModel, lengths: list[int]) -> torch.Tensor:
    """Logits of the first request, with others of the given lengths in the same step."""
    requests = [Request([BOS, *range(10, 10 + n - 1)]) for n in lengths]
    Driver(model).step([(request, len(request.tokens)) for request in requests])
    return requests[0].all_logits


@pytest.mark.parametrize(("max_model_len", "is_long"), [(16, False), (64, True), (None, True)])
def test_longrope_does_not_depend_on_company(max_model_len: int | None, is_long: bool) -> None:
    hf = longrope(1.0, 3.0)
    ids = torch.tensor([[BOS, *range(10, 17)]])
    with torch.no_grad():
        plain = longrope(3.0, 3.0) if is_long else hf
        expected = plain(input_ids=ids).logits[0]
    model = TextModel(hf, max_model_len=max_model_len)
    alone, beside = run_beside(model, [8]), run_beside(model, [8, 40])
    torch.testing.assert_close(alone, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(beside, alone, atol=1e-9, rtol=1e-9)


def test_dynamic_rotation_needs_a_limit() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    hf = tiny_llama(rope_parameters=scaling, max_position_embeddings=32)
    with pytest.raises(ModelLoadError, match="max_model_len"):
        pin_rotary(hf.model, 33)
    ids = torch.tensor([[BOS, *range(10, 17)]])
    with torch.no_grad():
        expected = hf(input_ids=ids).logits[0]
    model = TextModel(hf, max_model_len=32)
    torch.testing.assert_close(run_beside(model, [8, 30]), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("cap", [2.0, None])
def test_capped_scores_are_computed_eagerly(
    cap: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of transformers take SDPA, which cannot cap them."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    made = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, attn_logit_softcapping=cap))
    made.save_pretrained(tmp_path)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    loaded = load_pretrained(
        Gemma2ForCausalLM,
        tmp_path,
        hf_config=AutoConfig.from_pretrained(tmp_path),
        dtype=torch.float32,
        device="cpu",
    )
    wanted = "sdpa" if cap is None else "eager"
    configs = [module.config for module in loaded.modules() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} == {wanted}


@pytest.mark.parametrize("field", ["attn_logit_softcapping", "final_logit_softcapping"])
@pytest.mark.parametrize("cap", [0.0, -5.0])
def test_caps_that_are_none(field: str, cap: float, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    setattr(config, field, cap)
    with pytest.raises(ModelLoadError, match=f"{field} is {cap}, and must be a positive number"):
        load_pretrained(
            Gemma2ForCausalLM, tmp_path, hf_config=config, dtype=torch.float32, device="cpu"
        )


def test_the_longest_sequence_that_a_config_allows() -> None:
    assert limit_of(MptConfig(max_seq_len=64)) == 64  # its biases are no longer
    assert limit_of(Phi3Config(max_position_embeddings=32)) == 32
    assert limit_of(DogeConfig(max_position_embeddings=64, keep_window_size=48)) == 48
    for least in (0, -1):
        with pytest.raises(ModelLoadError, match=f"max_seq_len is {least}"):
            limit_of(MptConfig(max_seq_len=least))
