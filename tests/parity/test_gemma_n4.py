"""GPT-OSS, Gemma 3n and Gemma 4: the tokens of transformers' `generate`.

Sinks, inputs for every layer, layers that read another's keys and values, head sizes and windows
that differ by layer, blocks in some layers only. In float64, but for models with experts, which
run in nothing wider than float32: their tokens are compared up to the first close call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.utils import is_torchvision_available

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import EngineError, ModelLoadError, UnsupportedModalityError
from aioengine.types import KVGroup
from tests.parity.audio_families import RATE, sound
from tests.parity.families import (
    MAX_TOKENS,
    TEXT,
    Case,
    Family,
    cases,
    greedy,
    id_of,
    save,
    vocabulary,
)
from tests.processors import hf_processors
from tests.processors.conftest import make_tokenizer
from tests.support.tiny import draw_weights, tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
WINDOW = 6
# The last two layers read the keys of the second and the third, where layers share.
LAYERS = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]
PROMPTS = ("tell a story", "What is in the picture? There is", "a", "tell a story about colours")

Settings = dict[str, Any]


def gpt_oss(settings: Settings) -> Any:
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": False,
    }  # fmt: skip
    more = {"head_dim": 12, "sliding_window": WINDOW, "rope_parameters": yarn}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.GptOssForCausalLM(hf.GptOssConfig(**settings, **more, **experts))


def gemma4_text(settings: Settings, **changes: Any) -> Settings:
    """As in the small sizes: inputs for every layer, and two layers without keys of their own."""
    own = {
        "num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "sliding_window": WINDOW,
        "head_dim": 12, "global_head_dim": 16,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": settings["vocab_size"], "final_logit_softcapping": 30.0,
    }  # fmt: skip
    return {**settings, **own, **changes}


LARGE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
"""As in the large sizes: neither, and fewer key heads in layers without a window."""
KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def gemma4(**changes: Any) -> Callable[[Settings], Any]:
    def make(settings: Settings) -> Any:
        return hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**gemma4_text(settings, **changes)))

    return make


def gemma3n(settings: Settings) -> Any:
    own = {
        "num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "sliding_window": WINDOW,
        "num_kv_shared_layers": 2, "head_dim": 12,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": settings["vocab_size"] - 9,
        "laurel_rank": 8, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.5] * 5,
    }  # fmt: skip
    return hf.Gemma3nForCausalLM(hf.Gemma3nTextConfig(**{**settings, **own}))


MODELS: Mapping[str, tuple[Callable[[Settings], Any], torch.dtype]] = {
    "gpt-oss": (gpt_oss, torch.float32),
    "gemma3n": (gemma3n, torch.float64),
    "gemma4": (gemma4(), torch.float64),
    "gemma4-dense": (gemma4(**LARGE, **KEYS), torch.float64),
    "gemma4-experts": (gemma4(**LARGE, **KEYS, **EXPERTS), torch.float32),
}


@dataclass(frozen=True)
class Saved:
    name: str
    folder: Path
    cases: tuple[Case, ...]


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    """Small blocks, so that few tokens make many."""
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 1024}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **options})


def save_text(name: str, folder: Path, **changes: int) -> Any:
    """A drawn model and its tokenizer, on disk; returns the HF model."""
    make, dtype = MODELS[name]
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):
        model = make({**TEXT, "vocab_size": vocabulary(tokenizer), **changes})
    draw_weights(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model = model.to(dtype).eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def expect(model: Any, tokenizer: Any, text: str) -> Case:
    inputs = tokenizer(text, return_tensors="pt")
    return Case(text, (), greedy(model, {n: inputs[n] for n in ("input_ids", "attention_mask")}))


@pytest.fixture(scope="module", params=MODELS)
def text_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    model, tokenizer = save_text(request.param, folder), make_tokenizer("bytes")
    return Saved(request.param, folder, tuple(expect(model, tokenizer, t) for t in PROMPTS))


async def check(engine: AsyncEngine, cases: Sequence[Case]) -> None:
    """All at once."""
    jobs = (engine.generate(case.text, PARAMS, images=case.images) for case in cases)
    for case, output in zip(cases, await asyncio.gather(*jobs), strict=True):
        case.check(output.token_ids)


async def check_all(engine: AsyncEngine, cases: Sequence[Case]) -> None:
    """One alone, then all together with a cold and with a warm prefix cache."""
    await check(engine, cases[1:2])
    await engine.reset_caches()
    await check(engine, cases)
    await check(engine, cases)
    now = engine.statistics()
    assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


def test_the_cases_differ(text_model: Saved) -> None:
    """Else equal tokens would prove nothing; and some are far longer than a window."""
    assert len({case.expected for case in text_model.cases}) == len(PROMPTS)
    assert sum(len(case.expected) for case in text_model.cases) > 20
    assert len(make_tokenizer("bytes")(PROMPTS[-1])["input_ids"]) > 2 * WINDOW


BUDGETS = {
    "gpt-oss": (512, 13, 5, 1), "gemma3n": (512, 13, 5, 1), "gemma4": (512, 13, 5, 1),
    "gemma4-dense": (5,), "gemma4-experts": (13,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text_model", "budget"),
    [(name, budget) for name, budgets in BUDGETS.items() for budget in budgets],
    indirect=["text_model"],
)
async def test_text(text_model: Saved, budget: int) -> None:
    async with engine_for(text_model.folder, max_num_batched_tokens=budget) as engine:
        await check_all(engine, text_model.cases)


async def test_text_without_a_prefix_cache(text_model: Saved) -> None:
    options = {"max_num_batched_tokens": 7, "enable_prefix_caching": False}
    async with engine_for(text_model.folder, **options) as engine:
        await check(engine, text_model.cases)


@pytest.mark.parametrize("text_model", ["gemma4", "gemma3n"], indirect=True)
async def test_only_layers_with_keys_of_their_own_have_pages(text_model: Saved) -> None:
    async with engine_for(text_model.folder) as engine:
        groups = engine._core.loaded.runner.model.kv_groups
    wide = 16 if text_model.name == "gemma4" else 12
    assert groups == (
        KVGroup("self", 2, 12, 12, WINDOW, num_layers=2),
        KVGroup("self", 2, wide, wide, None, num_layers=1),
    )


def pack_experts(folder: Path) -> None:
    """In place of the folder's experts some in MXFP4, drawn at random, as they are published."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, width, size = weights.pop(name).shape
        scales = (num_experts, size, width // 32)
        blocks = torch.randint(0, 256, (*scales, 16), generator=generator, dtype=torch.uint8)
        weights[f"{name}_blocks"] = blocks
        weights[f"{name}_scales"] = torch.full(scales, 127 - 4, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    others = ["self_attn", "mlp.router"]
    packing = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *(f"model.layers.*.{name}" for name in others), "model.embed_tokens", "lm_head",
        ],
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": packing}))


async def test_experts_as_they_are_published(tmp_path: Path) -> None:
    save_text("gpt-oss", tmp_path, hidden_size=64, intermediate_size=64)
    pack_experts(tmp_path)
    unpacked = hf.GptOssForCausalLM.from_pretrained(
        tmp_path, quantization_config=hf.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    expected = [expect(unpacked, make_tokenizer("bytes"), text) for text in PROMPTS]
    assert len({case.expected for case in expected}) > 1
    options = {"dtype": "float32", "quantize_activations": False}
    async with engine_for(tmp_path, **options) as engine:
        await check(engine, expected)


async def test_the_text_model_of_a_gemma_3n_with_towers(tmp_path: Path) -> None:
    """A published folder: the whole model's names, and a config of three parts."""
    model = save_text("gemma3n", tmp_path)
    expected = [expect(model, make_tokenizer("bytes"), text) for text in PROMPTS[:2]]
    weights = load_file(tmp_path / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    whole["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(4, 3, 3, 3)
    whole["model.audio_tower.conformer.0.norm.weight"] = torch.zeros(8)
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    del text["architectures"]
    parts = {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {}}
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
        "text_config": text, **parts,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with engine_for(tmp_path) as engine:
        await check(engine, expected)
        with pytest.raises(UnsupportedModalityError, match="timm"):
            await engine.generate("what is it?", PARAMS, images=[tiny_image()])


# With images.


NO_PROCESSOR = "its processor cannot be imported without torchvision"


def processor() -> Any:
    tokenizer = hf_processors.tokenizer_with(
        image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>",
        audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>",
    )  # fmt: skip
    name = "Gemma4ImageProcessor" + ("" if is_torchvision_available() else "Pil")
    image_processor = getattr(hf, name)(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    feature_extractor = hf.Gemma4AudioFeatureExtractor(feature_size=16)
    made = hf_processors.without_video(hf.Gemma4Processor)
    return made(feature_extractor, image_processor, tokenizer, None)


def gemma4_whole(has_audio: bool, **changes: Any) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        text = gemma4_text({**TEXT, "vocab_size": vocabulary(tokenizer)}, **changes)
        ids = {
            name: id_of(tokenizer, token)
            for name, token in {
                "image_token_id": "<|image|>", "boi_token_id": "<|image>",
                "eoi_token_id": "<image|>", "video_token_id": "<|video|>",
                "audio_token_id": "<|audio|>",
            }.items()
        }  # fmt: skip
        config = hf.Gemma4Config(
            text_config=text,
            vision_config={
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64,
            },
            audio_config={
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "subsampling_conv_channels": [16, 4], "output_proj_dims": 24,
            } if has_audio else None,
            tie_word_embeddings=False,
            **ids,
        )  # fmt: skip
        model = hf.Gemma4ForConditionalGeneration(config)
        # transformers reads padding where a placeholder was generated; nobody generates one.
        model.generation_config.suppress_tokens = sorted(ids.values())
        return model

    return make


BIDIRECTIONAL = {"use_bidirectional_attention": "vision"}
IMAGES = {
    "small": Family(
        processor=processor, model=gemma4_whole(True), place="<|image|>", lacking=NO_PROCESSOR
    ),
    "large": Family(
        processor=processor, model=gemma4_whole(False, **LARGE, **KEYS, **BIDIRECTIONAL),
        place="<|image|>", least_budget=70, lacking=NO_PROCESSOR,
    ),
}  # fmt: skip


def save_whole(family: Family, folder: Path) -> tuple[Any, Any]:
    """A folder with all settings; returns the HF model and the HF processor."""
    reference, made = save(family, folder), processor()
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["feature_extractor"] = json.loads(made.feature_extractor.to_json_string())
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return reference, made


@pytest.fixture(scope="module", params=IMAGES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    family, folder = IMAGES[request.param], tmp_path_factory.mktemp(request.param)
    return Saved(request.param, folder, cases(family, *save_whole(family, folder)))


@pytest.mark.parametrize(
    ("whole", "budget"),
    [("small", 512), ("small", 13), ("small", 5), ("large", 512), ("large", 70)],
    indirect=["whole"],
)
async def test_images(whole: Saved, budget: int) -> None:
    """An image that its tokens see both ways is computed in one step; others are cut up."""
    assert len({case.expected for case in whole.cases}) >= 5
    async with engine_for(whole.folder, max_num_batched_tokens=budget) as engine:
        await check_all(engine, whole.cases)


async def test_images_without_a_prefix_cache(whole: Saved) -> None:
    options = {"max_num_batched_tokens": 71, "enable_prefix_caching": False}
    async with engine_for(whole.folder, **options) as engine:
        await check(engine, whole.cases)
        assert engine.statistics().encoder_items_run == 3


async def test_clips(tmp_path: Path) -> None:
    """Also beside an image. In float32: transformers' tower computes in nothing wider."""
    reference, made = save_whole(replace(IMAGES["small"], dtype=torch.float32), tmp_path)
    image, tones = tiny_image(3), [sound(0, 0.9), sound(1, 1.3)]
    prompts = [
        ("say what <|audio|> is", [], tones[:1]),
        ("say what <|audio|> is", [], tones[1:]),
        ("<|image|> and <|audio|> ?", [image], tones[1:]),
    ]
    expected = []
    for text, images, audios in prompts:
        given: dict[str, Any] = {"images": images} if images else {}
        inputs = made(text=text, audio=audios, **given, return_tensors="pt")
        expected.append(greedy(reference, inputs))
    assert len(set(expected)) == 3
    assert sum(map(len, expected)) > 2 * MAX_TOKENS
    async with engine_for(tmp_path, max_num_batched_tokens=13) as engine:
        outputs = await asyncio.gather(
            *(
                engine.generate(t, PARAMS, images=images, audios=[(a, RATE) for a in audios])
                for t, images, audios in prompts
            )
        )
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.token_ids[: len(tokens)] == tokens


@pytest.mark.parametrize("whole", ["large"], indirect=True)
async def test_what_a_checkpoint_does_not_take(whole: Saved) -> None:
    async with engine_for(whole.folder) as engine:
        with pytest.raises(UnsupportedModalityError, match="audio"):
            await engine.generate("<|audio|>", PARAMS, audios=[(sound(0, 0.5), RATE)])


async def test_a_model_that_sees_all_ways_is_refused(tmp_path: Path) -> None:
    family = Family(
        processor=processor, place="<|image|>", lacking=NO_PROCESSOR,
        model=gemma4_whole(False, use_bidirectional_attention="all"),
    )  # fmt: skip
    save(family, tmp_path)
    with pytest.raises(ModelLoadError, match="bidirectional"):
        async with engine_for(tmp_path):
            pass
    assert issubclass(ModelLoadError, EngineError)
