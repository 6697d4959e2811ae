"""Checkpoints of packed weights: kept packed, and computed as what they stand for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.kernels.cpu.library import is_available
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.models.fusion.packed_linear import Packed, PackedPart
from aioengine.models.quantization.grouped_layers import grouped_of
from aioengine.models.quantization.packed_checkpoints import unreadable
from aioengine.models.runtime.checkpoint import read_config
from aioengine.models.runtime.registry import resolve
from tests.support.tiny import save_tiny_llava, tiny_llama, tiny_tokenizer

WEIGHTS = "model.safetensors"
GROUP = 32
HIDDEN = 64


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers [n, m] as int32 [n, m / fields]; `order`: the columns of a word's fields."""
    fields = 32 // bits
    wide = numbers.to(torch.int64).view(len(numbers), -1, fields)
    total = torch.zeros_like(wide[..., 0])
    for place, column in enumerate(order or range(fields)):
        total |= wide[..., column] << (place * bits)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def draw(weight: Tensor, bits: int, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [out, in], scales and zeros [out, groups] of about a weight's size."""
    groups = weight.shape[1] // GROUP
    generator = torch.Generator().manual_seed(weight.numel())
    numbers = torch.randint(2**bits, weight.shape, generator=generator)
    scales = (torch.rand(len(weight), groups, generator=generator) + 0.5) * 2 * 0.15 / 2**bits
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if not is_symmetric:
        zeros = torch.randint(1, 2**bits, scales.shape, generator=generator).float()
    return numbers, scales.half().float(), zeros


def gptq(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": words(numbers, bits).T.contiguous(),
        "qzeros": words(zeros.T - 1, bits),
        "scales": scales.T.half().contiguous(),
        "g_idx": torch.arange(numbers.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(numbers.T.contiguous(), bits, order),
        "qzeros": words(zeros.T.contiguous(), bits, order),
        "scales": scales.T.half().contiguous(),
    }


def compressed(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
    found = {
        "weight_packed": words(numbers, bits),
        "weight_scale": scales.bfloat16() if bits == 8 else scales.half(),
        "weight_shape": torch.tensor(numbers.shape),
    }
    if not bool((zeros == 2 ** (bits - 1)).all()):
        found["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
    return found


def scheme(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": GROUP, "strategy": "group"}
    return {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}


Packer = Callable[[Tensor, Tensor, Tensor, int], dict[str, Tensor]]
KINDS: Mapping[str, tuple[Packer, int, bool, dict[str, Any]]] = {
    "gptq": (gptq, 4, True, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq with zeros": (gptq, 4, False, {"quant_method": "gptq", "bits": 4}),
    "gptq 8 bits": (gptq, 8, True, {"quant_method": "gptq", "bits": 8}),
    "awq": (awq, 4, False, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "compressed": (compressed, 4, True, {"quant_method": "compressed-tensors", **scheme(4)}),
    "compressed with zeros": (
        *(compressed, 4, False),
        {"quant_method": "compressed-tensors", **scheme(4)},
    ),
    "compressed 8 bits": (compressed, 8, True, {"quant_method": "compressed-tensors", **scheme(8)}),
}


def save(
    folder: Path, kind: str, change: Callable[[str, dict[str, Tensor]], None] | None = None
) -> Any:
    """Write a tiny model whose linear layers are packed; the plain one that they stand for."""
    pack, bits, is_symmetric, packing = KINDS[kind]
    model = tiny_llama(torch.float32, hidden_size=HIDDEN, tie_word_embeddings=False)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights: dict[str, Tensor] = load_file(folder / WEIGHTS)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        numbers, scales, zeros = draw(module.weight, bits, is_symmetric)
        if kind == "compressed 8 bits":
            scales = scales.bfloat16().float()
        parts = pack(numbers, scales, zeros, bits)
        if change is not None:
            change(name, parts)
        del weights[f"{name}.weight"]
        weights |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        grouped = numbers.view(*scales.shape, GROUP) - zeros[..., None]
        module.weight.data = (grouped * scales[..., None]).view(module.weight.shape)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": packing}))
    return model


def load(folder: Path) -> Any:
    """transformers' module, as the engine has it loaded."""
    config = read_config(folder, revision=None, trust_remote_code=False)
    return resolve(config.architectures).load_module(
        folder, hf_config=config, dtype=torch.float32, device="cpu"
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_of_what_is_packed(kind: str, tmp_path: Path) -> None:
    """With full inputs; the scales of few layers only are rounded."""
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(1))

    def generate() -> Tensor:
        meant = save(tmp_path, kind)
        found: Tensor = meant.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        return found[0, 9:]

    wanted = await asyncio.to_thread(generate)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_bytes": 8 << 20}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    async with AsyncEngine.from_pretrained(
        tmp_path, quantize_activations=False, **options
    ) as engine:
        output = await engine.generate(ids[0].tolist(), params)
        model = engine._core.loaded.runner.model.model
        packed = [m.packed for m in model.modules() if isinstance(m, Packed)]
        packed += [m.merged.packed for m in model.modules() if isinstance(m, PackedPart)]
    assert list(output.token_ids) == wanted.tolist()
    if is_available():
        grouped = [each for each in packed if isinstance(each, NativeLinear) and each.is_grouped]
        assert len(grouped) >= 4
    async with AsyncEngine.from_pretrained(tmp_path, **options) as engine:
        output = await engine.generate(ids[0].tolist(), params)
    assert len(output.token_ids) == 12


@torch.no_grad()
def test_inputs_in_another_order(tmp_path: Path) -> None:
    """GPTQ may sort inputs by size: such layers are plain, and compute the same."""

    def shuffle(name: str, parts: dict[str, Tensor]) -> None:
        parts["g_idx"] = parts["g_idx"].flip(0)

    meant = save(tmp_path, "gptq with zeros", shuffle)
    for name, module in meant.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            numbers, scales, zeros = draw(module.weight, 4, False)
            order = torch.arange(module.in_features).flip(0) // GROUP
            module.weight.data = (numbers - zeros[:, order]) * scales[:, order]
    model = load(tmp_path)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, meant(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("gptq", {"bits": 3}, "3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
        ("awq", {"version": "gemv"}, "gemv"),
    ],
)
def test_others_are_refused(kind: str, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save(tmp_path, kind)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"] |= change
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load(tmp_path)
    assert "not quantized" in str(caught.value)


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize("how", ["short", "long", "lost", "of floats", "nan", "inf"])
def test_what_does_not_fit_is_refused(kind: str, how: str, tmp_path: Path) -> None:
    def spoil(name: str, parts: dict[str, Tensor]) -> None:
        if not name.endswith("0.mlp.down_proj"):
            return
        (part,) = (each for each in parts if each in ("scales", "weight_scale"))
        if how == "lost":
            del parts[part]
        elif how == "of floats":
            (numbers,) = (each for each in parts if each in ("qweight", "weight_packed"))
            parts[numbers] = parts[numbers].float()
        elif how in ("nan", "inf"):
            parts[part].view(-1)[3] = float(how)
        else:
            parts[part] = (
                parts[part][:1, :1].contiguous() if how == "short" else torch.cat([parts[part]] * 3)
            )

    save(tmp_path, kind, spoil)
    with pytest.raises(ModelLoadError, match=r"down_proj.*does not fit|other shapes"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_groups_that_do_not_fill_the_inputs_are_refused(kind: str, tmp_path: Path) -> None:
    """There are as many as there would be, but where a last one is short the others are longer."""
    save(tmp_path, kind)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    packing = settings["quantization_config"]
    packing = packing["config_groups"]["group_0"]["weights"] if kind == "compressed" else packing
    packing["group_size"] = 40
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match="groups of 40 for"):
        load(tmp_path)


def at_one(change: Callable[[dict[str, Tensor]], None]) -> Callable[[str, dict[str, Tensor]], None]:
    """A change of one layer's parts."""
    return lambda name, parts: change(parts) if name.endswith("0.mlp.down_proj") else None


ONE = torch.tensor([1])


def one_group(parts: dict[str, Tensor]) -> None:
    for name in ("scales", "qzeros"):
        parts[name] = parts[name][:1].contiguous()


WRONG: Mapping[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "one input's group": (
        "gptq with zeros",
        lambda parts: parts.update(g_idx=parts["g_idx"][:1]),
        "not every input",
    ),
    "one input's group, compressed": (
        "compressed with zeros",
        lambda parts: parts.update(weight_g_idx=torch.tensor([0])),
        "not every input",
    ),
    "one group": ("gptq", one_group, "groups of 32"),
    "no group": (
        "gptq",
        lambda parts: parts.update(scales=parts["scales"][:0]),
        "of other outputs",
    ),
    "a scale of inputs in another order": (
        "gptq with zeros",
        lambda parts: parts.update(
            g_idx=parts["g_idx"].flip(0), scales=parts["scales"].index_fill(0, ONE, torch.nan)
        ),
        "no finite numbers",
    ),
    "scales are integers": (
        "awq",
        lambda parts: parts.update(scales=parts["scales"].int()),
        "scales are of",
    ),
    "numbers are bytes": (
        "awq",
        lambda parts: parts.update(qweight=parts["qweight"].to(torch.int8)),
        "packed in torch.int8",
    ),
    "a large shape": (
        "compressed",
        lambda parts: parts.update(weight_shape=torch.tensor([2**60, 2**60])),
        "numbers for",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_reading_is_refused(case: str, tmp_path: Path) -> None:
    """What would fit by broadcasting or slicing, and compute something else."""
    kind, change, reason = WRONG[case]
    save(tmp_path, kind, at_one(change))
    with pytest.raises(ModelLoadError, match=rf"down_proj.*{reason}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"a": {"weights": "x"}}}, "bits"),
        ({"config_groups": {"a": {"weights": {"num_bits": [4]}}}}, "bits"),
    ],
)
def test_compressed_tensors_with_more(change: Any, reason: str, tmp_path: Path) -> None:
    save(tmp_path, "compressed")
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"] |= change
    path.write_text(json.dumps(settings))
    assert reason in unreadable(settings["quantization_config"])


def test_bits_of_awq_under_either_name() -> None:
    for bits in ({"bits": 4}, {"bits": None, "w_bit": 4}, {"w_bit": 4}):
        assert not unreadable({"quant_method": "awq", **bits})
    for bits in ({}, {"bits": 8}, {"bits": 8, "w_bit": 4}):
        assert "AWQ" in unreadable({"quant_method": "awq", **bits})


def test_zeros_of_earlier_compressed_tensors(tmp_path: Path) -> None:
    """They are signed bytes, one for each output and group."""

    def sign(name: str, parts: dict[str, Tensor]) -> None:
        packed, outputs = parts["weight_zero_point"].T.contiguous(), len(parts["weight_packed"])
        fields = (packed[..., None] >> torch.arange(0, 32, 4)) & 15
        zeros = fields.flatten(-2).T[:outputs]
        parts["weight_zero_point"] = (zeros - 8).to(torch.int8).contiguous()

    meant = save(tmp_path, "compressed with zeros", sign)
    found = load(tmp_path)
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter, meant.get_parameter(name), rtol=1e-3, atol=1e-4)


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    """As transformers has it."""
    save(tmp_path, "gptq")
    whole = load(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    old = {n: x * 0 if x.is_floating_point() else x for n, x in weights.items()}
    save_file(old, tmp_path / "old.safetensors", {"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "old.safetensors")}))
    for one, other in zip(load(tmp_path).parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_files_of_an_index(tmp_path: Path) -> None:
    """Weights in two files, and once more in a third that the index does not name."""
    save(tmp_path, "awq")
    whole = load(tmp_path)
    weights: dict[str, Tensor] = load_file(tmp_path / WEIGHTS)
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2], "other.safetensors": names}
    for file, of in parts.items():
        wrong = file.startswith("other")
        numbers = {name: weights[name] * (0 if wrong else 1) for name in of}
        save_file(numbers, tmp_path / file, {"format": "pt"})
    (tmp_path / WEIGHTS).unlink()
    places = {name: file for file, of in list(parts.items())[:2] for name in of}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for one, other in zip(load(tmp_path).parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_plain_model_is_read_as_before(tmp_path: Path) -> None:
    model = tiny_llama(torch.float32, hidden_size=HIDDEN)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    found = load(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(found.lm_head.weight, wanted.lm_head.weight)


def test_layers_of_a_model_whose_weights_have_older_names(tmp_path: Path) -> None:
    """A LLaVA's decoder, packed; its encoder is not."""
    save_tiny_llava(tmp_path)
    weights: dict[str, Tensor] = load_file(tmp_path / WEIGHTS)
    packed = 0
    for name in list(weights):
        layer = name.removesuffix(".weight")
        is_inside = "language_model" in name and layer.endswith("_proj")
        if is_inside and weights[name].shape[1] % GROUP == 0 and len(weights[name]) % 8 == 0:
            parts = awq(*draw(weights.pop(name), 4, False), 4)
            weights |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
            packed += 1
    save_file(weights, tmp_path / WEIGHTS, {"format": "pt"})
    path = tmp_path / "config.json"
    packing = {"quantization_config": KINDS["awq"][3]}
    path.write_text(json.dumps(json.loads(path.read_text()) | packing))
    module = load(tmp_path)
    known = [name for name, each in module.named_modules() if grouped_of(each) is not None]
    assert packed == len(known) > 0
    assert all("language_model" in name for name in known)
