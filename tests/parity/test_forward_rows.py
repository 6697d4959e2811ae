"""Models whose own forward tells what media become: Phi-4 multimodal and Llama 4."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import InvalidRequestError
from aioengine.models.generic import ForwardRowsModel
from aioengine.models.runtime.registry import choose
from aioengine.models.runtime.whole_pass import embeddings_of
from tests.parity.audio_families import RATE, Case, finish, sound
from tests.parity.families import MAX_TOKENS, TEXT, greedy, id_of, vocabulary
from tests.processors import hf_processors
from tests.support.tiny import draw_weights, tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
HEARS = {
    "hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2,
    "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
}  # fmt: skip
# Its processor knows how many rows a tile of this size has.
SEES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
}  # fmt: skip
IMAGE, AUDIO = "<|image|>", "<|audio|>"


def phi4_config(**ids: int) -> Any:
    config = hf.Phi4MultimodalConfig(
        **{**TEXT, "vocab_size": 400, **ids}, vision_config=SEES, audio_config=HEARS,
        original_max_position_embeddings=2048,
    )  # fmt: skip
    config.architectures = ["Phi4MultimodalForCausalLM"]
    return config


def test_encoders_inside_a_decoder_are_left() -> None:
    config = phi4_config()
    chosen = choose(config)
    assert chosen.model_class is ForwardRowsModel and chosen.model_impl == "transformers"
    assert [spec.name for spec in ForwardRowsModel.probe(config)] == [
        f"layers.{index}.self_attn" for index in range(TEXT["num_hidden_layers"])
    ]
    module = hf.Phi4MultimodalForCausalLM(config)
    model = ForwardRowsModel(module, specs=ForwardRowsModel.probe(config))
    inside = model.decoder().embed_tokens_extend
    sees, hears = inside.image_embed.img_processor, inside.audio_embed.encoder
    assert sees.config._attn_implementation == hears.config._attn_implementation == "sdpa"
    assert model.decoder().layers[0].self_attn.config._attn_implementation == "aioengine_paged"


@torch.inference_mode()
def test_rows_are_those_of_the_forward() -> None:
    vision = {
        **SEES, "intermediate_size": 4 * 32, "projector_input_dim": 16, "projector_output_dim": 16,
        "vision_output_dim": 16, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    text = {**TEXT, "vocab_size": 99, "head_dim": 12, "moe_layers": []}
    model = hf.Llama4ForConditionalGeneration(
        hf.Llama4Config(vision_config=vision, text_config=text, image_token_index=98)
    )
    draw_weights(model)
    pixels = torch.randn(1, 3, 32, 32)
    rows = model.multi_modal_projector(model.get_image_features(pixels).last_hidden_state[0])
    ids = torch.tensor([5, 98, 98, 6, 98, 98, 7])
    layers = model.language_model.model.layers
    found = embeddings_of(model, layers, ids, {"pixel_values": pixels})
    plain = model.get_input_embeddings()(ids)
    assert torch.equal(found[ids != 98], plain[ids != 98])
    torch.testing.assert_close(found[ids == 98], rows)
    assert model.language_model.model.layers is layers and len(layers) > 1


def save_phi4(folder: Path) -> tuple[Any, Any]:
    pytest.importorskip("torchvision")
    tokenizer = hf_processors.tokenizer_with(image_token=IMAGE, audio_token=AUDIO)
    images = hf.Phi4MultimodalImageProcessor(dynamic_hd=4)
    processor = hf.Phi4MultimodalProcessor(
        image_processor=images, audio_processor=hf.Phi4MultimodalFeatureExtractor(),
        tokenizer=tokenizer,
    )  # fmt: skip
    config = phi4_config(vocab_size=vocabulary(tokenizer))
    config.vision_config.image_token_id = id_of(tokenizer, IMAGE)
    config.audio_config.audio_token_id = id_of(tokenizer, AUDIO)
    with torch.random.fork_rng(devices=[]):
        model = hf.Phi4MultimodalForCausalLM(config)
    model = finish(model, folder, tower="audio_embed.encoder")
    processor.save_pretrained(folder)
    return model, processor


def phi4_cases(model: Any, processor: Any) -> list[Case]:
    clips = [sound(seed, seconds) for seed, seconds in ((0, 0.7), (1, 1.9), (2, 1.9))]
    media: list[tuple[str, dict[str, tuple[Any, ...]]]] = [
        *((f"a {AUDIO} b?", {"audio": (clip,)}) for clip in clips),
        (f"a {AUDIO} b {AUDIO}?", {"audio": (clips[1], clips[2])}),
        (f"see {IMAGE}: what?", {"images": (tiny_image(0, 40, 200),)}),
        ("no more than text", {}),
    ]
    found = []
    for text, given in media:
        more = {"sampling_rate": RATE} if "audio" in given else {}
        inputs = processor(
            text=text, **{name: list(each) for name, each in given.items()}, **more,
            return_tensors="pt",
        )  # fmt: skip
        ours = {**given}
        if "audio" in ours:
            ours["audios"] = tuple((clip, RATE) for clip in ours.pop("audio"))
        found.append(Case(text, ours, greedy(model, dict(inputs))))
    return found


async def test_tokens_equal_generate(tmp_path: Path) -> None:
    cases = phi4_cases(*save_phi4(tmp_path))
    assert len({case.expected for case in cases}) == len(cases)
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 16 << 20, "max_model_len": 2048}
    for budget in (1024, 13):
        async with AsyncEngine.from_pretrained(
            tmp_path, **sizes, max_num_batched_tokens=budget
        ) as engine:
            for _ in range(2):
                outputs = await asyncio.gather(
                    *(engine.generate(case.text, PARAMS, **case.media) for case in cases)
                )
                for case, output in zip(cases, outputs, strict=True):
                    case.check(output.token_ids)
            both = {**cases[0].media, **cases[4].media}
            with pytest.raises(InvalidRequestError, match="audio and image"):
                await engine.generate(f"{IMAGE} and {AUDIO}", PARAMS, **both)
