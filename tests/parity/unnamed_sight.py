"""Tiny models that read one image and write: chosen by their kind, and tried.

Rows as those of `families.FAMILIES`; a text is what the decoder goes on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers as hf

from tests.parity.families import Family, vocabulary
from tests.processors.hf_processors import tokenizer_with

__all__ = ["UNNAMED"]

SIDE = 32
TEXTS = ("*", "*", "tell a story*", "*a", "tell a story about colours*", "What is it? There is*")
VIT = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": SIDE, "patch_size": 8,
}  # fmt: skip
MBART = {
    "d_model": 48, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "max_position_embeddings": 1024, "scale_embedding": True, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "is_encoder_decoder": False, "forced_eos_token_id": None,
}  # fmt: skip
BERT = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip


def combine(encoder: Any, decoder: Any) -> Any:
    """A model of both configs, whose decoder attends to the encoder."""
    decoder.is_decoder = decoder.add_cross_attention = True
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    model = hf.VisionEncoderDecoderModel(config)
    settings = model.generation_config
    settings.decoder_start_token_id, settings.pad_token_id, settings.eos_token_id = 1, 0, 2
    return model


def swin() -> Any:
    """Whose last stage is 64 wide, and of a quarter of the patches."""
    return hf.DonutSwinConfig(
        image_size=[2 * SIDE, SIDE], patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4],
        window_size=4, hidden_size=64,
    )  # fmt: skip


def vit_processor() -> Any:
    images = hf.ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return hf.TrOCRProcessor(images, tokenizer_with())


def donut_processor() -> Any:
    images = hf.DonutImageProcessorPil(size={"height": 2 * SIDE, "width": SIDE})
    return hf.DonutProcessor(images, tokenizer_with("<s_task>"))


def mbart(tokenizer: Any, **more: Any) -> Any:
    return hf.MBartConfig(vocab_size=vocabulary(tokenizer), **{**MBART, **more})


def gpt2(tokenizer: Any) -> Any:
    return hf.GPT2Config(
        vocab_size=vocabulary(tokenizer), n_embd=48, n_layer=3, n_head=4, n_positions=1024
    )


def bert_decoder(tokenizer: Any) -> Any:
    """One whose head is more than a matmul."""
    return combine(hf.ViTConfig(**VIT), hf.BertConfig(vocab_size=vocabulary(tokenizer), **BERT))


def pp_formula_processor() -> Any:
    """Its own image processor needs torchvision."""
    images = hf.ViTImageProcessorPil(size={"height": 2 * SIDE, "width": 2 * SIDE})
    return hf.TrOCRProcessor(images, tokenizer_with())


def pp_formula(tokenizer: Any) -> Any:
    """One whose decoder attends to what the encoder's output is pooled to."""
    config = hf.PPFormulaNetConfig(
        vision_config={
            "hidden_size": 48, "output_channels": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 2 * SIDE, "patch_size": 8, "window_size": 4,
            "global_attn_indexes": [1], "mlp_dim": 96, "post_conv_in_channels": 32,
            "post_conv_mid_channels": 32, "post_conv_out_channels": 64, "decoder_hidden_size": 48,
        },
        text_config={
            "vocab_size": vocabulary(tokenizer), "d_model": 48, "decoder_layers": 3,
            "decoder_ffn_dim": 96, "decoder_attention_heads": 4, "max_position_embeddings": 1024,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
        },
    )  # fmt: skip
    model = hf.PPFormulaNetForConditionalGeneration(config)
    settings = model.generation_config
    settings.decoder_start_token_id, settings.pad_token_id, settings.eos_token_id = 1, 0, 2
    return model


UNNAMED: Mapping[str, Family] = {
    "donut": Family(
        processor=donut_processor,
        model=lambda tokenizer: combine(swin(), mbart(tokenizer, d_model=64)),
        place="", texts=("<s_task>*", "<s_task>*", *TEXTS),
    ),
    "donut of two widths": Family(
        processor=donut_processor, model=lambda tokenizer: combine(swin(), mbart(tokenizer)),
        place="", texts=("<s_task>*", "<s_task>*", *TEXTS),
    ),
    "pp-formula": Family(
        processor=pp_formula_processor, model=pp_formula, place="", texts=TEXTS,
    ),
    "vit over bert": Family(
        processor=vit_processor, model=bert_decoder, place="", texts=TEXTS,
    ),
    "vit over gpt2": Family(
        processor=vit_processor,
        model=lambda tokenizer: combine(hf.ViTConfig(**VIT), gpt2(tokenizer)),
        place="", texts=TEXTS,
    ),
    "vit over mbart": Family(
        processor=vit_processor,
        model=lambda tokenizer: combine(
            hf.ViTConfig(**{**VIT, "hidden_size": 32}), mbart(tokenizer)
        ),
        place="", texts=TEXTS,
    ),
}  # fmt: skip
