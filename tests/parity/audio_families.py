"""Tiny models that hear, whole on disk, and what transformers itself makes of prompts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import torch
import transformers as hf

from tests.parity.families import MAX_TOKENS, TEXT, greedy, id_of, vocabulary
from tests.processors import hf_processors
from tests.support.tiny import draw_weights

Array = np.ndarray[Any, Any]
ToInputs = Callable[[str, Sequence[Array]], dict[str, Any]]

RATE = 16_000


def sound(seed: int, seconds: float, rate: int = RATE) -> Array:
    """A few tones that come and go, float32 [samples]: no other seed gives them."""
    generator = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    tones = [
        np.sin(2 * np.pi * generator.uniform(80, 3000) * times + generator.uniform(0, 6))
        * (np.sin(2 * np.pi * generator.uniform(0.5, 4) * times) > 0)
        for _ in range(4)
    ]
    noise = generator.normal(0, 0.02, len(times))
    return (sum(tones) * 0.2 + noise).astype(np.float32)


def wav(samples: Array, rate: int = RATE) -> bytes:
    """A WAV file's bytes, nothing lost."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def resampled(samples: Array, rate: int) -> Array:
    """At the models' rate, as many as the length in seconds makes, rounded up."""
    whole = soxr.ResampleStream(rate, RATE, 1, dtype="float32", quality="HQ")
    silence = np.zeros(rate // RATE + 2, np.float32)
    made = whole.resample_chunk(np.concatenate([samples, silence]), last=True)
    return np.asarray(made[: -(-len(samples) * RATE // rate)])


@dataclass(frozen=True)
class Case:
    """A prompt, its media by the engine's keywords, and the tokens of transformers."""

    text: str
    media: dict[str, tuple[Any, ...]]
    expected: tuple[int, ...]

    def check(self, token_ids: Sequence[int]) -> None:
        """Assert that these are the tokens that transformers has found."""
        assert len(token_ids) == MAX_TOKENS or 2 in token_ids
        assert tuple(token_ids[: len(self.expected)]) == self.expected, self.text


def finish(
    model: Any, folder: Path, dtype: torch.dtype = torch.float64, tower: str = "audio_tower"
) -> Any:
    """Weights drawn wide, those that hear wider still, written to the folder; returns the model."""
    draw_weights(model)
    # Where the tower hangs depends on the family and on the version of transformers.
    (hears,) = (each for name, each in model.named_modules() if name.endswith(tower))
    draw_weights(hears, seed=1, std=0.4)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model = model.to(dtype).eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return model


def qwen2_audio_processor() -> Any:
    tokenizer = hf_processors.tokenizer_with(
        "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", audio_token="<|AUDIO|>"
    )
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return hf.Qwen2AudioProcessor(extractor, tokenizer)


def save_qwen2_audio(folder: Path) -> tuple[Any, ToInputs]:
    """With windows of a second."""
    processor = qwen2_audio_processor()
    config = hf.Qwen2AudioConfig(
        audio_config=hf.Qwen2AudioEncoderConfig(
            num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
            d_model=32, max_source_positions=50,
        ),
        text_config=hf.Qwen2Config(vocab_size=vocabulary(processor.tokenizer), **TEXT),
        audio_token_index=id_of(processor.tokenizer, "<|AUDIO|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = hf.Qwen2AudioForConditionalGeneration(config)
    model = finish(model, folder)
    processor.save_pretrained(folder)

    def to_inputs(text: str, sounds: Sequence[Array]) -> dict[str, Any]:
        media = {"audio": list(sounds), "sampling_rate": RATE} if sounds else {}
        return dict(processor(text=text, **media, return_tensors="pt"))

    return model, to_inputs


def write_tekken(path: Path, more: Mapping[int, str] | None = None, **sections: Any) -> None:
    """A tokenizer file of Mistral's kind: bytes, a few words, and the special tokens by rank.

    `more`: further special tokens; `sections`: what else is in it.
    """
    named = {
        0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 11: "<pad>",
        17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]",
        34: "[TRANSCRIBE]", **(more or {}),
    }  # fmt: skip
    special = [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(40)]
    words = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b"au", b"so", b" w", b" the"]
    settings = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(special) + len(words),
        "default_num_special_tokens": len(special),
        "version": "v7",
    }
    content = {
        "config": settings,
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(special)
        ],
        **sections,
    }
    path.write_text(json.dumps(content))


def save_voxtral(folder: Path) -> tuple[Any, ToInputs]:
    """As it is on the hub, with mistral_common's file only, and chunks of half a second."""
    write_tekken(folder / "tekken.json")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    config = hf.VoxtralConfig(
        audio_config=hf.VoxtralEncoderConfig(
            num_mel_bins=8, hidden_size=16, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_source_positions=28, vocab_size=8,
        ),
        text_config=hf.LlamaConfig(vocab_size=vocabulary(tokenizer), **TEXT),
        audio_token_id=24,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = hf.VoxtralForConditionalGeneration(config)
    model = finish(model, folder)
    extractor = hf.WhisperFeatureExtractor(feature_size=8)
    extractor.save_pretrained(folder)

    def to_inputs(text: str, sounds: Sequence[Array]) -> dict[str, Any]:
        """What transformers' processor does with mistral_common's help."""
        head, *pieces = text.split("[AUDIO]")
        token_ids = tokenizer.encode(head, add_special_tokens=False)
        features = []
        for samples, piece in zip(sounds, pieces, strict=True):
            padded = np.pad(samples, (0, -len(samples) % (56 * 160)))
            outputs = extractor(
                padded, sampling_rate=RATE, padding=True, truncation=False, return_tensors="pt"
            )
            features.append(outputs["input_features"].reshape(8, -1, 56).transpose(0, 1))
            token_ids += [25, *[24] * (7 * len(features[-1]))]
            token_ids += tokenizer.encode(piece, add_special_tokens=False)
        inputs = {"input_ids": torch.tensor([token_ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs | ({"input_features": torch.cat(features)} if features else {})

    return model, to_inputs


@dataclass(frozen=True, kw_only=True)
class Family:
    """`save(folder)`: the HF model, and its inputs for a text and the sounds in it.

    `place`: what stands for a sound in a text; `window_s`: what the tower hears at once.
    """

    save: Callable[[Path], tuple[Any, ToInputs]]
    place: str
    window_s: float
    texts: Sequence[str]


FAMILIES: Mapping[str, Family] = {
    "qwen2-audio": Family(
        save=save_qwen2_audio,
        place="<|audio_bos|><|AUDIO|><|audio_eos|>",
        window_s=1.0,
        texts=(
            "Audio: *\nWhat is it? ASSISTANT:",
            "Audio: *\nWhat is it? ASSISTANT:",
            "*",
            "First * then * now compare.",
            "** same?",
            "no sound here, tell a story",
        ),
    ),
    "voxtral": Family(
        save=save_voxtral,
        place="[AUDIO]",
        window_s=0.56,
        texts=(
            "<s>[INST]*the sound?[/INST]",
            "<s>[INST]*the sound?[/INST]",
            "<s>[INST]*[/INST]lang:en[TRANSCRIBE]",
            "<s>[INST]First * then *[/INST]",
            "<s>[INST]**[/INST]",
            "<s>[INST]no sound here[/INST]",
        ),
    ),
}


def cases(family: Family, model: Any, to_inputs: ToInputs) -> tuple[Case, ...]:
    """Prompts with one, two and no sounds: shorter than a window, as long as one, and longer."""
    a, b, c = (sound(i, family.window_s * part) for i, part in enumerate((0.4, 1, 2.7)))
    sounds = {0: iter([()]), 1: iter([(a,), (b,), (c,)]), 2: iter([(a, b), (c, c)])}
    found = []
    for text in family.texts:
        given = next(sounds[text.count("*")])
        text = text.replace("*", family.place)
        audios = tuple((samples, RATE) for samples in given)
        found.append(Case(text, {"audios": audios}, greedy(model, to_inputs(text, given))))
    return tuple(found)
