"""Tiny encoder-decoders of text that no class here names: chosen by their kind, and tried.

Rows as those of `test_encdec.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers as hf

from tests.parity.test_encdec import BART, T5

__all__ = ["REFUSED", "UNNAMED"]

GEMMA = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "sliding_window": 5,
    "query_pre_attn_scalar": 12,
}  # fmt: skip
SEAMLESS = {
    "hidden_size": 48, "encoder_layers": 2, "decoder_layers": 3, "speech_encoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_position_embeddings": 64, "t2u_vocab_size": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
BERT = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
UNSCALED = {**BART, "scale_embedding": False}


def marian(size: int) -> Any:
    """Its generation config has tokens that are never to come: padding, in its checkpoints."""
    wide = {"encoder_layers": 1, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
    model = hf.MarianMTModel(hf.MarianConfig(vocab_size=size, **{**BART, **wide}))
    model.generation_config.bad_words_ids = [[200], [320], [2]]
    return model


def t5_gemma(size: int) -> Any:
    """With an encoder that is wider than the decoder."""
    config = hf.T5GemmaConfig(
        encoder=hf.T5GemmaModuleConfig(vocab_size=size, **{**GEMMA, "hidden_size": 64}),
        decoder=hf.T5GemmaModuleConfig(vocab_size=size, **GEMMA),
        vocab_size=size,
        tie_word_embeddings=False,
        **{name: BART[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    model = hf.T5GemmaForConditionalGeneration(config)
    model.generation_config.decoder_start_token_id = 1
    return model


UNNAMED: Mapping[str, Callable[[int], Any]] = {
    "bigbird-pegasus": lambda size: hf.BigBirdPegasusForConditionalGeneration(
        hf.BigBirdPegasusConfig(vocab_size=size, **BART, attention_type="original_full")
    ),
    "blenderbot": lambda size: hf.BlenderbotForConditionalGeneration(
        hf.BlenderbotConfig(vocab_size=size, **BART)
    ),
    "blenderbot-small": lambda size: hf.BlenderbotSmallForConditionalGeneration(
        hf.BlenderbotSmallConfig(vocab_size=size, **UNSCALED)
    ),
    "longt5": lambda size: hf.LongT5ForConditionalGeneration(
        hf.LongT5Config(vocab_size=size, **T5, local_radius=7)
    ),
    "longt5 of global tokens": lambda size: hf.LongT5ForConditionalGeneration(
        hf.LongT5Config(
            vocab_size=size, **T5, local_radius=7, global_block_size=4,
            encoder_attention_type="transient-global",
        )
    ),
    "m2m100": lambda size: hf.M2M100ForConditionalGeneration(
        hf.M2M100Config(vocab_size=size, **BART, forced_bos_token_id=7)
    ),
    "marian": marian,
    "mt5": lambda size: hf.MT5ForConditionalGeneration(hf.MT5Config(vocab_size=size, **T5)),
    "pegasus": lambda size: hf.PegasusForConditionalGeneration(
        hf.PegasusConfig(vocab_size=size, **BART)
    ),
    "pegasus-x": lambda size: hf.PegasusXForConditionalGeneration(
        hf.PegasusXConfig(vocab_size=size, **BART, num_global_tokens=4, block_size=8)
    ),
    "plbart": lambda size: hf.PLBartForConditionalGeneration(
        hf.PLBartConfig(vocab_size=size, **BART)
    ),
    "seamless-m4t": lambda size: hf.SeamlessM4TForTextToText(
        hf.SeamlessM4TConfig(vocab_size=size, **SEAMLESS)
    ),
    "seamless-m4t v2": lambda size: hf.SeamlessM4Tv2ForTextToText(
        hf.SeamlessM4Tv2Config(vocab_size=size, **SEAMLESS, char_vocab_size=64)
    ),
    "t5gemma": t5_gemma,
    "umt5": lambda size: hf.UMT5ForConditionalGeneration(hf.UMT5Config(vocab_size=size, **T5)),
}  # fmt: skip

REFUSED: Mapping[str, tuple[Callable[[], Any], str]] = {
    "BigBirdPegasusForConditionalGeneration": (
        lambda: hf.BigBirdPegasusConfig(**BART), "a short prompt turns it off for all later ones"
    ),
    "EncoderDecoderModel": (
        lambda: hf.EncoderDecoderConfig.from_encoder_decoder_configs(
            hf.BertConfig(**BERT), hf.BertConfig(**BERT)
        ),
        "its decoder is a whole model with a head of its own",
    ),
    "FSMTForConditionalGeneration": (
        lambda: hf.FSMTConfig(src_vocab_size=64, tgt_vocab_size=64, langs=["a", "b"], **BART),
        "its decoder does not tell its embeddings",
    ),
    "LEDForConditionalGeneration": (
        lambda: hf.LEDConfig(d_model=48, encoder_ffn_dim=96, decoder_ffn_dim=96),
        "LEDDecoder does not route attention",
    ),
    "MvpForConditionalGeneration": (
        lambda: hf.MvpConfig(**BART), "MvpDecoder does not route attention"
    ),
    "NllbMoeForConditionalGeneration": (
        lambda: hf.NllbMoeConfig(**BART, num_experts=4, decoder_sparse_step=2),
        "drops tokens beyond its expert_capacity",
    ),
    "ProphetNetForConditionalGeneration": (
        lambda: hf.ProphetNetConfig(hidden_size=48, num_encoder_layers=2, num_decoder_layers=2),
        "ProphetNetDecoder keeps a state",
    ),
    "Pop2PianoForConditionalGeneration": (hf.Pop2PianoConfig, "generates is audio and no text"),
    "SwitchTransformersForConditionalGeneration": (
        lambda: hf.SwitchTransformersConfig(**T5, num_experts=4, num_sparse_decoder_layers=1),
        "drops tokens beyond its expert_capacity",
    ),
    "T5Gemma2ForConditionalGeneration": (
        lambda: hf.T5Gemma2Config(
            encoder=hf.T5Gemma2EncoderConfig(text_config=GEMMA, vision_config=BERT),
            decoder=hf.T5Gemma2DecoderConfig(**GEMMA),
        ),
        "its encoder reads image beside text",
    ),
}  # fmt: skip
"""Config of an architecture that is refused, and words that say why."""
