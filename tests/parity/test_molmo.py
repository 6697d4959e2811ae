"""Molmo: no class of transformers' to compare with, so its parts, a plain run of the whole, and
the published layout are what it is held to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import save_file
from tokenizers import processors
from torch import Tensor, nn
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams
from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    ModelLoadError,
    UnsupportedModalityError,
)
from aioengine.media_pipeline.worker_main import _make_processor
from aioengine.media_pipeline.worker_pool import _describe_setup
from aioengine.models.molmo.modeling import MolmoForCausalLM, MolmoVisionBackbone
from aioengine.models.molmo.molmo import Molmo, MolmoConfig, MolmoProcessingInfo
from aioengine.models.runtime.hf_loading import build_on_meta, load_config
from aioengine.processors.hf.molmo import NO_TOKEN, MolmoImageProcessor, MolmoProcessor
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from tests.parity.whole import unpaged
from tests.processors.conftest import make_tokenizer
from tests.support.tiny import draw_weights, tiny_image

MAX_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
ADDED = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
CROPS = {
    "max_crops": 4,
    "overlap_margins": [2, 2],
    "base_image_input_size": [32, 32],
    "image_patch_size": 4,
}
TEXTS = (
    "* User: What is it? Assistant:",
    "* User: What is it? Assistant:",
    "*",
    "** User: Compare them. Assistant:",
    "** same?",
    "User: no picture here, tell a story Assistant:",
)
SIZES = ((40, 30), (30, 60), (56, 56))


def tiny_tokenizer() -> Any:
    """Without a first token, as the base models' are; the added tokens are the last."""
    base = make_tokenizer("bytes")._tokenizer
    base.post_processor = processors.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(list(ADDED), special_tokens=True)
    return tokenizer


def tiny_config(**changes: Any) -> MolmoConfig:
    tokenizer = tiny_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer) - len(ADDED),
        "embedding_size": len(tokenizer) - len(ADDED),
        "additional_vocab_size": 8,
        "hidden_size": 48,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "vit_layers": [-1, -3],
        "image_input_size": [32, 32],
        "image_patch_size": 4,
        "image_num_pos": 65,
        "image_num_layers": 3,
        "image_emb_dim": 32,
        "image_num_heads": 2,
        "image_num_key_value_heads": 2,
        "image_head_dim": 16,
        "image_mlp_dim": 64,
        "architectures": ["MolmoForCausalLM"],
        "dtype": "float64",
        # As published; nothing of it is ever run.
        "auto_map": {"AutoConfig": "config_molmo.MolmoConfig"},
    }
    return MolmoConfig(**{**settings, **changes})


OLMO = {
    "qkv_bias": False,
    "attention_layer_norm": True,
    "norm_after": True,
    "num_key_value_heads": None,
}


def drawn(config: MolmoConfig, dtype: torch.dtype = torch.float64) -> MolmoForCausalLM:
    model = MolmoForCausalLM(config).to(dtype).eval().requires_grad_(False)
    draw_weights(model)
    return model


def published(model: MolmoForCausalLM) -> dict[str, Tensor]:
    """The weights under the names that a published checkpoint has."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = weights.pop("model.transformer.wte.weight")
    new = model.num_new_rows
    weights["model.transformer.wte.embedding"] = table[:-new].clone()
    weights["model.transformer.wte.new_embedding"] = table[-new:].clone()
    return weights


def save(folder: Path, config: MolmoConfig) -> MolmoForCausalLM:
    model = drawn(config)
    config.save_pretrained(folder)
    save_file(published(model), folder / "model.safetensors")
    tiny_tokenizer().save_pretrained(folder)
    settings = {**CROPS, "image_processor_type": "MolmoImageProcessor", "image_padding_mask": True}
    settings["auto_map"] = {"AutoProcessor": "preprocessing_molmo.MolmoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


@torch.inference_mode()
def expect(
    model: MolmoForCausalLM, text: str, images: Sequence[Image.Image], eos: int
) -> tuple[int, ...]:
    """Greedy tokens by running the whole sequence each time, rows added as it is published."""
    processor = MolmoProcessor(MolmoImageProcessor(**CROPS), tiny_tokenizer())
    inputs = processor(text=text, images=list(images) or None)
    ids = inputs["input_ids"][0]
    added = torch.zeros(len(ids), 48, dtype=torch.float64)
    if images:
        features = model.get_image_features(
            inputs["pixel_values"].double(), inputs["image_masks"].double()
        )
        start = crop = 0
        for image, count in zip(images, inputs["num_crops"].tolist(), strict=True):
            places = inputs["image_input_idx"][crop : crop + count]
            rows = features[crop : crop + count]
            added[1 + start + places[places >= 0]] += rows[places >= 0]
            start += len(processor.layout_tokens(image.height, image.width, {}))
            crop += count
    found: list[int] = []
    while len(found) < MAX_TOKENS and found[-1:] != [eos]:
        every = torch.cat([ids, torch.tensor(found, dtype=torch.int64)])
        embeds = model.get_input_embeddings()(every)
        embeds[: len(ids)] += added
        hidden = model(None, torch.arange(len(every)), embeds)
        found.append(int(model.compute_logits(hidden[-1:]).argmax()))
    return tuple(found)


@dataclass(frozen=True)
class Case:
    text: str
    images: tuple[Image.Image, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    folder: Path
    cases: tuple[Case, ...]


@pytest.fixture(scope="module", params=["qwen", "olmo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    plain = unpaged(save(folder, tiny_config(**(OLMO if request.param == "olmo" else {}))))
    eos = tiny_tokenizer().eos_token_id
    a, b, c = (tiny_image(i).resize(size) for i, size in enumerate(SIZES))
    pil_images = {0: iter([()]), 1: iter([(a,), (b,), (c,)]), 2: iter([(a, b), (c, c)])}
    cases = []
    for text in TEXTS:
        images = next(pil_images[text.count("*")])
        text = text.replace("*", "").strip() or "a"
        cases.append(Case(text, images, expect(plain, text, images, eos)))
    return Model(folder, tuple(cases))


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 1024}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **options})


async def check_all(engine: AsyncEngine, cases: Sequence[Case]) -> None:
    outputs = await asyncio.gather(
        *(engine.generate(case.text, PARAMS, images=case.images) for case in cases)
    )
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == case.expected, case.text


def test_the_cases_differ(model: Model) -> None:
    assert len({case.expected for case in model.cases}) >= 5
    assert len({token for case in model.cases for token in case.expected}) > 6


@pytest.mark.parametrize(
    ("model", "budget"),
    [("qwen", 1024), ("qwen", 13), ("qwen", 5), ("qwen", 1), ("olmo", 1024), ("olmo", 13)],
    indirect=["model"],
)
async def test_tokens_equal_a_plain_run(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        for case in model.cases[:2]:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            assert output.token_ids == case.expected
        await engine.reset_caches()
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0
        assert now.kv_blocks_free == now.kv_blocks_total


async def test_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)
        assert engine.statistics().encoder_items_run == 3


# The parts.


def exact_norms(model: nn.Module) -> nn.Module:
    """transformers' norms go through float32 whatever comes in: here they stay in float64."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Qwen2RMSNorm | Olmo2RMSNorm):
            exact = nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=torch.float64)
            exact.weight = module.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, exact)
    return model


def as_hf(model: MolmoForCausalLM, config: MolmoConfig) -> Any:
    """The decoder as transformers' Qwen2 or OLMo 2."""
    settings = {
        "vocab_size": config.embedding_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size // 2,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "max_position_embeddings": 1024,
        "rms_norm_eps": config.layer_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
    }
    is_olmo = config.norm_after
    own = hf.Olmo2Config(**settings) if is_olmo else hf.Qwen2Config(**settings)
    twin: Any = (hf.Olmo2ForCausalLM if is_olmo else hf.Qwen2ForCausalLM)(own).double().eval()
    weights = {
        "model.embed_tokens.weight": model.get_input_embeddings().weight[: config.embedding_size],
        "model.norm.weight": model.get_decoder().ln_f.weight,
        "lm_head.weight": model.get_decoder().ff_out.weight,
    }
    first, second = (
        ("post_attention_layernorm", "post_feedforward_layernorm")
        if is_olmo
        else ("input_layernorm", "post_attention_layernorm")
    )
    for index, block in enumerate(model.get_decoder().blocks):
        at = f"model.layers.{index}."
        for name, part in zip("qkv", block.att_proj.weight.split(block.sizes), strict=True):
            weights[f"{at}self_attn.{name}_proj.weight"] = part
        if block.att_proj.bias is not None:
            for name, part in zip("qkv", block.att_proj.bias.split(block.sizes), strict=True):
                weights[f"{at}self_attn.{name}_proj.bias"] = part
        if block.q_norm is not None:
            weights[f"{at}self_attn.q_norm.weight"] = block.q_norm.weight
            weights[f"{at}self_attn.k_norm.weight"] = block.k_norm.weight
        up, gate = block.ff_proj.weight.chunk(2)
        weights |= {
            f"{at}self_attn.o_proj.weight": block.attn_out.weight,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.down_proj.weight": block.ff_out.weight,
            f"{at}{first}.weight": block.attn_norm.weight,
            f"{at}{second}.weight": block.ff_norm.weight,
        }
    twin.load_state_dict(weights)
    return exact_norms(twin)


@pytest.mark.parametrize("changes", [{}, OLMO], ids=["qwen2", "olmo2"])
@torch.no_grad()
def test_the_decoder_is_that_of_its_base_model(changes: dict[str, Any]) -> None:
    config = tiny_config(rope_theta=1e6, **changes)
    model = unpaged(drawn(config))
    twin = as_hf(model, config)
    ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    logits = model.compute_logits(model(ids, torch.arange(40)))
    torch.testing.assert_close(logits, twin(ids[None]).logits[0], rtol=0, atol=1e-10)


@torch.no_grad()
def test_the_tower_is_clip() -> None:
    config = tiny_config()
    tower = drawn(config).model.vision_backbone.image_vit  # type: ignore[union-attr]
    twin = hf.CLIPVisionModel(
        hf.CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            image_size=32, patch_size=4,
        )
    ).double().eval()  # fmt: skip
    weights = twin.state_dict()
    prefix = "vision_model." if any(n.startswith("vision_model.") for n in weights) else ""
    own: Any = tower
    patches = own.patch_embedding.weight.view(32, 4, 4, 3).permute(0, 3, 1, 2)
    weights[f"{prefix}embeddings.class_embedding"] = own.class_embedding
    weights[f"{prefix}embeddings.position_embedding.weight"] = own.positional_embedding
    weights[f"{prefix}embeddings.patch_embedding.weight"] = patches
    names = {
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.out_proj",
        "feed_forward.w1": "mlp.fc1", "feed_forward.w2": "mlp.fc2",
        "attention_norm": "layer_norm1", "ffn_norm": "layer_norm2",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        weights[f"{prefix}pre_layrnorm.{kind}"] = getattr(own.pre_ln, kind)
        for index, block in enumerate(own.transformer.resblocks):
            for mine, theirs in names.items():
                tensor = getattr(block.get_submodule(mine), kind)
                weights[f"{prefix}encoder.layers.{index}.{theirs}.{kind}"] = tensor
    twin.load_state_dict(weights)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    flat = pixels.view(2, 3, 8, 4, 8, 4).permute(0, 2, 4, 3, 5, 1).reshape(2, 64, 48)
    theirs = twin(pixels, output_hidden_states=True).hidden_states[1:]
    for mine, their in zip(own(flat), theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=0, atol=1e-10)


@torch.no_grad()
def test_pooling_and_projection() -> None:
    """Head by head and window by window, by hand."""
    config = tiny_config()
    backbone: Any = drawn(config).model.vision_backbone
    assert isinstance(backbone, MolmoVisionBackbone)
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(1, 64, 48, generator=generator).double()
    masks = torch.ones(1, 64).double()
    masks[0, :3], masks[0, 3:6], masks[0, 9] = 0, 0.5, -1
    layers = backbone.image_vit(patches)
    features = torch.cat([layers[-1][0, 1:], layers[-3][0, 1:]], -1)
    for index, mask in enumerate(masks[0].tolist()):
        if mask < 1:
            features[index] += backbone.pad_embed[0 if mask == 0 else 1]
    pool, project = backbone.image_pooling_2d, backbone.image_projector
    found = []
    for row in range(4):
        for column in range(4):
            places = [(2 * row + i) * 8 + 2 * column + j for i in (0, 1) for j in (0, 1)]
            window = features[places]
            query, key, value = pool.wq(window.mean(0)), pool.wk(window), pool.wv(window)
            heads = []
            for head in (slice(0, 16), slice(16, 32)):
                scores = key[:, head] @ query[head] / 4
                heads.append(scores.softmax(0) @ value[:, head])
            pooled = pool.wo(torch.cat(heads))
            gate = nn.functional.silu(project.w1(pooled))
            found.append(project.w2(gate * project.w3(pooled)))
    torch.testing.assert_close(backbone(patches, masks)[0], torch.stack(found), rtol=0, atol=1e-10)


MOLMO_7B_D: dict[str, Any] = {
    "vocab_size": 152064, "embedding_size": 152064, "hidden_size": 3584,
    "intermediate_size": 37888, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "qkv_bias": True, "rope_theta": 1000000.0, "layer_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}  # fmt: skip


def names_of_7b_d() -> set[str]:
    """As model.safetensors.index.json of allenai/Molmo-7B-D-0924 lists them."""
    blocks = ("att_proj.bias", "att_proj.weight", "attn_norm.weight", "attn_out.weight")
    blocks += ("ff_norm.weight", "ff_out.weight", "ff_proj.weight")
    names = {f"transformer.blocks.{i}.{name}" for i in range(28) for name in blocks}
    names |= {f"transformer.{n}" for n in ("ff_out.weight", "ln_f.weight")}
    names |= {f"transformer.wte.{n}" for n in ("embedding", "new_embedding")}
    attention = [
        f"{name}.{kind}" for name in ("wq", "wk", "wv", "wo") for kind in ("weight", "bias")
    ]
    tower = {f"attention.{name}" for name in attention}
    tower |= {
        f"{name}.{kind}"
        for name in ("feed_forward.w1", "feed_forward.w2", "attention_norm", "ffn_norm")
        for kind in ("weight", "bias")
    }
    vit = {f"transformer.resblocks.{i}.{name}" for i in range(23) for name in tower}
    vit |= {"class_embedding", "positional_embedding", "patch_embedding.weight"}
    vit |= {"pre_ln.weight", "pre_ln.bias"}
    vision = {f"image_vit.{name}" for name in vit} | {"pad_embed"}
    vision |= {f"image_pooling_2d.{name}" for name in attention}
    vision |= {f"image_projector.{name}.weight" for name in ("w1", "w2", "w3")}
    return {f"model.{n}" for n in names} | {f"model.vision_backbone.{n}" for n in vision}


def test_weights_are_those_of_the_published_checkpoint() -> None:
    model = build_on_meta(MolmoForCausalLM, MolmoConfig(**MOLMO_7B_D))
    weights = published(model)
    assert set(weights) == names_of_7b_d()
    # `total_parameters` of the published index.
    assert sum(tensor.numel() for tensor in weights.values()) == 8021025280
    assert list(weights["model.transformer.blocks.0.att_proj.weight"].shape) == [4608, 3584]
    assert list(weights["model.vision_backbone.pad_embed"].shape) == [2, 2048]
    specs = Molmo.probe(MolmoConfig(**MOLMO_7B_D))
    assert len(specs) == 28
    assert (specs[0].num_heads, specs[0].num_kv_heads, specs[0].key_dim) == (28, 4, 128)


# The layout.


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (336, 336, (12, 12)),  # one crop is enough
        (40, 30, (12, 12)),  # smaller than the margins
        (50, 1000, (12, 12)),  # narrower than the margins: by height alone it would be more
        (560, 336, (12, 20)),  # 448 by 224 between the margins: two windows side by side
        (640, 480, (20, 28)),  # 528 by 368: three by two windows enlarge it least
        (480, 640, (28, 20)),
        (4000, 1000, (20, 52)),  # too large for all: six by two shrink it least
        (5000, 5000, (28, 28)),  # three by three; a fourth in a row would gain nothing
    ],
)
def test_grids_of_the_published_settings(width: int, height: int, grid: tuple[int, int]) -> None:
    images = MolmoImageProcessor()
    assert images.grid(height, width, {}) == grid


def test_the_published_token_counts() -> None:
    """158 tokens for the small view; 1460 at most, for a column of twelve crops."""
    processor = MolmoProcessor(MolmoImageProcessor(), tiny_tokenizer())
    start, end, patch, column = (processor.tokenizer.convert_tokens_to_ids(t) for t in (ADDED[:4]))
    one = processor.layout_tokens(336, 336, {})
    view = [start, *[*[patch] * 12, column] * 12, end]
    assert len(view) == 158
    assert one == view * 2
    tall = processor.layout_tokens(100 * 28, 12 * 28, {})
    assert len(tall) == 1460
    assert tall == [*view, start, *[*[patch] * 12, column] * 100, end]


def test_every_token_has_its_own_patches() -> None:
    """In an image that fills its canvas, each token's four patches are those at its place."""
    images = MolmoImageProcessor(**{**CROPS, "max_crops": 6})
    # Three by two crops: windows of 16 pixels, and margins of 8 on each side.
    pil_image = tiny_image(3).resize((2 * 16 + 16, 3 * 16 + 16), Image.Resampling.NEAREST)
    made = images(pil_image, {})
    assert made["pixel_values"].shape == (7, 64, 48)
    assert images.grid(64, 48, {}) == (8, 6)
    mean, std = np.array(images.image_mean), np.array(images.image_std)
    pixels = ((np.asarray(pil_image) / 255 - mean) / std).astype(np.float32)
    begin = 4 * 5 + 3
    places = made["image_input_idx"].view(7, 4, 4)
    assert sorted(places[places >= 0].tolist()) == sorted(
        [1 + 5 * i + j for i in range(4) for j in range(4)]
        + [begin + 7 * i + j for i in range(8) for j in range(6)]
    )
    assert set(places[places < 0].tolist()) == {NO_TOKEN}
    crops = made["pixel_values"].view(7, 8, 8, 4, 4, 3)
    for crop, i, j in (places[1:] >= 0).nonzero().tolist():
        row, column = divmod(int(places[1 + crop, i, j]) - begin, 7)
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            top, left = 4 * (2 * row + down), 4 * (2 * column + right)
            np.testing.assert_allclose(
                crops[1 + crop, 2 * i + down, 2 * j + right],
                pixels[top : top + 4, left : left + 4],
                atol=1e-5,
            )


def test_paddings_are_marked() -> None:
    """Masks stand one crop early, and the last crop has none, as in the published processor."""
    images = MolmoImageProcessor(**CROPS)
    made = images(Image.new("RGB", (32, 22)), {})
    assert made["image_masks"].shape == (2, 64)
    rows = made["image_masks"][0].view(8, 8).mean(1).tolist()
    assert rows == pytest.approx([0, 0.75, 1, 1, 1, 1, 0.75, 0])
    assert (made["image_masks"][1] == -1).all()


# In an engine.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("molmo")
    save(path, tiny_config())
    return path


async def test_chat_messages(folder: Path) -> None:
    pil_image = tiny_image(1)
    parts = [{"type": "image", "image": pil_image}, {"type": "text", "text": "What is it?"}]
    talk = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": "Is <im_patch> it?"},
    ]
    async with engine_for(folder) as engine:
        raw = await engine.generate("User: What is it? Assistant:", PARAMS, images=[pil_image])
        chat = await engine.generate(talk[:1], PARAMS)
        assert chat.prompt_token_ids == raw.prompt_token_ids
        assert chat.token_ids == raw.token_ids
        expected = engine.processor.info.get_hf_processor()(
            text="User: What is it? Assistant:", images=pil_image
        )
        assert list(raw.prompt_token_ids) == expected["input_ids"][0].tolist()
        ids = await engine.generate(list(raw.prompt_token_ids), PARAMS, images=[pil_image])
        assert ids.prompt_token_ids == raw.prompt_token_ids
        assert ids.token_ids == raw.token_ids
        longer = (await engine.generate(talk, PARAMS)).prompt_token_ids
        text = engine.tokenizer.decode(longer)
        assert text.endswith(
            " User: What is it? Assistant: A dog. User: Is <im_patch> it? Assistant:"
        )
        patch = engine.tokenizer.convert_tokens_to_ids("<im_patch>")
        assert longer.count(patch) == raw.prompt_token_ids.count(patch)
        with pytest.raises(InvalidRequestError, match="alternate"):
            await engine.generate([{"role": "system", "content": "Be nice."}], PARAMS)


async def test_a_worker_process_makes_the_same_processor(folder: Path) -> None:
    async with engine_for(folder) as engine:
        own = engine.processor
        setup = json.loads(json.dumps(_describe_setup(folder, engine.config, own, 1)))
        made = _make_processor(setup)
        assert type(made) is type(own)
        assert type(made.info.get_hf_config()) is MolmoConfig
        images = MultiModalDataItems({"image": ImageProcessorItems([tiny_image(4)])})
        ((item,), (expected,)) = (each.process(images, {})["image"] for each in (made, own))
        assert all(torch.equal(item[name], expected[name]) for name in expected)


async def test_what_is_refused(folder: Path) -> None:
    async with engine_for(folder) as engine:

        async def ask(image: Any = None, **options: Any) -> Any:
            media = {"image": [image or tiny_image()]}
            prompt = Prompt(text="a", media=media, mm_processor_kwargs=options)
            return await engine.generate(prompt, PARAMS)

        for crops in (0, -1, 65, 1 << 40, 1.5, "2", True, [1]):
            with pytest.raises(InvalidRequestError, match=r"max_crops|integers"):
                await ask(max_crops=crops)
        with pytest.raises(InvalidRequestError, match="max_crops only"):
            await ask(image_mean=[0, 0, 0])
        with pytest.raises(MediaError, match="too narrow"):
            await ask(Image.new("RGB", (1, 200)))
        with pytest.raises(UnsupportedModalityError, match="embeddings"):
            await ask(Embeddings(torch.zeros(3, 48)))
        few, many = [(await ask(tiny_image(0).resize((90, 90)), max_crops=n)) for n in (1, 4)]
        assert len(few.prompt_token_ids) < len(many.prompt_token_ids)
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total


def test_checkpoints_that_are_not_what_they_say(folder: Path) -> None:
    config = load_config(folder)
    assert type(config) is MolmoConfig
    options = {"revision": None, "trust_remote_code": False}

    def load(**changes: Any) -> Any:
        return MolmoProcessingInfo.load_hf_processor(str(folder), config, options, **changes)

    assert load().tokenizer.eos_token_id == config.eos_token_id
    with pytest.raises(ModelLoadError, match="are not the tower's"):
        load(base_image_input_size=[40, 40])
    for change in (
        {"overlap_margins": [1, 1]},
        {"overlap_margins": [4, 4]},
        {"overlap_margins": 4},
        {"base_image_input_size": [32, 64]},
        {"image_patch_size": 5},
        {"max_crops": 10**9},
    ):
        with pytest.raises(ModelLoadError, match=r"preprocessor_config\.json"):
            load(**change)
    for settings, message in (
        ({"image_num_pos": 66}, "image_num_pos"),
        ({"moe_num_experts": 64}, "experts"),
        ({"layer_norm_type": "default"}, "layer_norm_type"),
        ({"vit_layers": [3]}, "vit_layers"),
        ({"vit_layers": []}, "vit_layers"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"num_attention_heads": 0}, "cannot be built"),
        ({"num_key_value_heads": 3}, "num_key_value_heads|num_kv_heads"),
        ({"hidden_size": -48}, "cannot be"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            Molmo.probe(tiny_config(**settings))
    with pytest.raises(ModelLoadError, match="no <im_patch>"):
        MolmoProcessor(MolmoImageProcessor(), make_tokenizer("bytes"))
    weights = published(drawn(tiny_config()))
    del weights["model.transformer.wte.new_embedding"]
    model = MolmoForCausalLM(tiny_config()).double()
    assert "model.transformer.wte.weight" not in model.load_weights(weights.items())
