"""Quantized checkpoints: unpacked to the numbers that they stand for, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.quantizers import quantizer_finegrained_fp8
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from aioengine.errors import ModelLoadError
from aioengine.models.quantization import checkpoints
from aioengine.models.quantization.checkpoints import check_quantization, unpacked
from aioengine.models.runtime.checkpoint import check_files, read_config
from aioengine.models.runtime.registry import resolve
from tests.support.tiny import save_tiny_llava, tiny_llama, tiny_tokenizer

WEIGHTS = "model.safetensors"
READ = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4", "mxfp8")
BLOCK = 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantized")
    folders = {kind: root / kind for kind in ("llava", "llama")}
    save_tiny_llava(folders["llava"])
    tiny_llama(torch.float32).save_pretrained(folders["llama"])
    tiny_tokenizer().save_pretrained(folders["llama"])
    return folders


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Makes a folder of a kind whose config.json has something more, at a place in it."""

    def make(kind: str, *place: str, value: Any = None) -> Path:
        for file in saved[kind].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        path = tmp_path / "config.json"
        config = part = json.loads(path.read_text())
        for name in place[:-1]:
            part = part[name]
        if place:
            part[place[-1]] = value
        path.write_text(json.dumps(config))
        return tmp_path

    yield make


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed: transformers asks for it, and unpacks without it."""
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: name)
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)


def read(path: Path) -> Any:
    return read_config(path, revision=None, trust_remote_code=False)


def load(path: Path) -> dict[str, Tensor]:
    """The loaded model's weights."""
    hf_config = read(path)
    check_files(path, hf_config)
    found = resolve(hf_config.architectures).load(
        path, hf_config=hf_config, dtype=torch.float32, device="cpu"
    )
    weights: dict[str, Tensor] = dict(found.model.named_parameters())
    return weights


def pack(path: Path, part: str = "", scale: str = "weight_scale_inv") -> dict[str, Tensor]:
    """Put the projections of a folder into 8-bit floats by blocks; what they stand for, by name."""
    meant = {}
    weights = load_file(path / WEIGHTS)
    for name in [each for each in weights if part in each and each.endswith("proj.weight")]:
        rows, columns = weights[name].shape
        blocks = weights[name].reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).float()
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        meant[name] = (codes.float() * scales[:, None, :, None]).reshape(rows, columns)
        weights[name] = codes.reshape(rows, columns)
        weights[name.removesuffix("weight") + scale] = scales
    save_file(weights, path / WEIGHTS, {"format": "pt"})
    assert meant
    return meant


FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


@pytest.mark.parametrize(
    "method", ["fine_grained_fp8", "no-such-method", *sorted(set(AUTO_QUANTIZER_MAPPING) - {*READ})]
)
def test_what_is_not_read_is_refused_by_its_name(folder: Callable[..., Path], method: str) -> None:
    path = folder("llama", "quantization_config", value={"quant_method": method, "bits": 4})
    (path / WEIGHTS).write_bytes(b"nobody reads this")
    with pytest.raises(ModelLoadError) as caught:
        read(path)
    text = str(caught.value)
    assert repr(method) in text and "is not quantized" in text and "'int8'" in text
    assert all(each in text for each in READ)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (["quantization_config"], {"bits": 4}, "no quant_method"),
        (["quantization_config"], {"load_in_4bit": True}, "'bitsandbytes'"),
        (["quantization_config"], {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        (["quantization_config"], {"quant_method": ["fp8"]}, "is not read"),
        (["quantization_config"], "int4", "no object but str"),
        (["quantization_config"], [1], "no object but list"),
        (["compression_config"], {"quant_method": "mxfp4"}, "compression_config"),
        (["text_config", "quantization_config"], {"quant_method": "awq"}, "text_config.quant"),
        (["vision_config", "quantization_config"], {"quant_method": "mxfp4"}, "vision_config."),
        (["vision_config", "quantization_config"], {"quant_method": "hqq"}, "'hqq'"),
    ],
)
def test_fields_of_other_shapes_and_in_other_places(
    folder: Callable[..., Path], place: list[str], value: Any, told: str
) -> None:
    path = folder("llava", *place, value=value)
    with pytest.raises(ModelLoadError, match="are quantized") as caught:
        read(path)
    assert told in str(caught.value) and ".".join(place) in str(caught.value)


@pytest.mark.parametrize("value", [None, {}])
def test_an_empty_field_says_nothing(folder: Callable[..., Path], value: Any) -> None:
    path = folder("llava", "quantization_config", value=value)
    check_files(path, read(path))


@pytest.mark.parametrize(
    ("method", "package"), [("mxfp8", "accelerate"), ("compressed-tensors", "compressed-tensors")]
)
def test_a_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, method: str, package: str
) -> None:
    settings = {"text_config": {"quantization_config": {"quant_method": method}}}
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=f"pip install {package}"):
        check_quantization(settings, "some/model")
    asked: list[str] = []
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: asked.append(name) or name)
    check_quantization(settings, "some/model")
    assert asked == [package.replace("-", "_")]


@pytest.mark.parametrize("place", [["quantization_config"], ["text_config", "quantization_config"]])
@pytest.mark.usefixtures("accelerate")
def test_packed_weights_become_what_they_stand_for(
    folder: Callable[..., Path], place: list[str]
) -> None:
    path = folder("llava", *place, value=FP8)
    plain = {n.rpartition("layers")[2]: w for n, w in load(path).items() if "language" in n}
    meant = pack(path, "language")
    loaded = {n.rpartition("layers")[2]: w for n, w in load(path).items() if "language" in n}
    for name, weight in meant.items():
        found = loaded[name.rpartition("layers")[2]]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)
        assert not torch.equal(found, plain[name.rpartition("layers")[2]])


def test_the_config_that_was_read_stays_as_it_is() -> None:
    hf_config = LlamaConfig(quantization_config={"quant_method": "mxfp8"})
    assert unpacked(hf_config).quantization_config["dequantize"] is True
    assert hf_config.quantization_config == {"quant_method": "mxfp8"}


def test_packed_weights_that_no_config_tells_of(folder: Callable[..., Path]) -> None:
    """By their header, before they are read."""
    path = folder("llama")
    pack(path)
    with pytest.raises(ModelLoadError, match=r"quantized weights .*weight_scale_inv"):
        check_files(path, read(path))


def test_packed_weights_of_another_layout(folder: Callable[..., Path]) -> None:
    """Their codes would be taken for weights."""
    path = folder("llama", "quantization_config", value=FP8)
    pack(path, scale="weight_scale_2")
    with pytest.raises(ModelLoadError, match=r"proj.weight' has no scale beside it"):
        load(path)
