"""DeepSeek-VL2: its parts beside those of transformers, and the engine beside a plain forward."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

from aioengine import Embeddings, Prompt
from aioengine.errors import InvalidRequestError, ModelLoadError, PlaceholderMismatchError
from aioengine.models.deepseek_vl2.language import DeepseekLanguageModel
from aioengine.models.deepseek_vl2.modeling import DeepseekVL2, DeepseekVLV2ForCausalLM
from aioengine.models.deepseek_vl2.processing import (
    DeepseekLanguageConfig,
    DeepseekVL2Config,
    DeepseekVL2ProcessingInfo,
)
from aioengine.processors.hf.deepseek_vl2 import (
    DeepseekVL2Processor,
    load_deepseek_tokenizer,
    select_best_resolution,
)
from aioengine.processors.info import load_context
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from tests.parity.families import Case
from tests.parity.whole import (
    PARAMS,
    check_all,
    check_alone_and_together,
    check_without_prefixes,
    engine_for,
    exact_norms,
    greedy,
    unpaged,
)
from tests.processors.conftest import make_tokenizer
from tests.support.tiny import draw_weights, tiny_image

SIDE = 21
"""Of a tile, in pixels: 3 x 3 patches of 7, which are 2 x 2 rows."""
CANDIDATES = [(SIDE * m, SIDE * n) for m in range(1, 5) for n in range(1, 5) if m * n <= 4]
SIZES = ((40, 30), (30, 75), (21, 21), (70, 20))
TEXTS = (
    "USER: *\nWhat is it? ASSISTANT:",
    "USER: *\nWhat is it? ASSISTANT:",
    "*",
    "First * then * now compare.",
    "** same?",
    "*, * and * all together",
    "no picture here, tell a story",
)
VISION = {
    "model_type": "vision",
    "image_size": SIDE,
    "patch_size": 7,
    "width": 32,
    "layers": 2,
    "heads": 2,
    "mlp_ratio": 2.5,
}
PROJECTOR = {"model_type": "mlp_projector", "input_dim": 32, "n_embed": 48}
LANGUAGE: dict[str, Any] = {
    "vocab_size": 420,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": None,
    "dtype": "float64",
}
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.2,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
PLAIN = {"kv_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0, "v_head_dim": 0}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {**LANGUAGE, **PLAIN, "use_mla": False},
    "small": {**LANGUAGE, **LATENT, "rope_scaling": YARN},
    "base": {
        **LANGUAGE,
        **LATENT,
        "q_lora_rank": 24,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "n_group": 4,
        "topk_group": 2,
    },
}


def settings_of(name: str) -> dict[str, Any]:
    """A published config of that kind, but for the sizes."""
    return {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [list(pair) for pair in CANDIDATES],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "torch_dtype": "float64",
        "vision_config": VISION,
        "projector_config": PROJECTOR,
        "language_config": MODELS[name],
    }


def draw(model: Any) -> Any:
    """Wide weights in float64; buffers stay what they are."""
    draw_weights(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return model.eval().requires_grad_(False)


def build(settings: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        return draw(DeepseekVLV2ForCausalLM(DeepseekVL2Config.from_dict(copy.deepcopy(settings))))


def published(model: Any) -> dict[str, Tensor]:
    """The weights as a checkpoint has them: each expert by itself, and a head that nobody reads."""
    found = {n: t for n, t in model.state_dict().items() if ".mlp.experts." not in n}
    places = model.language.expert_weights()
    found |= {f"language.{name}": tensor for name, tensor in places.items()}
    found["vision.attn_pool.latent"] = torch.zeros(1, 1, 32)
    return {name: tensor.clone() for name, tensor in found.items()}


def save(model: Any, settings: dict[str, Any], folder: Path) -> None:
    """A folder as it was published, and no code."""
    save_file(published(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    processor = {
        "candidate_resolutions": settings["candidate_resolutions"],
        "downsample_ratio": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": "<image>",
        "normalize": True,
        "patch_size": 7,
        "processor_class": "DeepseekVLV2Processor",
        "sft_format": "deepseek",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    make_tokenizer("bytes")._tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


def processor_of(folder: Path) -> DeepseekVL2Processor:
    tokenizer = load_deepseek_tokenizer(str(folder), None, "<image>")
    return DeepseekVL2Processor(
        tokenizer, candidate_resolutions=CANDIDATES, patch_size=7, downsample_ratio=2
    )


@dataclass(frozen=True)
class Model:
    folder: Path
    cases: tuple[Case, ...]


def expected(
    model: Any, processor: Any, text: str, images: tuple[Image.Image, ...]
) -> tuple[int, ...]:
    """What the definition says, the prompt laid out with the rows it gives."""
    rows: list[Tensor] = []
    if images:
        made = processor(images=images, cropping=len(images) <= 2)
        pixels, crops = made["pixel_values"].double(), made["images_spatial_crop"]
        rows = model.get_image_features(pixels, crops)
    ids, left = [], iter(rows)
    for token_id in processor.tokenizer(text)["input_ids"]:
        is_image = token_id == processor.image_token_id
        ids += [token_id] * (len(next(left)) if is_image else 1)
    return greedy(model, ids, rows, processor.image_token_id)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, settings = tmp_path_factory.mktemp(request.param), settings_of(request.param)
    definition = build(settings)
    save(definition, settings, folder)
    processor = processor_of(folder)
    unpaged(definition)
    a, b, c, d = (tiny_image(i).resize(size) for i, size in enumerate(SIZES))
    pil_images = iter([(a,), (b,), (c,), (a, b), (c, c), (a, d, b), ()])
    cases = []
    for text in TEXTS:
        images = next(pil_images)
        text = text.replace("*", "<image>")
        cases.append(Case(text, images, expected(definition, processor, text, images)))
    return Model(folder, tuple(cases))


def only(name: str) -> Any:
    """For what does not depend on the decoder."""
    return pytest.mark.parametrize("model", [name], indirect=True)


# ---- parts


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
@torch.inference_mode()
def test_latent_attention_and_experts_are_deepseek_v2s(
    q_lora_rank: int | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"q_lora_rank": q_lora_rank, "topk_method": method, "routed_scaling_factor": 1.7}
    settings = {**MODELS["small"], **changes, "n_group": 4, "topk_group": 2}
    ours = draw(DeepseekLanguageModel(DeepseekLanguageConfig.from_dict(settings)))
    rope = {**YARN, "rope_type": "yarn", "rope_theta": 10000.0}
    rope.pop("type")
    taken = {name: value for name, value in settings.items() if name != "rope_scaling"}
    theirs = hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**taken, rope_parameters=rope, experts_implementation="eager")
    )
    theirs = theirs.eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.double()
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys
    exact_norms(theirs).set_attn_implementation("sdpa")
    make_exact(monkeypatch)
    # The same angles, up to the rounding of float32, are given to both.
    cosines, sines = (each[:, 0] for each in ours.rotary(torch.arange(23)))
    table = torch.complex(cosines, sines)[None]
    rotary = theirs.model.rotary_emb
    assert (rotary(cosines, torch.arange(23)[None]) - table).abs().max() < 1e-5
    rotary.forward = lambda hidden, position_ids: table
    ids = torch.randint(3, 400, (23,), generator=torch.Generator().manual_seed(0))
    hidden = unpaged(ours)(ours.model.embed_tokens(ids), torch.arange(23))
    wanted = theirs(ids[None], use_cache=False).logits[0]
    assert (ours.lm_head(hidden) - wanted).abs().max() < 1e-10


def make_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' rotation and routing in float64, where they would turn to float32."""

    def rotate(query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        turn = table.to(torch.complex128)[:, None]
        both = []
        for each in (query, key):
            pairs = torch.view_as_complex(each.reshape(*each.shape[:-1], -1, 2).contiguous())
            both.append(torch.view_as_real(pairs * turn).flatten(3))
        return both[0], both[1]

    monkeypatch.setattr(v2, "apply_rotary_emb", rotate)

    def route(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.view(-1, self.hidden_dim)
        logits = hidden @ self.weight.T
        scores = logits.softmax(-1)
        if self.topk_method == "group_limited_greedy":
            for row in scores:
                groups = row.view(self.num_group, -1)
                best = groups.max(-1).values.topk(self.topk_group).indices.tolist()
                for group in set(range(self.num_group)) - set(best):
                    groups[group] = 0
        shares, experts = scores.topk(self.top_k, dim=-1)
        return logits, shares * self.routed_scaling_factor, experts

    monkeypatch.setattr(v2.DeepseekV2TopkRouter, "forward", route)


@torch.inference_mode()
def test_sigmoid_routing_is_deepseek_v3s() -> None:
    config = DeepseekLanguageConfig.from_dict(MODELS["base"])
    ours = draw(DeepseekLanguageModel(config)).model.layers[1].mlp
    taken = {n: v for n, v in MODELS["base"].items() if n not in ("scoring_func", "topk_method")}
    theirs = hf.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(
        hf.DeepseekV3Config(**taken, experts_implementation="eager")
    )
    theirs = theirs.eval()
    weights = ours.state_dict()
    weights["gate.e_score_correction_bias"] = weights["gate.e_score_correction_bias"].clone()
    theirs.load_state_dict(weights)
    hidden = torch.randn(17, 48, generator=torch.Generator().manual_seed(3))
    ours.float()
    wanted = theirs(hidden[None])[0]
    assert (ours(hidden) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@torch.inference_mode()
def test_plain_attention_is_llamas() -> None:
    settings = {**MODELS["tiny"], "n_routed_experts": None, "num_key_value_heads": 2}
    ours = draw(DeepseekLanguageModel(DeepseekLanguageConfig.from_dict(settings)))
    config = hf.LlamaConfig(
        vocab_size=420, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    theirs = hf.LlamaForCausalLM(config).double().eval()
    theirs.load_state_dict(ours.state_dict())
    exact_norms(theirs)
    ids = torch.randint(3, 400, (23,), generator=torch.Generator().manual_seed(0))
    hidden = unpaged(ours)(ours.model.embed_tokens(ids), torch.arange(23))
    assert (ours.lm_head(hidden) - theirs(ids[None]).logits[0]).abs().max() < 1e-10


@torch.inference_mode()
def test_the_tower_is_siglips() -> None:
    ours = build(settings_of("tiny")).vision
    config = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2,
        image_size=SIDE, patch_size=7, vision_use_head=False,
    )  # fmt: skip
    theirs = hf.SiglipVisionModel(config).double().eval()
    weights = {
        "embeddings.patch_embedding.weight": ours.patch_embed.proj.weight,
        "embeddings.patch_embedding.bias": ours.patch_embed.proj.bias,
        "embeddings.position_embedding.weight": ours.pos_embed[0],
    }
    for kind in ("weight", "bias"):
        weights[f"post_layernorm.{kind}"] = getattr(ours.norm, kind)
        for i, block in enumerate(ours.blocks):
            layer = f"encoder.layers.{i}"
            parts = getattr(block.attn.qkv, kind).chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                weights[f"{layer}.self_attn.{name}_proj.{kind}"] = part
            pairs = (
                ("self_attn.out_proj", block.attn.proj), ("layer_norm1", block.norm1),
                ("layer_norm2", block.norm2), ("mlp.fc1", block.mlp.fc1),
                ("mlp.fc2", block.mlp.fc2),
            )  # fmt: skip
            for name, module in pairs:
                weights[f"{layer}.{name}.{kind}"] = getattr(module, kind)
    theirs.load_state_dict(weights)
    pixels = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)).double()
    wanted = theirs(pixels).last_hidden_state
    assert (ours(pixels) - wanted).abs().max() < 1e-10


@torch.inference_mode()
def test_rows_lie_as_the_tiles_do() -> None:
    """The published rule, place by place, for an image of 3 columns and 2 rows of tiles."""
    definition = build(settings_of("tiny"))
    pixels = torch.randn(7, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2)).double()
    (rows,) = definition.get_image_features(pixels, torch.tensor([[3, 2]]))
    patches = definition.vision(pixels)
    grid = torch.nn.functional.pad(patches.view(7, 3, 3, 32), (0, 0, 0, 1, 0, 1))
    # Two by two patches to a vector: each channel's four values in a row.
    folded = torch.nn.functional.unfold(grid.permute(0, 3, 1, 2), kernel_size=2, stride=2)
    tiles = definition.projector.layers(folded.mT).view(7, 2, 2, 48)
    wanted = []
    for y in range(2):
        wanted += [tiles[0, y, 0], tiles[0, y, 1], definition.image_newline]
    wanted.append(definition.view_seperator)
    for tile_row, y in itertools.product(range(2), range(2)):
        for tile_column in range(3):
            wanted += list(tiles[1 + 3 * tile_row + tile_column, y])
        wanted.append(definition.image_newline)
    assert len(wanted) == 2 * 3 + 1 + 4 * 7
    assert (rows - torch.stack(wanted)).abs().max() < 1e-12


def test_images_of_as_many_tiles_share_an_encoder_run(tmp_path: Path) -> None:
    """Four tiles beside each other, and two above two."""
    save(build(settings_of("tiny")), settings_of("tiny"), tmp_path)
    config = DeepseekVL2Config.from_pretrained(tmp_path)
    model = DeepseekVL2.load(tmp_path, hf_config=config, dtype=torch.float64, device="cpu")
    context = load_context(tmp_path, hf_config=config, info=DeepseekVL2ProcessingInfo)
    front = MULTIMODAL_REGISTRY.create_processor(DeepseekVL2, context)
    images = [tiny_image(i).resize(size) for i, size in enumerate([(90, 20), (40, 40)])]
    items = front.process(MultiModalDataItems({"image": ImageProcessorItems(images)}), {})["image"]
    assert [item["pixel_values"].shape[0] for item in items] == [5, 5]
    assert [item["images_spatial_crop"].tolist() for item in items] == [[4, 1], [2, 2]]
    with torch.inference_mode():
        together = model.encode("image", items)
        alone = [model.encode("image", [item])[0] for item in items]
    assert [len(rows) for rows in together] == [7 + 2 * 9, 7 + 4 * 5]
    for one, other in zip(together, alone, strict=True):
        assert (one - other).abs().max() < 1e-10


@torch.inference_mode()
def test_experts_in_blocks_are_the_experts_one_by_one() -> None:
    """What an accelerator runs, and what a CPU does."""
    ours = draw(DeepseekLanguageModel(DeepseekLanguageConfig.from_dict(MODELS["small"])))
    layer = ours.model.layers[1].mlp
    hidden = torch.randn(17, 48, generator=torch.Generator().manual_seed(0)).double()
    given = hidden, *layer.gate(hidden)
    wanted = layer.experts(*given)
    torch.testing.assert_close(layer.experts._on_device(*given), wanted, rtol=1e-9, atol=1e-9)


# The published configs' settings, as far as they say how large something is.
PUBLISHED_VISION = {
    "layers": 27, "mlp_ratio": 3.7362, "model_name": "siglip_so400m_patch14_384",
    "model_type": "vision", "patch_size": 14, "width": 1152,
}  # fmt: skip
EXPERTS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "num_experts_per_tok": 6}
PUBLISHED: dict[str, dict[str, Any]] = {
    "tiny": {
        **EXPERTS, **PLAIN, "first_k_dense_replace": 1, "hidden_size": 1280,
        "intermediate_size": 6848, "moe_intermediate_size": 896, "n_routed_experts": 64,
        "num_attention_heads": 10, "num_hidden_layers": 12, "num_key_value_heads": 10,
        "q_lora_rank": None, "use_mla": False, "vocab_size": 129280,
    },
    "small": {
        **EXPERTS, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "vocab_size": 102400,
    },
    "base": {
        **EXPERTS, "first_k_dense_replace": 1, "hidden_size": 2560, "intermediate_size": 12288,
        "kv_lora_rank": 512, "moe_intermediate_size": 1536, "n_routed_experts": 72,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_hidden_layers": 30,
        "num_key_value_heads": 32, "q_lora_rank": None, "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 129280,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), [("tiny", 3.4), ("small", 16.1), ("base", 27.5)])
def test_names_and_sizes_are_the_published_ones(name: str, billions: float) -> None:
    """The names of the published modules, and the sizes on the models' pages."""
    language = PUBLISHED[name]
    settings = {
        **settings_of("tiny"),
        "vision_config": PUBLISHED_VISION,
        "projector_config": {"n_embed": language["hidden_size"]},
        "language_config": language,
    }
    with torch.device("meta"):
        model = DeepseekVLV2ForCausalLM(DeepseekVL2Config.from_dict(settings))
    both = ("weight", "bias")
    names = {"image_newline", "view_seperator", "vision.pos_embed", "language.lm_head.weight"}
    names |= {"language.model.embed_tokens.weight", "language.model.norm.weight"}
    for part in ("vision.patch_embed.proj", "vision.norm", "projector.layers.0"):
        names |= {f"{part}.{kind}" for kind in both}
    names |= {f"projector.layers.2.{kind}" for kind in both}
    for i in range(27):
        for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
            names |= {f"vision.blocks.{i}.{part}.{kind}" for kind in both}
    latent = ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    attention = latent if name != "tiny" else ("q_proj", "k_proj", "v_proj", "o_proj")
    for i in range(language["num_hidden_layers"]):
        layer = f"language.model.layers.{i}"
        names |= {f"{layer}.self_attn.{part}.weight" for part in attention}
        names |= {f"{layer}.{part}_layernorm.weight" for part in ("input", "post_attention")}
        mlps = [f"{layer}.mlp"]
        if i:
            mlps = [f"{layer}.mlp.experts.{e}" for e in range(language["n_routed_experts"])]
            mlps.append(f"{layer}.mlp.shared_experts")
            names.add(f"{layer}.mlp.gate.weight")
            if name == "base":
                names.add(f"{layer}.mlp.gate.e_score_correction_bias")
        names |= {f"{mlp}.{kind}_proj.weight" for mlp in mlps for kind in ("gate", "up", "down")}
    found = set(model.state_dict()) | {f"language.{n}" for n in model.language.expert_weights()}
    assert {n for n in found if not n.endswith((".gate_up_proj", "experts.down_proj"))} == names
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.1)
    assert model.vision.pos_embed.shape == (1, 729, 1152)
    assert model.vision.blocks[0].mlp.fc1.weight.shape == (4304, 1152)
    specs = DeepseekVL2.probe(DeepseekVL2Config.from_dict(settings))
    sizes = {(s.num_heads, s.num_kv_heads, s.key_dim) for s in specs}
    heads = language["num_attention_heads"]
    assert sizes == {(heads, heads, 128) if name == "tiny" else (heads, 1, 576)}


def test_weights_that_are_missing_or_strange_are_told_of() -> None:
    definition = build(settings_of("base"))
    weights = published(definition)
    with torch.no_grad():
        loaded = definition.load_weights(iter(weights.items()))
        assert loaded == set(definition.state_dict())
        lost = "language.model.layers.2.mlp.experts.5.up_proj.weight"
        rest = {name: tensor for name, tensor in weights.items() if name != lost}
        with pytest.raises(ModelLoadError, match=r"experts\.5\.up_proj"):
            definition.load_weights(iter(rest.items()))
        for name in (lost.replace("experts.5", "experts.8"), lost.replace("layers.2", "layers.0")):
            with pytest.raises(ModelLoadError, match="has no place for"):
                definition.load_weights([(name, weights[lost])])


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("", {"tile_tag": "1D"}, "tile_tag"),
        ("projector_config", {"n_embed": 32}, "n_embed"),
        ("projector_config", {"projector_type": "linear"}, "projector"),
        ("language_config", {"topk_method": "other"}, "topk_method"),
        ("language_config", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("language_config", {"use_mla": True}, "kv_lora_rank"),
        ("language_config", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_configs_of_another_kind_are_refused(
    part: str, changes: dict[str, Any], message: str
) -> None:
    settings = settings_of("tiny")
    settings |= {part: {**settings[part], **changes}} if part else changes
    with pytest.raises(ModelLoadError, match=message):
        DeepseekVL2.probe(DeepseekVL2Config.from_dict(settings))


# ---- layouts and images

NINE = sorted(
    ([384 * m, 384 * n] for m in range(1, 10) for n in range(1, 10) if m * n <= 9),
    key=lambda pair: (pair[0] * pair[1], pair[0]),
)


@pytest.mark.parametrize(
    ("size", "tiles", "num_rows"),
    [
        # 210 rows of the whole image, one between, and 14 r (14 c + 1) of the others.
        ((384, 384), (1, 1), 210 + 1 + 14 * 15),
        ((768, 384), (2, 1), 210 + 1 + 14 * 29),
        # Two tiles would make less of it than it has: (768, 384), (384, 768).
        ((800, 400), (3, 2), 210 + 1 + 28 * 43),
        ((400, 800), (2, 3), 210 + 1 + 42 * 29),
        ((1000, 1000), (3, 3), 210 + 1 + 42 * 43),
        ((100, 60), (1, 1), 210 + 1 + 14 * 15),
        ((3000, 300), (8, 1), 210 + 1 + 14 * 113),
        ((1920, 1080), (4, 2), 210 + 1 + 28 * 57),
    ],
)
def test_layouts_of_the_published_resolutions(
    size: tuple[int, int], tiles: tuple[int, int], num_rows: int
) -> None:
    tokenizer = make_tokenizer("bytes")
    processor = DeepseekVL2Processor(
        tokenizer, candidate_resolutions=NINE, patch_size=14, downsample_ratio=2
    )
    assert processor.tile_side == 14
    assert processor.count_tiles(size, cropping=True) == tiles
    assert processor.count_tiles(size, cropping=False) == (1, 1)
    columns, rows = tiles
    assert num_rows == 14 * 15 + 1 + 14 * rows * (14 * columns + 1)


def test_the_best_resolution_keeps_most_and_wastes_least() -> None:
    rng = np.random.default_rng(0)
    for width, height in rng.integers(20, 4000, (300, 2)).tolist():
        best, most, least = None, -1, 0
        for w, h in NINE:
            scale = min(w / width, h / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            if kept > most or (kept == most and w * h - kept < least):
                best, most, least = (w, h), kept, w * h - kept
        assert select_best_resolution((width, height), NINE) == best


def test_tiles_are_cut_from_the_fitted_image(tmp_path: Path) -> None:
    save(build(settings_of("tiny")), settings_of("tiny"), tmp_path)
    processor = processor_of(tmp_path)
    image = tiny_image(3, 60, 18)
    made = processor(images=[image])
    assert made["images_spatial_crop"].tolist() == [[3, 1]]
    assert made["pixel_values"].shape == (4, 3, SIDE, SIDE)
    pixels = ((made["pixel_values"] * 0.5 + 0.5) * 255).permute(0, 2, 3, 1)
    joined = torch.cat(list(pixels[1:]), dim=1)
    # The whole of it is 21 x 6, seen closely it is 63 x 19; around it is the mean colour.
    for view, (width, height), tops in ((pixels[0], (21, 6), (7, 8)), (joined, (63, 19), (1,))):
        fitted = image.resize((width, height), Image.Resampling.BICUBIC)
        found = [
            top
            for top in tops
            if np.allclose(view[top : top + height], np.asarray(fitted), atol=1e-3)
        ]
        assert len(found) == 1
        around = torch.cat([view[: found[0]], view[found[0] + height :]])
        assert np.allclose(around, 127, atol=1e-3)


# ---- the engine


def test_the_cases_differ(model: Model) -> None:
    """Else equal tokens would prove nothing."""
    assert len({case.expected for case in model.cases}) >= 6
    assert len({token for case in model.cases for token in case.expected}) > 6


BUDGETS = {"tiny": (1024, 13, 5), "small": (13,), "base": (1024, 5, 1)}


@pytest.mark.parametrize(
    ("model", "budget"),
    [(name, budget) for name, budgets in BUDGETS.items() for budget in budgets],
    indirect=["model"],
)
async def test_tokens_equal_a_plain_forward(model: Model, budget: int) -> None:
    await check_alone_and_together(model.folder, model.cases, budget)


async def test_tokens_equal_a_plain_forward_without_a_prefix_cache(model: Model) -> None:
    # Three images in company of two at most, and three beside each other.
    await check_without_prefixes(model.folder, model.cases, 6)


@only("tiny")
async def test_a_image_beside_two_others_is_another_one(model: Model) -> None:
    """What was kept of it by itself, or of it beside two others, is not taken for the other."""
    one, three = model.cases[0], model.cases[5]
    assert one.images[0] is three.images[0]
    for first, second in ((one, three), (three, one)):
        async with engine_for(model.folder) as engine:
            await check_all(engine, [first])
            await check_all(engine, [second])
            await check_all(engine, [first])
            assert engine.statistics().encoder_items_run == 4
            assert engine.statistics().processor_cache_entries == 4
    # Nor under a name that the caller gives it.
    async with engine_for(model.folder) as engine:
        for case in (one, three, one):
            uuids = {"image": [f"picture {i}" for i in range(len(case.images))]}
            prompt = Prompt(text=case.text, media={"image": list(case.images)}, uuids=uuids)
            case.check((await engine.generate(prompt, PARAMS)).token_ids)


@only("tiny")
async def test_layouts_in_the_engine(model: Model) -> None:
    async with engine_for(model.folder) as engine:
        counts = []
        for case in model.cases:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            image_id = engine.processor.info.get_hf_processor().image_token_id
            counts.append(output.prompt_token_ids.count(image_id))
            assert output.prompt_token_ids[0] == 1  # <s>
        # 40 x 30 in 2 x 2 tiles, 30 x 75 in 1 x 3, 21 x 21 in one: 6 + 1 + 2 r (2 c + 1).
        a, b, c = 7 + 4 * 5, 7 + 6 * 3, 7 + 2 * 3
        assert counts == [a, b, c, a + b, 2 * c, 3 * c, 0]


@only("tiny")
async def test_options(model: Model) -> None:
    one = model.cases[0]
    async with engine_for(model.folder) as engine:

        async def count(images: int, **options: Any) -> int:
            prompt = Prompt(
                text="<image>" * images,
                media={"image": list(one.images) * images},
                mm_processor_kwargs=options,
            )
            return len((await engine.generate(prompt, PARAMS)).prompt_token_ids) - 1

        assert [await count(n) for n in (1, 2, 3)] == [27, 54, 39]
        assert await count(1, cropping=False) == 13
        assert await count(3, cropping=True) == 81
        for options in ({"cropping": 1}, {"candidate_resolutions": [[21, 21]]}):
            with pytest.raises(InvalidRequestError, match="cropping"):
                await count(1, **options)
        with pytest.raises(PlaceholderMismatchError):
            await engine.generate("none", PARAMS, images=one.images)
    with pytest.raises(ModelLoadError, match="cropping"):
        await engine_for(model.folder, mm_processor_kwargs={"size": 3}).start()
    async with engine_for(model.folder, mm_processor_kwargs={"cropping": False}) as engine:
        output = await engine.generate("<image>", PARAMS, images=one.images)
        assert len(output.prompt_token_ids) == 1 + 13


@only("tiny")
async def test_rows_that_were_computed_elsewhere(model: Model) -> None:
    case, definition = model.cases[0], build(settings_of("tiny"))
    made = processor_of(model.folder)(images=case.images)
    pixels, crops = made["pixel_values"].double(), made["images_spatial_crop"]
    (rows,) = definition.get_image_features(pixels, crops)
    async with engine_for(model.folder) as engine:
        output = await engine.generate(case.text, PARAMS, images=[Embeddings(rows)])
        case.check(output.token_ids)


@only("tiny")
async def test_chat_messages_are_written_as_the_published_processor_does(model: Model) -> None:
    content = [
        {"type": "image", "image": model.cases[0].images[0]},
        {"type": "text", "text": "What is <image> ? "},
    ]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": "Sure?"},
    ]
    async with engine_for(model.folder) as engine:
        output = await engine.generate(messages, PARAMS)
        rows = "<image>" * 27
        assert engine.tokenizer.decode(output.prompt_token_ids) == (
            f"<s><|User|>: {rows}\nWhat is <image> ?\n\n<|Assistant|>:A dog.</s>"
            "<|User|>: Sure?\n\n<|Assistant|>:"
        )
        image_id = engine.processor.info.get_hf_processor().image_token_id
        assert output.prompt_token_ids.count(image_id) == 27
        assert engine._core.loaded.eos_token_ids == {2}


@only("small")
async def test_in_a_worker_process(model: Model) -> None:
    async with engine_for(model.folder, processor_workers="process:1") as engine:
        await asyncio.gather(*(check_all(engine, [case]) for case in model.cases[3:6]))
