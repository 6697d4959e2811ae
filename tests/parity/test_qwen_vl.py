"""Qwen-VL: its parts beside those of transformers, and the engine beside a plain forward."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.clip.modeling_clip import CLIPEncoder

from aioengine import Embeddings, Prompt
from aioengine.errors import (
    InvalidRequestError,
    ModelLoadError,
    PlaceholderMismatchError,
    UnsupportedModalityError,
)
from aioengine.models.qwen_vl.modeling import Qwen, QwenLMHeadModel, QwenTower, QwenVL
from aioengine.models.qwen_vl.processing import QwenConfig
from aioengine.processors.hf.qwen_vl import QwenVLProcessor, tokenizer_from_ranks
from tests.parity.families import Case
from tests.parity.whole import (
    PARAMS,
    check_alone_and_together,
    check_without_prefixes,
    engine_for,
    exact_norms,
    greedy,
    unpaged,
)
from tests.support.tiny import draw_weights, tiny_image

RANKS = [
    *(bytes([each]) for each in (*range(97, 123), *range(97), *range(123, 256))),
    *(b"th", b"he", b" t", b"the", b" the", b"er", b"in", b" a", b"ic", b"tu", b"re", b"ture"),
    *(b"  ", b"    ", b"aa", b"aaa", b"aaaa", b"\n\n", b"Pic", b"ar", b"ell", b"stor", b"story"),
    *(b" is", b"ha", b"Pi", b"hat", b"What", b"Wh", b"at", b"st", b"or", b"ll", b"ry", b"\xc3\xa9"),
]
START = len(RANKS) + 208 + 6
"""The id of <img>, behind those of the text models and the six tags of boxes."""
PLACE = "Picture 1: <img></img>\n"
SIZES = ((40, 30), (30, 60), (28, 28))
TEXTS = (
    f"{PLACE}What is it?",
    f"{PLACE}What is it?",
    "<img></img>",
    "First <img></img> then <img></img> compare the story.",
    "<img></img><img></img> same?",
    "no picture here, tell a story",
)
PUBLISHED = {
    "architectures": ["QWenLMHeadModel"],
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 8192,
    "model_type": "qwen",
    "no_bias": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "seq_length": 2048,
    "torch_dtype": "bfloat16",
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "visual": {
        "heads": 16,
        "image_size": 448,
        "image_start_id": 151857,
        "layers": 48,
        "mlp_ratio": 4.9231,
        "output_dim": 4096,
        "patch_size": 14,
        "width": 1664,
    },
    "vocab_size": 151936,
}
TINY = {
    **PUBLISHED,
    "hidden_size": 128,
    "intermediate_size": 192,
    "kv_channels": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "seq_length": 256,
    "torch_dtype": "float64",
    "vocab_size": len(RANKS) + 240,
    "visual": {
        "heads": 2,
        "image_size": 28,
        "image_start_id": START,
        "layers": 2,
        "mlp_ratio": 2.5,
        "output_dim": 128,
        "patch_size": 7,
        "width": 32,
        "n_queries": 4,
    },
}


def build(settings: dict[str, Any] = TINY) -> Any:
    """The definition in float64, its weights drawn wide."""
    with torch.random.fork_rng(devices=[]):
        model = QwenLMHeadModel(QwenConfig.from_dict(copy.deepcopy(settings)))
    draw_weights(model)
    return model.double().eval().requires_grad_(False)


def save(model: Any, settings: dict[str, Any], folder: Path, chat_format: str = "chatml") -> None:
    """A folder as it was published: a file of ranks, and no code."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    lines = (b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(RANKS))
    (folder / "qwen.tiktoken").write_bytes(b"".join(lines))
    generation = {"chat_format": chat_format, "eos_token_id": len(RANKS)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["x.Y", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@dataclass(frozen=True)
class Model:
    folder: Path
    cases: tuple[Case, ...]


def image_tokens() -> list[str]:
    tags = [f"<{end}{name}>" for name in ("ref", "box", "quad", "img") for end in ("", "/")]
    return [*tags, "<imgpad>"]


def special_tokens() -> list[str]:
    extras = [f"<|extra_{i}|>" for i in range(205)]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *extras, *image_tokens()]


def tokenizer() -> Any:
    return tokenizer_from_ranks({token: i for i, token in enumerate(RANKS)}, special_tokens())


def expected(model: Any, text: str, images: tuple[Any, ...]) -> tuple[int, ...]:
    """What the definition says, the prompt laid out by hand."""
    pads = "<imgpad>" * 4
    ids = tokenizer()(text.replace("<img></img>", f"<img>{pads}</img>"))["input_ids"]
    pixels = [QwenVLProcessor(tokenizer(), 28)(images=[image])["pixel_values"] for image in images]
    rows = [model.get_image_features(each.double())[0] for each in pixels]
    return greedy(model, ids, rows, START + 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("qwen-vl")
    definition = build()
    save(definition, TINY, folder)
    unpaged(definition)
    a, b, c = (tiny_image(i).resize(size) for i, size in enumerate(SIZES))
    pil_images = iter([(a,), (b,), (c,), (a, b), (c, c), ()])
    cases = []
    for text in TEXTS:
        images = next(pil_images)
        cases.append(Case(text, images, expected(definition, text, images)))
    return Model(folder, tuple(cases))


# ---- parts


@torch.inference_mode()
def test_the_decoder_is_qwen2_under_other_names() -> None:
    ours = build({**TINY, "visual": None})
    config = hf.Qwen2Config(
        vocab_size=TINY["vocab_size"], hidden_size=128, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = hf.Qwen2ForCausalLM(config).double().eval()
    weights = {"model.embed_tokens.weight": ours.transformer.wte.weight}
    weights |= {"model.norm.weight": ours.transformer.ln_f.weight}
    weights |= {"lm_head.weight": ours.lm_head.weight}
    for i, block in enumerate(ours.transformer.h):
        layer = f"model.layers.{i}"
        for kind in ("weight", "bias"):
            parts = getattr(block.attn.c_attn, kind).chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                weights[f"{layer}.self_attn.{name}_proj.{kind}"] = part
        weights |= {
            f"{layer}.self_attn.o_proj.weight": block.attn.c_proj.weight,
            f"{layer}.mlp.up_proj.weight": block.mlp.w1.weight,
            f"{layer}.mlp.gate_proj.weight": block.mlp.w2.weight,
            f"{layer}.mlp.down_proj.weight": block.mlp.c_proj.weight,
            f"{layer}.input_layernorm.weight": block.ln_1.weight,
            f"{layer}.post_attention_layernorm.weight": block.ln_2.weight,
        }
    theirs.load_state_dict(weights)
    ids = torch.randint(0, 256, (19,), generator=torch.Generator().manual_seed(0))
    hidden = unpaged(ours)(ids, torch.arange(19))
    # Eager attention turns to float32 as well.
    exact_norms(theirs).set_attn_implementation("sdpa")
    wanted = theirs(ids[None]).logits[0]
    assert (ours.compute_logits(hidden) - wanted).abs().max() < 1e-10


def reference_resampler(pool: Any, patches: Tensor, places: Tensor, num_heads: int) -> Tensor:
    """Its one layer of cross-attention, written out."""
    values = pool.ln_kv(pool.kv_proj(patches))
    keys, queries = values + places, pool.ln_q(pool.query) + pool.pos_embed
    weights, biases = pool.attn.in_proj_weight.chunk(3), pool.attn.in_proj_bias.chunk(3)
    q, k, v = (
        (each @ weight.T + bias).unflatten(-1, (num_heads, 128)).transpose(-2, -3)
        for each, weight, bias in zip((queries, keys, values), weights, biases, strict=True)
    )
    shares = (q @ k.transpose(-1, -2) / 128**0.5).softmax(-1)
    joined = (shares @ v).transpose(-2, -3).flatten(-2)
    result: Tensor = joined @ pool.attn.out_proj.weight.T + pool.attn.out_proj.bias
    return result


@torch.inference_mode()
def test_the_tower_is_clips_and_a_resampler() -> None:
    visual = {**TINY["visual"], "output_dim": 256, "n_queries": 9}
    tower: Any = QwenTower(visual, 256)
    draw_weights(tower)
    tower = tower.double().eval()
    config = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2,
        hidden_act="gelu", layer_norm_eps=1e-6, attn_implementation="sdpa",
    )  # fmt: skip
    encoder = CLIPEncoder(config).double().eval()
    weights = {}
    for i, block in enumerate(tower.transformer.resblocks):
        layer = f"layers.{i}"
        for kind in ("weight", "bias"):
            # For each head its query, key and value lie side by side.
            made = getattr(block.attn.in_proj, kind).unflatten(0, (2, 3, 16))
            for j, name in enumerate("qkv"):
                part = made[:, j].flatten(0, 1)
                weights[f"{layer}.self_attn.{name}_proj.{kind}"] = part
            pairs = (
                ("self_attn.out_proj", block.attn.out_proj), ("layer_norm1", block.ln_1),
                ("layer_norm2", block.ln_2), ("mlp.fc1", block.mlp.c_fc),
                ("mlp.fc2", block.mlp.c_proj),
            )  # fmt: skip
            for name, module in pairs:
                weights[f"{layer}.{name}.{kind}"] = getattr(module, kind)
    encoder.load_state_dict(weights)
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)).double()
    cells = (
        pixels.unfold(2, 7, 7).unfold(3, 7, 7).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    )
    patches = cells @ tower.conv1.weight.flatten(1).T

    def stretched(table: Tensor, side: int) -> Tensor:
        grid = table.unflatten(0, (side, side)).permute(2, 0, 1)[None]
        grid = torch.nn.functional.interpolate(grid, (4, 4), mode="bicubic", align_corners=False)
        return grid[0].permute(1, 2, 0).flatten(0, 1)

    hidden = tower.ln_pre(patches + stretched(tower.positional_embedding, 16))
    hidden = encoder(inputs_embeds=hidden).last_hidden_state
    rows = reference_resampler(tower.attn_pool, hidden, stretched(tower.attn_pool.pos_embed, 3), 2)
    wanted = tower.ln_post(rows) @ tower.proj
    assert wanted.shape == (2, 9, 256)
    assert (tower(pixels) - wanted).abs().max() < 1e-10


def test_names_and_sizes_are_the_published_ones() -> None:
    """From the index of Qwen-VL-Chat, and the sizes in table 1 of the paper."""
    with torch.device("meta"):
        found = QwenLMHeadModel(QwenConfig.from_dict(PUBLISHED)).state_dict()
    both = ("weight", "bias")
    names = {"lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"}
    for i in range(32):
        layer = f"transformer.h.{i}"
        names |= {f"{layer}.attn.c_attn.bias"}
        names |= {f"{layer}.{each}.weight" for each in ("ln_1", "ln_2", "attn.c_attn")}
        names |= {f"{layer}.attn.c_proj.weight"}
        names |= {f"{layer}.mlp.{each}.weight" for each in ("w1", "w2", "c_proj")}
    tower = "transformer.visual"
    names |= {f"{tower}.{each}" for each in ("conv1.weight", "positional_embedding", "proj")}
    names |= {f"{tower}.{each}.{kind}" for each in ("ln_pre", "ln_post") for kind in both}
    pool = f"{tower}.attn_pool"
    names |= {f"{pool}.{each}" for each in ("kv_proj.weight", "pos_embed", "query")}
    names |= {f"{pool}.attn.in_proj_{kind}" for kind in both}
    names |= {
        f"{pool}.{each}.{kind}" for each in ("attn.out_proj", "ln_q", "ln_kv") for kind in both
    }
    parts = ("attn.in_proj", "attn.out_proj", "ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for i in range(48):
        block = f"{tower}.transformer.resblocks.{i}"
        names |= {f"{block}.{each}.{kind}" for each in parts for kind in both}
    assert set(found) == names

    def billions(*starts: str) -> float:
        sizes = (tensor.numel() for name, tensor in found.items() if name.startswith(starts))
        return sum(sizes) / 1e9

    assert billions("transformer.h", "transformer.wte", "lm_head") == pytest.approx(7.7, abs=0.05)
    assert billions(pool) == pytest.approx(0.08, abs=0.01)
    assert billions(tower) - billions(pool) == pytest.approx(1.9, abs=0.05)
    assert found["transformer.visual.attn_pool.query"].shape == (256, 4096)
    assert found["transformer.visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0] == 8192


def test_images_are_processed_as_clips_are_without_a_crop() -> None:
    images = [tiny_image(i, 50, 70) for i in range(2)]
    theirs = hf.CLIPImageProcessorPil(
        size={"height": 448, "width": 448}, do_center_crop=False, resample=3
    )
    wanted = theirs(images, return_tensors="pt")["pixel_values"]
    found = QwenVLProcessor(tokenizer(), 448)(images=images)["pixel_values"]
    assert found.dtype == torch.float32 and found.shape == (2, 3, 448, 448)
    assert (found - wanted).abs().max() < 1e-5


# ---- the tokenizer


def merged(piece: bytes) -> list[int]:
    """tiktoken's rule: while there is a pair with a rank, the one of the lowest, the first."""
    ranks = {token: i for i, token in enumerate(RANKS)}
    parts = [piece] if piece in ranks else [bytes([each]) for each in piece]
    while True:
        pairs = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(pairs, default=(1 << 30, 0))
        if rank == 1 << 30:
            return [ranks[part] for part in parts]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_the_tokenizer_merges_as_tiktoken_does() -> None:
    found = tokenizer()
    rng = random.Random(0)
    drawn = ["".join(rng.choices("aether", k=rng.randint(1, 12))) for _ in range(300)]
    words = [
        *drawn,
        "Picture",
        " then",
        " there",
        "ther",
        "aaaaa",
        "aaaaaaa",
        "café",
        " the",
        "1",
        "\n\n",
    ]
    for word in words:
        assert found(word)["input_ids"] == merged(word.encode()), word
    text = "What's  in the picture 12?\n\n\nthe story — caf\u0065\u0301 <box>(1,2)</box>"
    ids = found(text)["input_ids"]
    # Decomposed letters are put together first; digits stand alone.
    assert found.decode(ids) == text.replace("e\u0301", "é")
    assert found("12")["input_ids"] == [*merged(b"1"), *merged(b"2")]


def test_ids_of_special_tokens_follow_the_ranks() -> None:
    """The published ones: 151643 ranks, <|endoftext|>, ..., <img> 151857, </img>, <imgpad>."""
    shift, found = 151643 - len(RANKS), tokenizer()
    ids = {
        "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
        "<|extra_0|>": 151646, "<|extra_204|>": 151850, "<ref>": 151851, "</ref>": 151852,
        "<box>": 151853, "</box>": 151854, "<quad>": 151855, "</quad>": 151856, "<img>": 151857,
        "</img>": 151858, "<imgpad>": 151859,
    }  # fmt: skip
    for token, wanted in ids.items():
        assert found(token)["input_ids"] == [wanted - shift]
    assert START + shift == 151857
    assert found.decode(found("a<|im_end|>b")["input_ids"], skip_special_tokens=True) == "ab"


# ---- the engine


def test_the_cases_differ(model: Model) -> None:
    """Else equal tokens would prove nothing."""
    assert len({case.expected for case in model.cases}) >= 5
    assert len({token for case in model.cases for token in case.expected}) > 6


@pytest.mark.parametrize("budget", [1024, 13, 5, 1])
async def test_tokens_equal_a_plain_forward(model: Model, budget: int) -> None:
    await check_alone_and_together(model.folder, model.cases, budget)


async def test_tokens_equal_a_plain_forward_without_a_prefix_cache(model: Model) -> None:
    await check_without_prefixes(model.folder, model.cases, 3)


async def test_a_image_lies_between_its_tags(model: Model) -> None:
    case = model.cases[3]
    async with engine_for(model.folder) as engine:
        output = await engine.generate(case.text, PARAMS, images=case.images)
        image = [START, *[START + 2] * 4, START + 1]
        before, between, after = (
            tokenizer()(text)["input_ids"] for text in ("First ", " then ", " compare the story.")
        )
        ids = [*before, *image, *between, *image, *after]
        assert output.prompt_token_ids == tuple(ids)
        # The same with the rows in their places already.
        again = await engine.generate(ids, PARAMS, images=case.images)
        assert again.token_ids == case.expected


async def test_rows_that_were_computed_elsewhere(model: Model) -> None:
    case, definition = model.cases[0], build()
    pixels = QwenVLProcessor(tokenizer(), 28)(images=list(case.images))["pixel_values"]
    rows = definition.get_image_features(pixels.double())[0]
    async with engine_for(model.folder) as engine:
        output = await engine.generate(case.text, PARAMS, images=[Embeddings(rows)])
        assert output.token_ids == case.expected


async def test_chat_messages_are_written_as_the_published_chat_does(model: Model) -> None:
    image = model.cases[0].images[0]
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What? <img></img>"}]
    async with engine_for(model.folder) as engine:
        output = await engine.generate([{"role": "user", "content": content}], PARAMS)
        text = engine.tokenizer.decode(output.prompt_token_ids)
        assert text == (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nPicture 1: <img><imgpad><imgpad><imgpad><imgpad></img>\n"
            "What? <img></img><|im_end|>\n<|im_start|>assistant\n"
        )
        # What the user typed is text.
        assert output.prompt_token_ids.count(START) == 1
        ends = engine._core.loaded.eos_token_ids
        assert ends == {len(RANKS), len(RANKS) + 1, len(RANKS) + 2}


async def test_what_cannot_be_served_is_refused(model: Model) -> None:
    image = model.cases[0].images[0]
    async with engine_for(model.folder) as engine:
        with pytest.raises(PlaceholderMismatchError):
            await engine.generate("no place", PARAMS, images=[image])
        with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
            prompt = {"text": PLACE, "media": {"image": [image]}}
            await engine.generate(Prompt(**prompt, mm_processor_kwargs={"size": 56}), PARAMS)
    # Positions would be scaled by the length of the longest.
    engine = engine_for(model.folder, max_model_len=257)
    with pytest.raises(ModelLoadError, match="256 positions"):
        await engine.start()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_channels": 16}, "kv_channels"),
        ({"visual": {**TINY["visual"], "output_dim": 256}}, "output_dim"),
        ({"visual": {**TINY["visual"], "n_queries": 5}}, "n_queries"),
        ({"visual": {"width": 32}}, "image_size"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        QwenVL.probe(QwenConfig.from_dict({**TINY, **changes}))


# ---- without a tower, and with a tokenizer.json


@pytest.fixture
def text_folder(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    settings = {name: value for name, value in TINY.items() if name != "visual"}
    definition = build(settings)
    save(definition, settings, tmp_path, "raw")
    yield tmp_path, unpaged(definition)


async def test_a_text_model_of_the_family(text_folder: tuple[Path, Any]) -> None:
    folder, definition = text_folder
    text = "tell the story of a picture"
    case = Case(text, (), greedy(definition, tokenizer()(text)["input_ids"], (), -1))
    await check_alone_and_together(folder, [case, case], 5)
    async with engine_for(folder) as engine:
        assert engine._core.loaded.runner.model.__class__ is Qwen
        assert engine._core.loaded.eos_token_ids == {len(RANKS)}
        # The tags are not among its tokens.
        assert len(engine.tokenizer) == len(RANKS) + 208
        with pytest.raises(UnsupportedModalityError):
            await engine.generate(text, PARAMS, images=[tiny_image()])


async def test_a_folder_with_a_tokenizer_file(model: Model, tmp_path: Path) -> None:
    for path in model.folder.iterdir():
        if path.name != "qwen.tiktoken":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer().save_pretrained(tmp_path)
    async with engine_for(tmp_path) as engine:
        output = await engine.generate(model.cases[0].text, PARAMS, images=model.cases[0].images)
        assert output.token_ids == model.cases[0].expected
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        await engine_for(tmp_path).start()
