"""The original InternVL checkpoints: tokens equal those of transformers' own InternVL.

A tiny HF model is saved as OpenGVLab publishes its models: config.json with `llm_config`, weights
under their own names, with fused queries, keys and values. The names are those of the published
model.safetensors.index.json of InternVL2.5-8B (InternLM2) and of the modules that InternVL3-1B
(Qwen2) prints; the layout of `wqkv` is that of transformers' convert_internvl_weights_to_hf.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from aioengine import Prompt
from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.internvl_chat import InternVLChat, InternVLChatConfig
from aioengine.processors.hf.internvl_chat import InternVLChatImageProcessor, InternVLChatProcessor
from aioengine.processors.info import load_context
from aioengine.processors.items import (
    ImageHeader,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from tests.parity.families import TEXT, Family, cases, id_of, vocabulary
from tests.parity.test_families import PARAMS, Model, check_all, engine_for
from tests.processors.test_sentencepiece import write_folder
from tests.support.engines import settled
from tests.support.tiny import draw_weights, tiny_image

SIDE, PATCH, MOST = 56, 14, 6
TEXT_CLASSES = {
    "InternLM2ForCausalLM": hf.LlamaConfig,
    "LlamaForCausalLM": hf.LlamaConfig,
    "Qwen2ForCausalLM": hf.Qwen2Config,
    "Qwen3ForCausalLM": hf.Qwen3Config,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An original checkpoint: its language model, and its vision model's settings."""

    text: str
    vision: Mapping[str, Any]
    settings: Mapping[str, Any]
    is_tied: bool = False


LARGE = {"norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False}
SMALL = {"norm_type": "layer_norm", "qk_normalization": False, "qkv_bias": True}
KINDS = {
    "internlm2": Kind(
        text="InternLM2ForCausalLM", vision=SMALL,
        settings={"template": "internlm2-chat", "use_thumbnail": True},
    ),
    "qwen2-6b": Kind(
        text="Qwen2ForCausalLM", vision={**LARGE, "layer_norm_eps": 1e-5},
        settings={"template": "internvl2_5", "use_thumbnail": True}, is_tied=True,
    ),
    "qwen3": Kind(
        text="Qwen3ForCausalLM", vision=SMALL,
        settings={"template": "internvl2_5", "use_thumbnail": False, "select_layer": -2},
    ),
    "llama": Kind(
        text="LlamaForCausalLM", vision=SMALL,
        settings={"template": "Hermes-2", "dynamic_image_size": False},
    ),
}  # fmt: skip


def internvl_tokenizer() -> Any:
    """Byte-level, as Qwen2's: `<image>` is ordinary text in it, and merges with what is beside."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ("USER: <image>\nWhat is it?\n\nASSISTANT: story.>\n", "First <image> then.> same?")
    tokenizer.train_from_iterator(corpus * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokens = ["<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens(tokens)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def processor_of(kind: Kind) -> Any:
    settings = {"dynamic_image_size": True, **kind.settings}
    image_processor = InternVLChatImageProcessor(
        size={"height": SIDE, "width": SIDE},
        dynamic_image_size=settings["dynamic_image_size"],
        use_thumbnail=settings.get("use_thumbnail", False),
        max_dynamic_patch=MOST,
    )
    return InternVLChatProcessor(image_processor, internvl_tokenizer(), num_image_token=4)


def vision_of(kind: Kind) -> dict[str, Any]:
    """An original vision_config."""
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": SIDE, "patch_size": PATCH, "hidden_act": "gelu",
        "layer_norm_eps": 1e-6, "model_type": "intern_vit_6b", "drop_path_rate": 0.1,
        "use_flash_attn": True, "num_channels": 3, **kind.vision,
    }  # fmt: skip


def llm_of(kind: Kind, tokenizer: Any) -> dict[str, Any]:
    """An original llm_config, with some of what stands in published ones."""
    rope = {"type": "dynamic", "factor": 2.0}
    extra = {"head_dim": 12} if kind.text == "Qwen3ForCausalLM" else {}
    return {
        **TEXT, **extra, "vocab_size": vocabulary(tokenizer), "architectures": [kind.text],
        "rope_theta": 1000000.0, "rope_scaling": rope, "tie_word_embeddings": kind.is_tied,
        "auto_map": {"AutoModel": "modeling_internlm2.InternLM2ForCausalLM"}, "bias": False,
        "max_length": 20, "torch_dtype": "bfloat16", "use_cache": False, "rms_norm_eps": 1e-5,
        "num_key_value_heads": 2, "hidden_act": "silu",
    }  # fmt: skip


def model_of(kind: Kind, tokenizer: Any) -> Any:
    """transformers' own, whose config is written by hand."""
    known = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": kind.is_tied}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000000.0}
    if kind.text == "Qwen3ForCausalLM":
        known["head_dim"] = 12
    text = TEXT_CLASSES[kind.text](
        **{**TEXT, **known, "vocab_size": vocabulary(tokenizer), "rope_parameters": rope}
    )
    vision = vision_of(kind)
    config = hf.InternVLConfig(
        text_config=text,
        vision_config={
            **{name: vision[name] for name in vision if name not in LARGE},
            "norm_type": vision["norm_type"],
            "use_qk_norm": vision["qk_normalization"],
            "attention_bias": vision["qkv_bias"],
            "image_size": [SIDE, SIDE],
            "patch_size": [PATCH, PATCH],
        },
        image_token_id=id_of(tokenizer, "<IMG_CONTEXT>"),
        downsample_ratio=0.5,
        image_seq_length=4,
        vision_feature_layer=kind.settings.get("select_layer", -1),
        tie_word_embeddings=kind.is_tied,
    )
    model = hf.InternVLForConditionalGeneration(config)
    for layer in model.model.vision_tower.encoder.layer:
        if vision["qk_normalization"]:
            layer.attention.q_norm.variance_epsilon = vision["layer_norm_eps"]
            layer.attention.k_norm.variance_epsilon = vision["layer_norm_eps"]
    return model


VISION_NAMES = {
    r"model\.vision_tower\.": "vision_model.",
    r"encoder\.layer\.": "encoder.layers.",
    r"cls_token": "class_embedding",
    r"position_embeddings": "position_embedding",
    r"patch_embeddings\.projection": "patch_embedding",
    r"lambda_": "ls",
    r"attention\.projection_layer": "attn.proj",
    r"attention\.": "attn.",
    r"layernorm_before": "norm1",
    r"layernorm_after": "norm2",
    r"model\.multi_modal_projector\.layer_norm": "mlp1.0",
    r"model\.multi_modal_projector\.linear_1": "mlp1.1",
    r"model\.multi_modal_projector\.linear_2": "mlp1.3",
}
TEXT_NAMES = {
    r"^lm_head": "language_model.lm_head",
    r"^model\.language_model": "language_model.model",
}
INTERNLM2_NAMES = {
    r"^lm_head": "language_model.output",
    r"^model\.language_model": "language_model.model",
    r"embed_tokens": "tok_embeddings",
    r"self_attn\.o_proj": "attention.wo",
    r"mlp\.gate_proj": "feed_forward.w1",
    r"mlp\.down_proj": "feed_forward.w2",
    r"mlp\.up_proj": "feed_forward.w3",
    r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "ffn_norm",
}


def original_weights(kind: Kind, model: Any) -> dict[str, torch.Tensor]:
    """The model's weights as they are published."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    is_internlm2 = kind.text == "InternLM2ForCausalLM"
    for name, tensor in state.items():
        in_text = name.startswith(("lm_head", "model.language_model"))
        if kind.is_tied and name.startswith("lm_head"):
            continue
        parts = (
            [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            if (".q_proj." in name)
            else []
        )
        if in_text and is_internlm2 and parts:
            # Each key head's two query heads, itself, and its value head.
            q, k, v = (part.view(-1, 12, part.shape[-1]) for part in parts)
            heads = [each for i in range(2) for each in (q[2 * i], q[2 * i + 1], k[i], v[i])]
            name, tensor = name.replace("self_attn.q_proj", "attention.wqkv"), torch.cat(heads)
        elif not in_text and parts:
            name, tensor = name.replace("q_proj", "qkv"), torch.cat(parts)
        elif re.search(r"\.[kv]_proj\.", name) and (is_internlm2 or not in_text):
            continue
        names = INTERNLM2_NAMES if is_internlm2 else TEXT_NAMES
        for pattern, new in (names if in_text else VISION_NAMES).items():
            name = re.sub(pattern, new, name)
        found[name] = tensor.contiguous()
    return found


def settings_of(kind: Kind, tokenizer: Any) -> dict[str, Any]:
    """An original config.json."""
    return {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": SIDE,
        "llm_config": llm_of(kind, tokenizer), "max_dynamic_patch": MOST, "min_dynamic_patch": 1,
        "ps_version": "v2", "select_layer": -1, "torch_dtype": "float64",
        "vision_config": vision_of(kind), **kind.settings,
    }  # fmt: skip


def save_original(kind: Kind, folder: Path) -> Any:
    tokenizer = internvl_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = model_of(kind, tokenizer)
    draw_weights(model)
    model.tie_weights()
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model = model.double().eval().requires_grad_(False)
    save_file(original_weights(kind, model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings_of(kind, tokenizer)))
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference, processor = save_original(kind, folder), processor_of(kind)
    family = Family(
        processor=lambda: processor, model=lambda _: reference, place="<image>",
        sizes=((110, 60), (56, 170), (60, 50)),
    )  # fmt: skip
    return Model(request.param, folder, cases(family, reference, processor), ())


def test_the_cases_differ(model: Model) -> None:
    assert len({case.expected for case in model.cases}) >= 5
    assert len({token for case in model.cases for token in case.expected}) > 6


async def check_cuts(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        for case in model.cases[:2]:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            case.check(output.token_ids)
        await engine.reset_caches()
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with prefix and encoder caches warm
        await settled(engine)
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


async def test_tokens_equal_generate(model: Model) -> None:
    await check_cuts(model, 13)


@pytest.mark.parametrize("model", ["internlm2"], indirect=True)
@pytest.mark.parametrize("budget", [1024, 5, 1])
async def test_tokens_equal_generate_however_prompts_are_cut(model: Model, budget: int) -> None:
    await check_cuts(model, budget)


@pytest.mark.parametrize("model", ["internlm2", "qwen3"], indirect=True)
async def test_tokens_equal_generate_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with the encoder cache warm
        assert engine.statistics().encoder_items_run == 3


PUBLISHED = {
    "language_model.model.norm.weight",
    "language_model.model.tok_embeddings.weight",
    "language_model.output.weight",
    *(f"mlp1.{i}.{each}" for i in (0, 1, 3) for each in ("bias", "weight")),
    "vision_model.embeddings.class_embedding",
    "vision_model.embeddings.patch_embedding.bias",
    "vision_model.embeddings.patch_embedding.weight",
    "vision_model.embeddings.position_embedding",
}
PUBLISHED_OF_LAYERS = {
    "language_model.model.layers.{}.": (
        "attention.wo.weight attention.wqkv.weight attention_norm.weight feed_forward.w1.weight "
        "feed_forward.w2.weight feed_forward.w3.weight ffn_norm.weight"
    ),
    "vision_model.encoder.layers.{}.": (
        "attn.proj.bias attn.proj.weight attn.qkv.bias attn.qkv.weight ls1 ls2 mlp.fc1.bias "
        "mlp.fc1.weight mlp.fc2.bias mlp.fc2.weight norm1.bias norm1.weight norm2.bias norm2.weight"
    ),
}


@pytest.mark.parametrize("model", ["internlm2"], indirect=True)
def test_the_weights_have_the_published_names(model: Model) -> None:
    """Those in the index of InternVL2.5-8B, for three layers each."""
    expected = PUBLISHED | {
        prefix.format(layer) + name
        for prefix, names in PUBLISHED_OF_LAYERS.items()
        for name in names.split()
        for layer in range(3)
    }
    assert load_file(model.folder / "model.safetensors").keys() == expected


def test_the_placeholder_is_ordinary_text() -> None:
    tokenizer = internvl_tokenizer()
    assert tokenizer.convert_tokens_to_ids("<image>") is None
    around = tokenizer.tokenize("it <image>\nWhat")
    assert not set(tokenizer.tokenize("<image>")) <= set(around)  # some have merged


@pytest.mark.parametrize("model", ["qwen2-6b"], indirect=True)
async def test_an_answer_ends_where_a_turn_ends(model: Model) -> None:
    """And where generation_config.json says; there is none here, so where the config does."""
    async with engine_for(model.folder) as engine:
        end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert engine._core.loaded.eos_token_ids == {2, end}


@pytest.mark.parametrize("model", ["internlm2"], indirect=True)
async def test_options_of_a_request(model: Model) -> None:
    """Fewer tiles; tiles of another size the vision model cannot take."""
    image = tiny_image(0).resize((300, 50))
    async with engine_for(model.folder, mm_processor_kwargs={"use_thumbnail": False}) as engine:
        row = engine.tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
        for most, num_tiles in ((1, 1), (2, 2), (4, 4), (6, 6)):
            prompt = Prompt(
                text="<image>", media={"image": [image]},
                mm_processor_kwargs={"max_dynamic_patch": most},
            )  # fmt: skip
            output = await engine.generate(prompt, PARAMS)
            assert output.prompt_token_ids.count(row) == 4 * num_tiles
        for options, message in (
            ({"size": {"height": 28, "width": 28}}, "leave size"),
            ({"max_dynamic_patch": "all"}, "a number from 1"),
            ({"max_dynamic_patch": 0}, "max_dynamic_patch"),
            ({"max_dynamic_patch": 1 << 40}, "max_dynamic_patch"),
        ):
            prompt = Prompt(text="<image>", media={"image": [image]}, mm_processor_kwargs=options)
            with pytest.raises(InvalidRequestError, match=message):
                await engine.generate(prompt, PARAMS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ps_version": "v1"}, "before version 1.5"),
        ({"pad2square": True}, "before version 1.5"),
        ({"force_image_size": 112}, "force_image_size 112"),
        ({"llm_config": {"architectures": ["Phi3ForCausalLM"]}}, "with Phi3ForCausalLM"),
        ({"llm_config": None}, "is not InternVL's"),
        ({"vision_config": {"image_size": 56, "patch_size": "x"}}, "is not InternVL's"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: Mapping[str, Any], message: str) -> None:
    settings = {**settings_of(KINDS["internlm2"], internvl_tokenizer()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=message):
        InternVLChatConfig.from_pretrained(tmp_path)


def test_defaults_of_configs_are_the_published_class_s(tmp_path: Path) -> None:
    """InternViT-6B, where a config says nothing of the vision model."""
    settings = settings_of(KINDS["internlm2"], internvl_tokenizer())
    del settings["force_image_size"], settings["max_dynamic_patch"]
    settings["vision_config"] = {}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = InternVLChatConfig.from_pretrained(tmp_path)
    vision = config.vision_config
    assert (vision.hidden_size, vision.num_attention_heads, vision.num_hidden_layers) == (
        3200, 25, 48,
    )  # fmt: skip
    assert vision.use_qk_norm and vision.norm_type == "rms_norm" and not vision.attention_bias
    assert tuple(vision.image_size) == (224, 224) and config.max_dynamic_patch == 6
    assert config.image_seq_length == 64


def test_a_folder_with_internlm2_s_tokenizer(tmp_path: Path) -> None:
    """tokenizer.model only, for which transformers would run the checkpoint's code."""
    first = write_folder(tmp_path)
    tokens = ("<img>", "<IMG_CONTEXT>", "</img>")
    added = {token: first + i for i, token in enumerate(tokens)}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    settings = settings_of(KINDS["internlm2"], internvl_tokenizer())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = InternVLChatConfig.from_pretrained(tmp_path)
    assert (config.image_token_id, config.turn_end_id) == (first + 1, 3)
    info = MULTIMODAL_REGISTRY.find_info(InternVLChat)
    context = load_context(tmp_path, hf_config=config, info=info)
    processor = MULTIMODAL_REGISTRY.create_processor(InternVLChat, context)
    header = ImageHeader(ImageSize(2 * SIDE, SIDE), "RGB")
    items = MultiModalDataItems({"image": ImageProcessorItems([header])})
    layout = processor.layout("in<image>\nthe cat", items, {})
    rows = [first, *[first + 1] * (3 * 4), first + 2]
    tokenizer = processor.info.get_tokenizer()
    before, after = (tokenizer.encode(t, add_special_tokens=False) for t in ("in", "\nthe cat"))
    assert layout.token_ids == [1, *before, *rows, *after]
    (placed,) = layout.placeholders["image"]
    assert placed.num_embeds == 12
