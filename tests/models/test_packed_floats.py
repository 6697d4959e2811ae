"""Checkpoints of 8-bit floats: kept at a byte a weight, and computed as what they stand for."""

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

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.kernels.cpu.library import is_available
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.models.fusion.packed_linear import Packed, PackedPart
from aioengine.models.quantization.packed_checkpoints import unreadable
from aioengine.models.quantization.packed_floats import FP4_LEVELS, read_floats, read_fp4
from aioengine.models.runtime.checkpoint import read_config
from aioengine.models.runtime.registry import resolve
from tests.models.test_packed_checkpoints import WEIGHTS, load
from tests.support.tiny import tiny_llama, tiny_tokenizer

SIZES = {"hidden_size": 256, "intermediate_size": 320, "tie_word_embeddings": False}
MOST = 448.0  # of e4m3


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


# The config's field, the scale's name, and a scale's block: 0 for all outputs or inputs.
KINDS: Mapping[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128),
    ),
    "blocks that nobody tells of": ({"quant_method": "fp8"}, "weight_scale_inv", (128, 128)),
    "blocks of other sizes": (
        {"quant_method": "fp8", "weight_block_size": [64, 32]}, "weight_scale_inv", (64, 32),
    ),
    "blocks that no group fits": (
        {"quant_method": "fp8", "weight_block_size": [8, 8]}, "weight_scale_inv", (8, 8),
    ),
    "one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", (0, 0)),
    "tensor": (floats("tensor"), "weight_scale", (0, 0)),
    "channel": (floats("channel"), "weight_scale", (1, 0)),
    "compressed blocks": (floats("block", block_structure=[128, 128]), "weight_scale", (128, 128)),
    "compressed blocks in words": (
        floats("block", block_structure="128x128"), "weight_scale", (128, 128),
    ),
}  # fmt: skip


def spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Scales of blocks, for each weight."""
    for dim in (0, 1):
        scales = scales.repeat_interleave(block[dim], dim)
    return scales[: shape[0], : shape[1]]


def pack(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of blocks, and what they stand for."""
    size = tuple(own or whole for own, whole in zip(block, weight.shape, strict=True))
    counts = [-(-whole // own) for own, whole in zip(size, weight.shape, strict=True)]
    scales = torch.zeros(counts)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = weight[i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
            scales[i, j] = part.abs().max() / MOST
    wide = spread(scales, weight.shape, size)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def save(
    folder: Path, kind: str, change: Callable[[str, dict[str, Tensor]], None] | None = None
) -> Any:
    """Write a tiny model of packed weights; the plain one that they stand for."""
    packing, name_of_scale, block = KINDS[kind]
    model = tiny_llama(torch.float32, **SIZES)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights: dict[str, Tensor] = load_file(folder / WEIGHTS)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        codes, scales, meant = pack(module.weight, block)
        scales = scales.reshape(()) if kind == "one scale" else scales
        parts = {"weight": codes, name_of_scale: scales.contiguous()}
        if kind == "one scale":
            parts["input_scale"] = torch.tensor(0.5)
        if change is not None:
            change(name, parts)
        del weights[f"{name}.weight"]
        weights |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        module.weight.data = meant
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": packing}))
    return model


def packed_layers(engine: AsyncEngine) -> list[NativeLinear]:
    model = engine._core.loaded.runner.model.model
    found = [m.packed for m in model.modules() if isinstance(m, Packed)]
    found += [m.merged.packed for m in model.modules() if isinstance(m, PackedPart)]
    return [each for each in {id(x): x for x in found}.values() if isinstance(each, NativeLinear)]


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_of_what_is_packed(kind: str, tmp_path: Path) -> None:
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(1))

    def generate() -> Tensor:
        meant = save(tmp_path, kind)
        found: Tensor = meant.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        return found[0, 9:]

    wanted = await asyncio.to_thread(generate)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_bytes": 8 << 20}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    async with AsyncEngine.from_pretrained(tmp_path, **options) as engine:
        output = await engine.generate(ids[0].tolist(), params)
        packed = packed_layers(engine)
        together = await asyncio.gather(
            *(engine.generate(ids[0, : n + 1].tolist(), params) for n in range(8)),
            engine.generate(ids[0].tolist(), params),
        )
    assert list(output.token_ids) == wanted.tolist()
    assert together[-1].token_ids == output.token_ids
    if not is_available():
        return
    grouped = [each for each in packed if each.is_grouped]
    assert bool(grouped) == (kind != "blocks that no group fits")
    for each in grouped:
        depth = each.rows(torch.tensor([0])).shape[1]
        assert each.nbytes <= 1.25 * each.num_outputs * depth + 2048  # of which scales in groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["blocks", "tensor", "channel"])
@torch.no_grad()
def test_logits_are_near_what_is_packed(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    meant = save(tmp_path, kind)
    config = read_config(tmp_path, revision=None, trust_remote_code=False)
    model = resolve(config.architectures).load_module(
        tmp_path, hf_config=config, dtype=dtype, device="cpu"
    )
    ids = torch.arange(40)[None] % 90
    wanted = meant(input_ids=ids).logits
    bound = 1e-5 if dtype is torch.float32 else 0.1
    largest = max(1.0, float(wanted.abs().max()))
    assert (model(input_ids=ids).logits.float() - wanted).abs().max() <= bound * largest


WRONG: Mapping[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (lambda parts: parts.pop("weight_scale_inv"), "no scale"),
    "too few scales": (
        lambda parts: parts.update(weight_scale_inv=parts["weight_scale_inv"][:1, :1].clone()),
        "scales of blocks",
    ),
    "NaN": (
        lambda parts: parts.update(
            weight=torch.full_like(parts["weight"].view(torch.uint8), 127).view(torch.float8_e4m3fn)
        ),
        "NaN",
    ),
    "another kind": (
        lambda parts: parts.update(weight=parts["weight"].float().to(torch.float8_e5m2)),
        "float8_e5m2",
    ),
    "scales of integers": (
        lambda parts: parts.update(weight_scale_inv=parts["weight_scale_inv"].int()),
        "finite floats",
    ),
    "two scales": (
        lambda parts: parts.update(weight_scale=torch.tensor(1.0)),
        "both weight_scale_inv and weight_scale",
    ),
    "bytes without a scale": (
        lambda parts: (
            parts.update(weight=parts["weight"].view(torch.uint8)) or parts.pop("weight_scale_inv")
        ),
        "no scale",
    ),
    "integers without a scale": (
        lambda parts: (
            parts.update(weight=parts["weight"].view(torch.int8)) or parts.pop("weight_scale_inv")
        ),
        "no scale",
    ),
    "all experts at once": (
        lambda parts: parts.update(
            weight=parts["weight"]
            .view(torch.uint8)
            .expand(2, -1, -1)
            .clone()
            .view(torch.float8_e4m3fn)
        ),
        r"\[2, \d+, \d+\] and not \[outputs, inputs\]",
    ),
    "all experts at once, and no scale": (
        lambda parts: (
            parts.update(weight=torch.zeros(2, 8, 8, dtype=torch.float8_e4m3fn))
            or parts.pop("weight_scale_inv")
        ),
        "all experts at once",
    ),
    "an endless scale": (
        lambda parts: parts["weight_scale_inv"].fill_(torch.inf),
        "finite floats",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_reading_is_refused(case: str, tmp_path: Path) -> None:
    change, reason = WRONG[case]

    def spoil(name: str, parts: dict[str, Tensor]) -> None:
        if name.endswith("0.mlp.down_proj"):
            change(parts)

    save(tmp_path, "blocks", spoil)
    with pytest.raises(ModelLoadError, match=rf"down_proj.*{reason}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("packing", "reason"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two numbers"),
        (floats("token"), "token"),
        (floats("block"), "size of its blocks"),
        (floats("channel", num_bits=4), "8 bits"),
        (floats("channel", type="int"), "8 bits"),
        ({**floats("tensor"), "config_groups": {}}, "config_groups"),
        ({**floats("tensor"), "transform_config": {"R1": {}}}, "transform_config"),
        ({**floats("channel"), "sparsity_config": {"format": "dense"}}, "sparsity_config"),
    ],
)
def test_what_is_left_to_transformers(packing: dict[str, Any], reason: str) -> None:
    assert reason in unreadable(packing)


def test_scales_of_inputs_are_refused() -> None:
    numbers = torch.randn(64, 64).to(torch.float8_e4m3fn)
    for shape in ((64,), (64, 1)):
        scales = torch.rand(shape)
        found = read_floats({"weight": numbers, "weight_scale": scales}, None)
        assert torch.equal(found.floats(), numbers.float() * scales.view(-1, 1))
    for shape in ((1, 64), (64, 1, 1), (64, 2), (2,)):
        with pytest.raises(ValueError, match="scales for 64 outputs"):
            read_floats({"weight": numbers, "weight_scale": torch.rand(shape)}, None)


@pytest.mark.parametrize("scale", [1.0, 448.0, 1e30])
def test_a_block_of_zeros_may_have_any_scale(scale: float) -> None:
    """A quantizer leaves what it likes there: other blocks' scales stay what they are."""
    numbers = torch.randn(64, 256).to(torch.float8_e4m3fn)
    numbers.view(torch.uint8)[:, :128] = 0
    scales = torch.full((1, 2), 3e-4)
    scales[0, 0] = scale
    found = read_floats({"weight": numbers, "weight_scale_inv": scales}, (128, 128))
    grouped = found.grouped()
    assert grouped is not None
    wanted = found.floats()
    assert (grouped.floats() - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("power", [0, 150, 254])
def test_an_empty_block_of_four_bits_may_have_any_scale(power: int) -> None:
    blocks = torch.randint(256, (2, 32, 2, 16), dtype=torch.uint8)
    scales = torch.full((2, 32, 2), 120, dtype=torch.uint8)
    blocks[:, :, 0], scales[:, :, 0] = 0, power
    found = read_fp4({"blocks": blocks, "scales": scales}).grouped()
    assert found.is_finite
    (low, high), levels = (blocks & 15, blocks >> 4), torch.tensor(FP4_LEVELS).float()
    wanted = levels[torch.stack((low, high), -1).int()].flatten(2).flatten(0, 1) * 2.0**-8
    assert torch.equal(found.floats(), wanted)


def test_scales_that_are_far_apart_stay_as_they_are() -> None:
    numbers = torch.ones(64, 256).to(torch.float8_e4m3fn)
    for ratio, is_kept in ((2.0**11, True), (2.0**14, False)):
        parts = {"weight": numbers, "weight_scale_inv": torch.tensor([[1.0, ratio]])}
        assert (read_floats(parts, (128, 128)).grouped() is not None) is is_kept


def test_a_block_that_is_larger_than_the_weight() -> None:
    """By its config: no memory is taken for what is not there."""
    parts = {"weight": torch.ones(64, 96).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1, 1)}
    found = read_floats(parts, (10**15, 10**15))
    assert found.block == (64, 96) and torch.equal(found.floats(), torch.ones(64, 96))
    assert found.grouped() is not None
