"""Tiny Whisper and Moonshine models with random weights, whole on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.processors.conftest import make_tokenizer
from tests.support.tiny import draw_weights

WORDS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>",
         "<|translate|>", "<|notimestamps|>", "<|0.00|>")  # fmt: skip


def save_listener(name: str, folder: Path, tokenizer: Any) -> tuple[Any, Any]:
    """Write "whisper" or "moonshine" to `folder`; the HF model in float64 and its extractor."""
    with torch.random.fork_rng(devices=[]):
        model, extractor = (whisper if name == "whisper" else moonshine)(tokenizer)
    draw(model)
    model = model.double().eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor.save_pretrained(folder)
    processor = "WhisperProcessor" if name == "whisper" else "Wav2Vec2Processor"
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor}))
    return model, extractor


def tokenizer_for(name: str, words: tuple[str, ...] = WORDS) -> Any:
    """Bytes for letters; for Whisper with the special tokens `words`."""
    plain = make_tokenizer("bytes")
    saved = json.loads(plain.backend_tokenizer.to_str())["model"]
    if name == "moonshine":
        return plain
    vocab = {**saved["vocab"], **{word: len(saved["vocab"]) + i for i, word in enumerate(words)}}
    merges = [tuple(merge) for merge in saved["merges"]]
    tokenizer = hf.WhisperTokenizer(vocab=vocab, merges=merges)
    special = [*words[1:7], *words[len(WORDS) :]]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def whisper(tokenizer: Any) -> tuple[Any, Any]:
    """A tiny model that hears one second, and its feature extractor."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in WORDS}
    config = hf.WhisperConfig(
        vocab_size=len(tokenizer) + 3, d_model=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_source_positions=50, max_target_positions=64, num_mel_bins=16,
        pad_token_id=ids["<|endoftext|>"], bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"], decoder_start_token_id=ids["<|startoftranscript|>"],
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config)
    settings = model.generation_config
    settings.is_multilingual, settings.language, settings.task = True, "en", "transcribe"
    settings.lang_to_id = {"<|en|>": ids["<|en|>"], "<|de|>": ids["<|de|>"]}
    settings.task_to_id = {each: ids[f"<|{each}|>"] for each in ("transcribe", "translate")}
    settings.no_timestamps_token_id = ids["<|notimestamps|>"]
    settings.return_timestamps = False
    settings._from_model_config = False  # else its own words are not read back
    settings.suppress_tokens = [7, 8, 9, *(ids[word] for word in WORDS[1:6])]
    settings.begin_suppress_tokens = [20, 21, ids["<|endoftext|>"]]
    extractor = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return model, extractor


def moonshine(tokenizer: Any) -> tuple[Any, Any]:
    """A tiny model, and its feature extractor."""
    config = hf.MoonshineConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=48, intermediate_size=96,
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4, encoder_num_key_value_heads=4, decoder_num_key_value_heads=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = hf.MoonshineForConditionalGeneration(config)
    return model, hf.Wav2Vec2FeatureExtractor(do_normalize=False)


def draw(model: torch.nn.Module) -> None:
    """Wider where the decoder listens."""
    draw_weights(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "encoder_attn." in name or "encoder.conv" in name:
                weight *= 4
