"""Models with packed linear layers against transformers' own forward."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.kernels.linear import PackedLinear, pack_linear
from aioengine.models.fusion.packed_linear import Packed, PackedPart, pack_layers
from tests.support.tiny import save_tiny_llava, tiny_image, tiny_llama, tiny_llava, tiny_pixels

IDS = torch.arange(5, 45)[None]


def check_close(found: Tensor, wanted: Tensor, share: float = 1e-4) -> None:
    bound = share * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0)


def packed_names(model: nn.Module) -> set[str]:
    return {
        name for name, module in model.named_modules() if isinstance(module, Packed | PackedPart)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_decoder(dtype: torch.dtype) -> None:
    if pack_linear(torch.zeros(8, 8, dtype=dtype)) is None:
        pytest.skip(f"this CPU has no way for {dtype}")
    hf = tiny_llama(dtype)
    linears = {name for name, module in hf.named_modules() if type(module) is nn.Linear}
    wanted = hf(input_ids=IDS).logits
    assert pack_layers(hf) > 0
    assert packed_names(hf) == linears
    check_close(hf(input_ids=IDS).logits, wanted, 1e-4 if dtype == torch.float32 else 5e-2)


@torch.inference_mode()
def test_an_encoder() -> None:
    hf = tiny_llava(torch.float32)
    pixels = tiny_pixels(2)
    wanted = torch.stack(list(hf.get_image_features(pixel_values=pixels.float()).pooler_output))
    assert pack_layers(hf) > 0
    found = torch.stack(list(hf.get_image_features(pixel_values=pixels.float()).pooler_output))
    check_close(found, wanted)
    assert any("vision_tower" in name for name in packed_names(hf))


def test_the_stand_in_has_the_weight_s_shape_and_no_values() -> None:
    hf = tiny_llama(torch.float32)
    layer = hf.model.layers[0].mlp.down_proj
    shape = layer.weight.shape
    pack_layers(hf)
    assert hf.model.layers[0].mlp.down_proj is layer and isinstance(layer, nn.Linear)
    assert layer.weight.shape == shape
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.float32, "cpu")
    assert layer.weight.isnan().all() and not layer.weight.requires_grad
    assert layer.weight.untyped_storage().nbytes() == 4
    assert hf.dtype == torch.float32 and hf.device.type == "cpu"


def test_plain_weights_are_freed() -> None:
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    layers.requires_grad_(False)
    plain = [weakref.ref(layer.weight) for layer in layers]
    left: list[int] = []

    def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
        left.append(sum(each() is not None for each in plain))
        return pack_linear(weight, bias)

    assert pack_layers(layers, pack) == 8 * 2048 * 2048 * 4
    assert left == [8, 7, 6, 5, 4, 3, 2, 1], "one at a time is there twice"
    assert not any(each() is not None for each in plain)


@torch.inference_mode()
def test_a_tied_head_keeps_its_weight() -> None:
    hf = tiny_llama(torch.float32, tie_word_embeddings=True)
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    wanted = hf(input_ids=IDS).logits
    pack_layers(hf)
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    assert not hf.lm_head.weight.isnan().any()
    assert "lm_head" not in packed_names(hf)
    check_close(hf(input_ids=IDS).logits, wanted)


def test_float64_is_left_alone() -> None:
    hf = tiny_llama()
    before = copy.deepcopy(hf.state_dict())
    assert pack_layers(hf) == 0 and not packed_names(hf)
    for name, value in hf.state_dict().items():
        assert torch.equal(value, before[name])


class ReadsItself(nn.Module):
    """Multiplies with the weights of its children by hand; of one it wants the dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)
        self.called = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.called.weight, Tensor):
            x = x.to(self.called.weight.dtype)
        return self.called(x @ self.read.weight.T)


class Own(nn.Linear):
    """Does as it likes."""


@torch.inference_mode()
def test_layers_whose_weights_others_read() -> None:
    model = nn.ModuleDict(
        {
            "reads": ReadsItself(),
            "torch's": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            "own": Own(8, 8),
        }
    )
    model.eval().requires_grad_(False)
    x = torch.randn(1, 3, 8)
    wanted = {name: module(x) for name, module in model.items()}
    pack_layers(model)
    assert packed_names(model) == {"reads.called"}
    for name, module in model.items():
        check_close(module(x), wanted[name])


@torch.inference_mode()
def test_a_layer_that_stands_in_two_places() -> None:
    layer = nn.Linear(8, 8).requires_grad_(False)
    model = nn.Sequential(layer, nn.Sequential(layer))
    x = torch.randn(3, 8)
    wanted = model(x)
    assert pack_layers(model) == 8 * 8 * 4 + 8 * 4
    check_close(model(x), wanted)


@torch.inference_mode()
def test_ways_that_take_nothing() -> None:
    hf = tiny_llama(torch.float32)
    wanted = hf(input_ids=IDS).logits
    assert pack_layers(hf, lambda weight, bias: None) == 0
    assert torch.equal(hf(input_ids=IDS).logits, wanted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_tiny_llava(path)
    return path


def tokens_of(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_the_switch_changes_no_token(folder: Path, dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for packed in (True, False):
        sizes = {"kv_cache_bytes": 8 << 20, "max_model_len": 512, "block_size": 8}
        async with AsyncEngine.from_pretrained(
            folder, device="cpu", dtype=dtype, packed_layers=packed, **sizes
        ) as engine:
            one = await engine.generate("What is this?", params)
            two = await engine.generate("See <image>.", params, images=[tiny_image(1)])
        answers.append(tokens_of([one, two]))
    assert answers[0] == answers[1]


def test_the_switch_is_checked() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AsyncEngine.from_pretrained("x", packed_layers="yes")
    assert caught.value.parameter == "packed_layers"
    with pytest.raises(InvalidRequestError) as caught:
        AsyncEngine.from_pretrained("x", quantization="int5")
    assert caught.value.parameter == "quantization"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_quantised_layers_answer(folder: Path, quantization: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    sizes = {"kv_cache_bytes": 8 << 20, "max_model_len": 512, "dtype": "float32"}
    async with AsyncEngine.from_pretrained(
        folder, device="cpu", quantization=quantization, **sizes
    ) as engine:
        output = await engine.generate("See <image>.", params, images=[tiny_image(1)])
    assert len(output.token_ids) == 4


async def test_quantisation_that_cannot_be(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", dtype="float64", quantization="int8")
    with pytest.raises(ModelLoadError, match="leave quantization out"):
        await engine.start()
