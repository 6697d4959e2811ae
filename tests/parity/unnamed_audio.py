"""Tiny models that hear and that no class here names: chosen by their kind, and tried.

Rows as those of `audio_families.FAMILIES`; a prompt of these has one sound at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.parity.audio_families import Array, Family, ToInputs, finish
from tests.parity.families import TEXT, id_of, vocabulary
from tests.processors import hf_processors

__all__ = ["UNNAMED"]

TOWER = {
    "num_mel_bins": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
TEXTS = (
    "Audio: *\nWhat is it? ASSISTANT:",
    "Say * now:",
    "*",
    "no sound here, tell a story",
)


def text(tokenizer: Any, kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": vocabulary(tokenizer), **TEXT, **more}


def saver(
    build: Callable[[], tuple[Any, Any]], tower: str = "audio_tower"
) -> Callable[[Path], tuple[Any, ToInputs]]:
    """`build()`: the HF processor and the HF model; `tower`: what hears."""

    def save(folder: Path) -> tuple[Any, ToInputs]:
        with torch.random.fork_rng(devices=[]):
            processor, model = build()
        model = finish(model, folder, tower=tower)
        processor.save_pretrained(folder)

        def to_inputs(text: str, sounds: Sequence[Array]) -> dict[str, Any]:
            media = {"audio": list(sounds)} if sounds else {}
            return dict(processor(text=text, **media, return_tensors="pt"))

        return model, to_inputs

    return save


def audio_flamingo3() -> tuple[Any, Any]:
    tokenizer = hf_processors.tokenizer_with("<sound>")
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    config = hf.AudioFlamingo3Config(
        audio_config={"model_type": "audioflamingo3_encoder", **TOWER, "max_source_positions": 50},
        text_config=text(tokenizer, "qwen2"),
        audio_token_id=id_of(tokenizer, "<sound>"),
    )
    model = hf.AudioFlamingo3ForConditionalGeneration(config)
    return hf.AudioFlamingo3Processor(extractor, tokenizer), model


def glm_asr() -> tuple[Any, Any]:
    tokenizer = hf_processors.tokenizer_with("<|pad|>")
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    config = hf.GlmAsrConfig(
        audio_config={"model_type": "glmasr_encoder", **TOWER, "intermediate_size": 128},
        text_config=text(tokenizer, "llama"),
        audio_token_id=id_of(tokenizer, "<|pad|>"),
        tie_word_embeddings=False,
    )
    model = hf.GlmAsrForConditionalGeneration(config)
    return hf.GlmAsrProcessor(extractor, tokenizer), model


def moss_transcribe() -> tuple[Any, Any]:
    """A number for every second of audio stands among the placeholders."""
    marks = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
    tokenizer = hf_processors.tokenizer_with(*marks)
    extractor = hf.MossTranscribeDiarizeFeatureExtractor(feature_size=8, chunk_length=2)
    config = hf.MossTranscribeDiarizeConfig(
        audio_config={**TOWER, "max_source_positions": 100},
        text_config=text(tokenizer, "qwen3", head_dim=12),
        audio_token_id=id_of(tokenizer, "<|audio_pad|>"),
        audio_chunk_size=extractor.n_samples,
        tie_word_embeddings=False,
    )
    model = hf.MossTranscribeDiarizeForConditionalGeneration(config)
    processor = hf.MossTranscribeDiarizeProcessor(
        extractor, tokenizer, time_marker_every_seconds=1, audio_tokens_per_second=12
    )
    return processor, model


def qwen3_asr() -> tuple[Any, Any]:
    tokenizer = hf_processors.tokenizer_with(
        audio_token="<|audio_pad|>", audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    )  # fmt: skip
    config = hf.Qwen3ASRConfig(
        audio_config={
            "model_type": "qwen3_asr_encoder", "num_mel_bins": 8, "encoder_layers": 2,
            "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32, "output_dim": 48,
            "downsample_hidden_size": 8,
        },
        text_config=text(tokenizer, "qwen3", head_dim=12),
        audio_token_id=id_of(tokenizer, "<|audio_pad|>"), timestamp_token_id=5, pad_token_id=0,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.Qwen3ASRForConditionalGeneration(config)
    return hf.Qwen3ASRProcessor(hf.Qwen3ASRFeatureExtractor(feature_size=8), tokenizer), model


def granite_speech() -> tuple[Any, Any]:
    pytest.importorskip("torchaudio", reason="transformers' feature extractor needs it")
    tokenizer = hf_processors.tokenizer_with("<|audio|>")
    config = hf.GraniteSpeechConfig(
        encoder_config={
            "input_dim": 160, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "output_dim": 8,
            "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 5,
        },
        projector_config={
            "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 64, "encoder_hidden_size": 32,
        },
        text_config=text(tokenizer, "granite"),
        audio_token_index=id_of(tokenizer, "<|audio|>"),
        has_lora_adapter=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.GraniteSpeechForConditionalGeneration(config)
    return hf.GraniteSpeechProcessor(hf.GraniteSpeechFeatureExtractor(), tokenizer), model


def fun_asr_nano() -> tuple[Any, Any]:
    pytest.importorskip("torchaudio", reason="transformers' feature extractor needs it")
    tokenizer = hf_processors.tokenizer_with("<|object_ref_start|>")
    config = hf.FunAsrNanoConfig(
        audio_config={
            "model_type": "fun_asr_nano_encoder", **TOWER, "num_timestamp_prediction_layers": 1,
        },
        adaptor_config={
            "hidden_size": 48, "intermediate_size": 12, "num_attention_heads": 2,
            "projector_hidden_size": 64,
        },
        text_config=text(tokenizer, "qwen3", head_dim=12),
        audio_token_id=id_of(tokenizer, "<|object_ref_start|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.FunAsrNanoForConditionalGeneration(config)
    return hf.FunAsrNanoProcessor(hf.FunAsrNanoFeatureExtractor(feature_size=8), tokenizer), model


UNNAMED: Mapping[str, Family] = {
    "audio-flamingo-3": Family(
        save=saver(audio_flamingo3), place="<sound>", window_s=1.0, texts=TEXTS
    ),
    "fun-asr-nano": Family(
        save=saver(fun_asr_nano), place="<|object_ref_start|>", window_s=1.0, texts=TEXTS
    ),
    "glm-asr": Family(save=saver(glm_asr), place="<|pad|>", window_s=2.0, texts=TEXTS),
    "granite-speech": Family(
        save=saver(granite_speech, "model.encoder"), place="<|audio|>", window_s=1.0, texts=TEXTS
    ),
    "moss-transcribe": Family(
        save=saver(moss_transcribe), place="<|audio_pad|>", window_s=2.0, texts=TEXTS
    ),
    "qwen3-asr": Family(
        save=saver(qwen3_asr), place="<|audio_pad|>", window_s=1.0, texts=TEXTS[:3]
    ),
}
