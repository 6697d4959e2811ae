"""Models with images in two GGUF files, of which one has the encoder.

Tensors have the names that the format's own package gives to those of published checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from torch import Tensor

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.models.quantization.grouped_layers import grouped_of
from aioengine.models.runtime.checkpoint import check_files, read_config
from aioengine.models.runtime.registry import resolve
from tests.models.test_gguf import turned, write
from tests.parity.families import FAMILIES, save
from tests.support.tiny import tiny_image

KIND = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Published:
    """A family's names: of its text's architecture, its projector, and of published weights."""

    text: str
    projector: str
    rename: Callable[[str], str]


def siglip(name: str) -> str:
    name = name.removeprefix("model.").replace("_weight", ".weight")
    return re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)


MODELS: Mapping[str, Published] = {
    "idefics3": Published("llama", "idefics3", lambda name: name),
    "gemma3": Published("gemma3", "gemma3", siglip),
    "qwen2-vl": Published("qwen2vl", "qwen2vl_merger", lambda name: name.removeprefix("model.")),
    "qwen2.5-vl": Published(
        "qwen2vl", "qwen2.5vl_merger", lambda name: name.removeprefix("model.")
    ),
}


def parts_of(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What the converter makes of a weight of an encoder."""
    if ".qkv." in name:
        for letter, part in zip("qkv", weight.chunk(3), strict=True):
            yield name.replace("qkv", letter), part
    elif "soft_emb_norm" in name:
        yield name, weight + 1
    else:
        yield name, weight


def write_files(model: Any, folder: Path, published: Published) -> None:
    arches = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    text = gguf.GGUFWriter(folder / "model.gguf", published.text)
    encoder = gguf.GGUFWriter(folder / "mmproj-model.gguf", "clip")
    encoder.add_string("clip.projector_type", published.projector)
    text_names = gguf.get_tensor_name_map(arches[published.text], 64)
    encoder_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    decoder = next(n for n, m in model.named_modules() if m is model.get_decoder())
    config = model.config.get_text_config()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        if ".head." in name:  # that pools a tower's rows; no Gemma 3 has it
            continue
        weight = parameter.detach().float()
        if name.startswith(f"{decoder}.") or name.startswith("lm_head"):
            name = name.replace(f"{decoder}.", "model.", 1)
            if published.text == "gemma3" and name.endswith("norm.weight"):
                weight = weight + 1
            turns = heads.get(name.split(".")[-2], 0) if published.text == "llama" else 0
            weight = turned(weight, turns) if turns else weight
            own = text_names.get_name(name, (".weight", ".bias"))
            numbers = np.ascontiguousarray(weight.numpy())
            if weight.dim() > 1 and weight.shape[-1] % 32 == 0:
                text.add_tensor(own, quantize(numbers, KIND.Q8_0), raw_dtype=KIND.Q8_0)
            else:
                text.add_tensor(own, numbers)
            continue
        for part, numbers in parts_of(published.rename(name), weight):
            if part.endswith("patch_embed.proj.weight"):
                for i, end in enumerate(("", ".1")):
                    frame = np.ascontiguousarray(numbers[:, :, i].numpy())
                    encoder.add_tensor(f"v.patch_embd.weight{end}", frame)
                continue
            own = encoder_names.get_name(part, (".weight", ".bias"))
            assert own is not None, part
            encoder.add_tensor(own, np.ascontiguousarray(numbers.numpy()))
    write(text)
    write(encoder)
    (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["vision_config"]["vision_use_head"] = False
    path.write_text(json.dumps(settings))


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = save(FAMILIES[request.param], tmp_path)
    write_files(model, tmp_path, MODELS[request.param])
    return model, tmp_path


def load(folder: Path) -> Any:
    config = read_config(folder, revision=None, trust_remote_code=False)
    check_files(folder, config)
    return resolve(config.architectures).load_module(
        folder, hf_config=config, dtype=torch.float32, device="cpu"
    )


@pytest.mark.parametrize("saved", MODELS, indirect=True)
def test_both_files_are_read(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    decoder = model.get_decoder()
    inside = {id(each) for each in decoder.parameters()}
    names = {name: id(each) in inside for name, each in model.named_parameters()}
    found = load(folder)
    for name, parameter in found.named_parameters():
        wanted = model.get_parameter(name).float()
        exactness = 0.03 if names[name] or "lm_head" in name else 1e-6
        torch.testing.assert_close(parameter, wanted, rtol=exactness, atol=exactness, msg=name)
    assert any(grouped_of(each) is not None for each in found.modules())


async def test_an_engine_of_two_files(tmp_path: Path) -> None:
    model = await asyncio.to_thread(save, FAMILIES["qwen2-vl"], tmp_path)
    await asyncio.to_thread(write_files, model, tmp_path, MODELS["qwen2-vl"])
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "kv_cache_bytes": 8 << 20}
    async with AsyncEngine.from_pretrained(tmp_path / "model.gguf", **options) as engine:
        output = await engine.generate(
            f"See {FAMILIES['qwen2-vl'].place}.",
            SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
            images=[tiny_image(1)],
        )
    assert len(output.token_ids) == 4


@pytest.mark.parametrize("saved", ["gemma3"], indirect=True)
def test_encoders_that_do_not_fit(saved: tuple[Any, Path]) -> None:
    """Another projector, tensors of another model, and none."""
    _, folder = saved
    path = folder / "mmproj-model.gguf"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"gemma3", b"gemma9"))
    with pytest.raises(ModelLoadError, match=r"'gemma9'.*qwen2vl_merger.*safetensors"):
        load(folder)
    path.write_bytes(whole.replace(b"v.post_ln.bias", b"v.past_ln.bias"))
    with pytest.raises(ModelLoadError, match=r"v\.past_ln\.bias"):
        load(folder)
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"mmproj.*beside it.*quantization='int4'"):
        load(folder)


@pytest.mark.parametrize("saved", ["idefics3"], indirect=True)
def test_older_names_of_feed_forward_matrices(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    path = folder / "mmproj-model.gguf"
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(folder / "mmproj-older.gguf", "clip")
    writer.add_string("clip.projector_type", "idefics3")
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    for tensor in reader.tensors:
        name = re.sub("ffn_(up|down)", lambda match: names[match[0]], tensor.name)
        writer.add_tensor(name, np.array(tensor.data))
    write(writer)
    path.unlink()
    found = load(folder)
    for name, parameter in found.named_parameters():
        if "mlp.fc" in name:
            assert torch.equal(parameter, model.get_parameter(name).float())
