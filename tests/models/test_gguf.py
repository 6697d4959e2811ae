"""GGUF files: read as they are, of every type, by themselves and beside a config.

They are written by the format's own package, whose numbers are the reference.
"""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.kernels.grouped import round_inputs
from aioengine.models.quantization.gguf_blocks import (
    BLOCKS,
    check_tensors,
    read_floats,
    read_grouped,
)
from aioengine.models.quantization.gguf_file import GgufFile
from aioengine.models.quantization.gguf_weights import find_gguf
from aioengine.models.quantization.grouped_layers import grouped_of
from aioengine.models.runtime.checkpoint import check_files, read_config
from aioengine.models.runtime.gguf_folder import open_gguf
from aioengine.models.runtime.registry import resolve
from tests.support.tiny import draw_weights, tiny_llama, tiny_tokenizer

KIND = gguf.GGMLQuantizationType
HALVES = {
    KIND.Q4_0: (0,), KIND.Q4_1: (0, 2), KIND.Q5_0: (0,), KIND.Q5_1: (0, 2), KIND.Q8_0: (0,),
    KIND.Q2_K: (80, 82), KIND.Q3_K: (108,), KIND.Q4_K: (0, 2), KIND.Q5_K: (0, 2), KIND.Q6_K: (208,),
    KIND.IQ4_NL: (0,), KIND.IQ4_XS: (0,), KIND.MXFP4: (),
}  # fmt: skip
"""Where a block's float16 numbers lie."""
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
}  # fmt: skip
PLAIN_NORMS = {"post_attention_layernorm": "ffn_norm"}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
AROUND = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def draw_blocks(kind: KIND, count: int) -> np.ndarray[Any, Any]:
    """Any bytes, but that scales are numbers."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = generator.normal(0, 1, (count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if kind is KIND.MXFP4:
        blocks[:, 0] = generator.integers(120, 132, count)
    return blocks


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_every_type(kind: KIND, tmp_path: Path) -> None:
    unit, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw_blocks(kind, 6 * 2)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("some.weight", blocks.reshape(6, 2 * size), raw_dtype=kind)
    write(writer)
    wanted = torch.from_numpy(dequantize(blocks, kind).astype(np.float32)).view(6, 2 * unit)
    file = GgufFile(tmp_path / "a.gguf")
    assert file.tensors["some.weight"].shape == wanted.shape
    assert BLOCKS[int(kind)].name == kind.name
    grouped = read_grouped(file, "some.weight")
    assert grouped.numbers.shape == wanted.shape
    # Scales in two stages have more digits than float16.
    exactness = 1e-3 if "_K" in kind.name or "XS" in kind.name else 0
    off = (grouped.floats() - wanted).abs().max()
    assert off <= exactness * wanted.abs().max()
    assert torch.equal(read_floats(file, "some.weight"), grouped.floats())


def test_all_types_are_tried() -> None:
    assert {int(kind) for kind in HALVES} == set(BLOCKS)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def turned(weight: Tensor, heads: int) -> Tensor:
    """Rows of heads as llama.cpp rotates them: pairs, where transformers has halves."""
    halves = weight.view(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def tensor_name(name: str, norms: Mapping[str, str]) -> str:
    path, _, part = name.rpartition(".")
    if path in AROUND:
        return f"{AROUND[path]}.{part}"
    _, _, index, inner = path.split(".", 3)
    return f"blk.{index}.{ {**LAYER, **norms}[inner] }.{part}"


def save_weights(
    model: Any,
    path: Path,
    architecture: str,
    kind: KIND | None,
    describe: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Any:
    """Write a model's weights as llama.cpp's converter does; the model then has what they are."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer)
    norms = SANDWICH if architecture == "gemma3" else PLAIN_NORMS
    for name, parameter in model.named_parameters():
        weight = parameter.detach().float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = heads.get(name.split(".")[-2], 0) if architecture == "llama" else 0
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        if count:
            weight = turned(weight, count)
        numbers = np.ascontiguousarray(weight.numpy())
        if kind is None or weight.dim() < 2:
            writer.add_tensor(tensor_name(name, norms), numbers)
            continue
        blocks = quantize(numbers, kind)
        writer.add_tensor(tensor_name(name, norms), blocks, raw_dtype=kind)
        rounded = torch.from_numpy(dequantize(blocks, kind).astype(np.float32))
        if count:
            rounded = rounded.view(count, -1, 2, weight.shape[1]).transpose(1, 2)
        parameter.data = rounded.reshape(weight.shape).to(parameter.dtype)
    write(writer)
    return model


def gemma3() -> Any:
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=6, head_dim=16,
            num_attention_heads=4, num_key_value_heads=2, query_pre_attn_scalar=16,
            sliding_window=8, max_position_embeddings=256,
        )
    )  # fmt: skip
    draw_weights(model)
    return model.eval()


def qwen2() -> Any:
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    draw_weights(model)
    return model.eval()


def llama(**changes: Any) -> Any:
    return tiny_llama(torch.float32, hidden_size=64, **changes)


MODELS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("llama", lambda: llama(tie_word_embeddings=False)),
    "llama, tied": ("llama", lambda: llama(tie_word_embeddings=True)),
    "qwen2": ("qwen2", qwen2),
    "gemma3": ("gemma3", gemma3),
}


def save(folder: Path, name: str, kind: KIND | None) -> Any:
    """Write config, tokenizer and weights in a GGUF file; the model that they stand for."""
    architecture, make = MODELS[name]
    model = make()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return save_weights(model, folder / "model.gguf", architecture, kind)


def load(folder: Path) -> Any:
    config = read_config(folder, revision=None, trust_remote_code=False)
    check_files(folder, config)
    return resolve(config.architectures).load_module(
        folder, hf_config=config, dtype=torch.float32, device="cpu"
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", [None, KIND.Q8_0, KIND.Q4_0, KIND.Q4_1])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_file(name: str, kind: KIND | None, tmp_path: Path) -> None:
    meant = save(tmp_path, name, kind)
    found = load(tmp_path)
    for key, parameter in found.named_parameters():
        torch.testing.assert_close(parameter, meant.get_parameter(key), rtol=1e-6, atol=1e-6)
    known = {key for key, module in found.named_modules() if grouped_of(module) is not None}
    layers = {
        key for key, module in found.named_modules() if isinstance(module, nn.Linear | nn.Embedding)
    }
    assert known == (set() if kind is None else layers)


@pytest.mark.parametrize("name", MODELS)
async def test_tokens(name: str, tmp_path: Path) -> None:
    """Those of transformers with what the numbers stand for; inputs are full."""
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(1))

    def generate() -> Tensor:
        meant = save(tmp_path, name, KIND.Q4_0)
        found: Tensor = meant.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        return found[0, 9:]

    wanted = await asyncio.to_thread(generate)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_bytes": 8 << 20}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for is_full in (True, False):
        async with AsyncEngine.from_pretrained(
            tmp_path / "model.gguf", quantize_activations=not is_full, **options
        ) as engine:
            output = await engine.generate(ids[0].tolist(), params)
        assert len(output.token_ids) == 12
        if is_full:
            assert list(output.token_ids) == wanted.tolist()


def describe(writer: gguf.GGUFWriter, *, theta: float = 10000.0) -> None:
    """The metadata of a llama, and a byte-level tokenizer of 300 words."""
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(1e-6)
    words = ["<s>", "</s>", *sorted(gguf_letters()), "wo", "rd"]
    words += [f"word{i}" for i in range(300 - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * 298)
    writer.add_token_merges(["w o", "r d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def gguf_letters() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def save_alone(path: Path, change: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Any:
    model = llama(
        vocab_size=300, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip

    def both(writer: gguf.GGUFWriter) -> None:
        describe(writer)
        change(writer)

    return save_weights(model, path, "llama", KIND.Q8_0, both)


@torch.no_grad()
def test_a_file_by_itself(tmp_path: Path) -> None:
    meant = save_alone(tmp_path / "alone.gguf")
    made = open_gguf(tmp_path / "alone.gguf")
    assert made is not None
    folder = made.path
    config = read_config(folder, revision=None, trust_remote_code=False)
    for field in ("hidden_size", "num_hidden_layers", "head_dim", "rms_norm_eps", "vocab_size"):
        assert getattr(config, field) == pytest.approx(getattr(meant.config, field)), field
    assert config.rope_parameters["rope_theta"] == 10000
    ids = torch.arange(9)[None]
    torch.testing.assert_close(load(folder)(ids).logits, meant(ids).logits, rtol=1e-4, atol=1e-4)
    made.remove()
    assert not folder.exists() and (tmp_path / "alone.gguf").exists()


async def test_an_engine_of_a_file_by_itself(tmp_path: Path) -> None:
    await asyncio.to_thread(save_alone, tmp_path / "alone.gguf")
    options = {"device": "cpu", "max_model_len": 128, "kv_cache_bytes": 8 << 20}
    async with AsyncEngine.from_pretrained(tmp_path / "alone.gguf", **options) as engine:
        assert engine.model_name == "alone.gguf"
        output = await engine.generate("word", SamplingParams(max_tokens=4, temperature=0))
        assert engine._core.loaded.folder is not None
    assert len(output.token_ids) <= 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda writer: writer.add_sliding_window(32), "attention.sliding_window"),
        (lambda writer: writer.add_rope_scaling_factor(2.0), "rope.scaling.factor"),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
            "rope_freqs.weight",
        ),
        (lambda writer: writer.add_expert_count(4), "expert_count"),
    ],
)
def test_metadata_that_are_not_understood(change: Any, reason: str, tmp_path: Path) -> None:
    save_alone(tmp_path / "alone.gguf", change)
    with pytest.raises(ModelLoadError, match=rf"{reason}.*config\.json"):
        open_gguf(tmp_path / "alone.gguf")


def test_tensors_without_a_place(tmp_path: Path) -> None:
    save_alone(tmp_path / "a.gguf", lambda w: w.add_tensor("blk.0.more", np.ones(8, np.float32)))
    made = open_gguf(tmp_path / "a.gguf")
    assert made is not None
    with pytest.raises(ModelLoadError, match=r"blk\.0\.more"):
        load(made.path)


def test_types_that_are_not_read(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        blocks = np.zeros((2, 66), np.uint8)
        writer.add_tensor("blk.0.ffn_up.more", blocks, raw_dtype=KIND.IQ2_XXS)

    save_alone(tmp_path / "a.gguf", add)
    with pytest.raises(ModelLoadError, match=r"ffn_up\.more.*type 16.*Q4_K"):
        open_gguf(tmp_path / "a.gguf")


def test_other_architectures(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    write(writer)
    with pytest.raises(ModelLoadError, match=r"'mamba'.*qwen2"):
        open_gguf(tmp_path / "a.gguf")


def test_several_files(tmp_path: Path) -> None:
    """One has to be named; parts of one model belong together."""
    save(tmp_path, "llama", KIND.Q8_0)
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="several GGUF files"):
        load(tmp_path)
    made = open_gguf(tmp_path / "other.gguf")
    assert made is not None
    assert [each.name for each in find_gguf(made.path)] == ["other.gguf"]
    shutil.move(tmp_path / "other.gguf", tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ModelLoadError, match="model-00002-of-00002"):
        open_gguf(tmp_path / "model-00001-of-00002.gguf")


@pytest.mark.parametrize("cut", [0, 3, 23, 100, 2000, -100])
def test_files_that_are_cut(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "alone.gguf"
    save_alone(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelLoadError, match="fetch"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("at", "value"),
    [(4, struct.pack("<I", 9)), (8, b"\xff" * 8), (16, b"\xff" * 8), (24, b"\xff" * 8)],
)
def test_counts_that_are_too_large(at: int, value: bytes, tmp_path: Path) -> None:
    path = tmp_path / "alone.gguf"
    save_alone(path)
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="not a whole GGUF file"):
        GgufFile(path)


def test_any_damage_is_said_in_words(tmp_path: Path) -> None:
    """Flipped bytes of the header give an error of ours, or a file that is read."""
    path = tmp_path / "alone.gguf"
    save_alone(path)
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(whole)
        for at in generator.integers(4, 9000, 3):
            content[at] = generator.integers(256)
        path.write_bytes(content)
        try:
            file = GgufFile(path)
            check_tensors(file)
        except ModelLoadError:
            continue
        for name in file.tensors:
            read_floats(file, name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(value: float, tmp_path: Path) -> None:
    save(tmp_path, "llama", KIND.Q4_0)
    path, name = tmp_path / "model.gguf", "blk.0.ffn_down.weight"
    block = BLOCKS[int(KIND.Q4_0)]
    blocks = GgufFile(path).bytes_of(name, block.unit, block.size).numpy().tobytes()
    at = path.read_bytes().index(blocks) + 3 * block.size
    with path.open("r+b") as file:  # a block begins with its scale
        file.seek(at)
        file.write(np.float16(value).tobytes())
    with pytest.raises(ModelLoadError, match=f"{name}.* cannot be read .*no finite numbers"):
        load(tmp_path)


def test_groups_of_16_round_inputs_alike() -> None:
    """Of Q6_K, whose scales are of 16 weights."""
    x = torch.randn(3, 64)
    found = round_inputs(x, 16)
    assert (found - x).abs().max() < x.abs().max() / 127
