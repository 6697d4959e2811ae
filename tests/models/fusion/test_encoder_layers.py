"""Encoder layers as one operator: which are planned, and that they compute what they did."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.library import has_bfloat16_attention
from aioengine.models.fusion import PASSES
from aioengine.models.fusion.encoder_layers import _LAYER
from tests.support.tiny import draw_weights

pytestmark = pytest.mark.skipif(
    not library.is_available() or library.instruction_set() == "generic",
    reason="matmuls are PyTorch's here",
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def clip() -> nn.Module:
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(image_size=28, patch_size=14, **SIZES))


def siglip() -> nn.Module:
    config = hf.SiglipVisionConfig(
        image_size=28, patch_size=14, vision_use_head=False, **{**SIZES, "num_attention_heads": 4}
    )
    return hf.SiglipVisionModel(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        decoder_layers=1,
        encoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=20,
        vocab_size=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.WhisperModel(config).get_encoder()


def internvl() -> nn.Module:
    """What attention and the feed-forward layer give is scaled, output by output."""
    config = hf.InternVLVisionConfig(image_size=[28, 28], patch_size=[14, 14], **SIZES)
    model = hf.InternVLVisionModel(config)
    for name, parameter in model.named_parameters():
        if "lambda" in name:
            nn.init.normal_(parameter, mean=1)
    return model


class Count(TorchDispatchMode):
    """Operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def packed(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model with all passes run, and as it was."""
    draw_weights(model)
    plain = copy.deepcopy(model.eval().requires_grad_(False))
    for each in PASSES:
        each(model)
    return model, plain


def num_planned(model: nn.Module) -> int:
    return sum(hasattr(module, _LAYER) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("build", [clip, siglip, whisper, internvl])
@torch.inference_mode()
def test_what_an_encoder_gives(build: Any, count: int, dtype: torch.dtype) -> None:
    with torch.inference_mode(False):
        model, plain = packed(build().to(dtype))
    assert num_planned(model) == 2
    shape = (count, 8, 40) if build is whisper else (count, 3, 28, 28)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Count() as counted:
        found = model(x).last_hidden_state
    assert counted.names.count("aioengine_cpu.encode_layer.default") == 2
    wanted = plain(x).last_hidden_state
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    bound = (1e-5 if dtype is torch.float32 else 4e-2) * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0)
    if dtype is torch.float32:
        alone = torch.cat([model(x[i : i + 1]).last_hidden_state for i in range(count)])
        torch.testing.assert_close(alone, found, atol=1e-6 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("build", [clip, siglip, internvl])
@torch.no_grad()
def test_a_model_that_has_run_is_planned_too(build: Any) -> None:
    """As in a trial at load: transformers leaves hooks that collect hidden states, which go on."""
    model = build()
    x = torch.randn(2, 3, 28, 28)
    model(x, output_hidden_states=True)
    assert any(each._forward_hooks for each in model.modules())
    model, plain = packed(model)
    assert num_planned(model) == 2
    found, wanted = (each(x, output_hidden_states=True).hidden_states for each in (model, plain))
    assert len(found) == 3
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_layer_that_somebody_listens_to_stays() -> None:
    model = clip()
    layers = [each for each in model.modules() if type(each).__name__ == "CLIPEncoderLayer"]
    layers[0].register_forward_hook(lambda *_: None)
    model, _ = packed(model)
    assert num_planned(model) == 1


def qwen2_vl() -> nn.Module:
    config = hf.models.qwen2_vl.Qwen2VLVisionConfig(
        depth=2, embed_dim=64, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=14
    )
    return hf.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel._from_config(
        config
    )


def qwen2_5_vl() -> nn.Module:
    config = hf.models.qwen2_5_vl.Qwen2_5_VLVisionConfig(
        depth=2, hidden_size=64, out_hidden_size=64, num_heads=2, intermediate_size=96,
        patch_size=14, window_size=56, fullatt_block_indexes=[1],
    )  # fmt: skip
    return hf.Qwen2_5_VisionTransformerPretrainedModel._from_config(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [qwen2_vl, qwen2_5_vl])
@torch.inference_mode()
def test_an_encoder_of_flat_rows(build: Any, dtype: torch.dtype) -> None:
    """Its cosines and sines are float32 in any dtype."""
    with torch.inference_mode(False):
        model, plain = packed(build().to(dtype))
    assert num_planned(model) == 2
    grid = torch.tensor([[1, 8, 6], [1, 4, 4]])
    x = torch.randn(64, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Count() as counted:
        found = model(x, grid_thw=grid).last_hidden_state
    assert counted.names.count("aioengine_cpu.encode_layer.default") == 2
    wanted = plain(x, grid_thw=grid).last_hidden_state
    bound = (1e-5 if dtype is torch.float32 else 4e-2) * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[(56, 42)], [(56, 42), (28, 56), (28, 28)]])
@torch.inference_mode()
def test_images_that_a_mask_keeps_apart(sizes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Pixtral's encoder: its images are one sequence, under a mask of blocks."""
    config = hf.PixtralVisionConfig(image_size=56, patch_size=14, **SIZES)
    with torch.inference_mode(False):
        model, plain = packed(hf.PixtralVisionModel(config).to(dtype))
    assert num_planned(model) == 2
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(len(sizes), 3, 56, 56, generator=generator).to(dtype)
    with Count() as counted:
        found = model(pixels, image_sizes=torch.tensor(sizes)).last_hidden_state
    assert counted.names.count("aioengine_cpu.encode_layer.default") == 2
    wanted = plain(pixels, image_sizes=torch.tensor(sizes)).last_hidden_state
    bound = (1e-5 if dtype is torch.float32 else 4e-2) * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0)


def layer_and_rows(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, Tensor]:
    model, plain = packed(clip().to(dtype))
    layers = [
        next(module for module in each.modules() if type(module).__name__ == "CLIPEncoderLayer")
        for each in (model, plain)
    ]
    return layers[0], layers[1], torch.randn(2, 6, 64).to(dtype)


LEAST = torch.finfo(torch.float32).min
INDEX = torch.arange(6)
UNKNOWN = {
    "padding": torch.zeros(2, 1, 6, 6).masked_fill(INDEX > 3, LEAST),
    "padding of one": torch.zeros(1, 1, 6, 6).masked_fill(INDEX > 3, LEAST),
    "blocks that change places": torch.zeros(1, 1, 6, 6).masked_fill(
        (INDEX % 2)[:, None] != INDEX % 2, LEAST
    ),
    "causal": torch.zeros(1, 1, 6, 6).masked_fill(INDEX[:, None] < INDEX, LEAST),
    "a bias": torch.full((1, 1, 6, 6), 0.5),
    "no key": torch.full((1, 1, 6, 6), LEAST),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_mask_is_left_to_the_layers_own_forward(name: str) -> None:
    layer, plain, x = layer_and_rows()
    mask = UNKNOWN[name]
    x = x[: len(mask)]
    with torch.inference_mode(), Count() as counted:
        found = layer(x, mask)
        assert "aioengine_cpu.encode_layer.default" not in counted.names
        torch.testing.assert_close(found, plain(x, mask), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("blocks", [[6], [1, 5], [2, 2, 2]], ids=str)
def test_a_mask_of_blocks(blocks: list[int], kind: torch.dtype) -> None:
    layer, plain, x = layer_and_rows()
    owner = torch.arange(len(blocks)).repeat_interleave(torch.tensor(blocks))
    mask = (owner[:, None] == owner)[None, None]
    if kind is not torch.bool:
        mask = torch.zeros(1, 1, 6, 6).masked_fill(~mask, LEAST)
    with torch.inference_mode(), Count() as counted:
        found = [layer(x[i : i + 1], mask) for i in range(2)]
        assert counted.names.count("aioengine_cpu.encode_layer.default") == 2
        for i in range(2):
            torch.testing.assert_close(found[i], plain(x[i : i + 1], mask), atol=1e-4, rtol=1e-4)


def test_a_mask_for_other_numbers_of_sequences() -> None:
    """What is known of a mask is known for the rows that it was given with."""
    layer, plain, x = layer_and_rows()
    mask = torch.zeros(1, 1, 1, 6)
    with torch.inference_mode():
        for rows in (x, x[:1], x):
            found = layer(rows, mask)
            torch.testing.assert_close(found, plain(rows, mask), atol=1e-4, rtol=1e-4)


def test_rows_that_do_not_lie_close() -> None:
    layer, plain, _ = layer_and_rows()
    with torch.inference_mode(), Count() as counted:
        wide = torch.randn(2, 6, 128)[..., ::2]
        found = layer(wide, None)
        assert "aioengine_cpu.encode_layer.default" in counted.names
        torch.testing.assert_close(found, plain(wide, None), atol=1e-4, rtol=1e-4)


def test_a_layer_of_another_kind_stays() -> None:
    class Twice(hf.models.clip.modeling_clip.CLIPEncoderLayer):  # type: ignore[misc,name-defined]
        def forward(self, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
            return 2 * super().forward(hidden_states, attention_mask)

    model = clip()
    for module in model.modules():
        if type(module).__name__ == "CLIPEncoderLayer":
            module.__class__ = Twice
    model, _ = packed(model)
    assert num_planned(model) == 0


def test_ends_of_sequences_that_do_not_fit_are_refused() -> None:
    layer, _, x = layer_and_rows()
    operators = getattr(layer, _LAYER).operators
    rows = x.flatten(0, 1)
    for lengths in ([6, 5], [13], [], [12, 0]):
        with pytest.raises(RuntimeError, match=r"lengths|sequences"):
            operators.encode(rows, (), lengths)
    apart = [operators.encode(each.contiguous(), (), [6]) for each in x]
    torch.testing.assert_close(operators.encode(rows, (), [6, 6]), torch.cat(apart))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [2, 4])
@torch.inference_mode()
def test_a_sequence_in_the_company_of_thousands_of_rows(heads: int, dtype: torch.dtype) -> None:
    """Rows are computed some 2,048 at a time. Attention of heads of 32 may be ours, and has the
    same bits then; PyTorch's, in float32 and of heads of 16, may have others."""
    with torch.inference_mode(False):
        config = hf.CLIPVisionConfig(
            image_size=28, patch_size=14, **{**SIZES, "num_attention_heads": heads}
        )
        model, _ = packed(hf.CLIPVisionModel(config).to(dtype))
    layer = next(getattr(each, _LAYER) for each in model.modules() if hasattr(each, _LAYER))
    lengths = [1, 700, 700, 646, 1, 2048, 2049, 3, 3, 3, 5, 2047]
    x = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = layer.operators.encode(x, (), lengths)
    apart = [
        layer.operators.encode(each.contiguous(), (), [len(each)]) for each in x.split(lengths)
    ]
    wanted = torch.cat(apart)
    is_ours = dtype == torch.bfloat16 and heads == 2 and has_bfloat16_attention()
    bound = 0 if is_ours else (1e-5 if dtype == torch.float32 else 2e-2) * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0)
