"""Embeddings and scores are those of transformers, alone, in company and however cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine
from tests.parity import families
from tests.support.embedders import QWEN3, SIZES, cosine, pair_tokenizer, save_model, states
from tests.support.engines import running_engine

POOL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "last": lambda rows: rows[-1],
    "mean": lambda rows: rows.mean(0),
    "cls": lambda rows: rows[0],
}
PROMPTS = [[*range(first, first + length)] for first, length in ((5, 40), (7, 1), (9, 16), (4, 33))]
LLAMA = {**SIZES, "num_key_value_heads": 2}
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CAUSAL = {
    "Qwen3ForCausalLM": hf.Qwen3Config(**QWEN3),
    "Qwen3Model": hf.Qwen3Config(**QWEN3),
    "LlamaForCausalLM": hf.LlamaConfig(**LLAMA),
    "LlamaModel": hf.LlamaConfig(**LLAMA),
}
BERT = {
    "BertModel": hf.BertConfig(**SIZES),
    "BertForMaskedLM": hf.BertConfig(**SIZES),
    "XLMRobertaModel": hf.XLMRobertaConfig(**SIZES, type_vocab_size=1),
    "DistilBertModel": hf.DistilBertConfig(
        dim=48, hidden_dim=96, n_layers=2, n_heads=4, vocab_size=320, max_position_embeddings=1024
    ),
}
WINDOWS = {
    "ModernBertModel": hf.ModernBertConfig(**SIZES, **MARKS, local_attention=8),
    "ModernBertForMaskedLM": hf.ModernBertConfig(**SIZES, **MARKS, local_attention=8),
    "Gemma3TextModel": hf.Gemma3TextConfig(
        **QWEN3, sliding_window=9, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip
HEADS = {
    "Qwen3ForSequenceClassification": hf.Qwen3Config(**QWEN3, num_labels=1),
    "BertForSequenceClassification": hf.BertConfig(**SIZES, num_labels=1),
    "ModernBertForSequenceClassification": hf.ModernBertConfig(
        **SIZES, **MARKS, local_attention=8, classifier_pooling="mean", num_labels=1
    ),
    "XLMRobertaForSequenceClassification": hf.XLMRobertaConfig(
        **SIZES, type_vocab_size=1, num_labels=1
    ),
}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


async def check(engine: AsyncEngine, model: Any, kind: str, tolerance: float) -> None:
    """Each alone, then all at once: transformers' vectors, and the same ones."""

    async def embed(token_ids: list[int]) -> np.ndarray:
        return await engine.embed(token_ids, pooling=kind, normalize=False)

    alone = [await embed(token_ids) for token_ids in PROMPTS]
    await engine.reset_caches()
    together = await asyncio.gather(*map(embed, PROMPTS))
    for token_ids, one, other in zip(PROMPTS, alone, together, strict=True):
        expected = POOL[kind](states(model, token_ids))
        assert one.dtype == np.float32 and one.shape == expected.shape
        assert cosine(one, expected) >= 1 - 1e-5
        assert np.abs(one - other).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("budget", [5, 13, 2048])
@pytest.mark.parametrize("name", CAUSAL)
async def test_decoders_embed_as_transformers_does(name: str, budget: int, tmp_path: Path) -> None:
    model = save_model(tmp_path, name, CAUSAL[name])
    options = {"max_num_batched_tokens": budget, "block_size": 4}
    async with running_engine(tmp_path, **options) as engine:
        for kind in ("last", "mean"):
            await check(engine, model, kind, 0)


@pytest.mark.parametrize("name", ["Qwen3Model", "LlamaForCausalLM"])
async def test_company_changes_no_more_than_rounding_does(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, name, CAUSAL[name])
    options = {"max_num_batched_tokens": 13, "block_size": 4, "dtype": "float32"}
    async with running_engine(tmp_path, **options) as engine:
        for kind in ("last", "mean"):
            await check(engine, model, kind, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*BERT, *WINDOWS])
async def test_encoders_embed_as_transformers_does(name: str, dtype: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, name, {**BERT, **WINDOWS}[name])
    async with running_engine(
        tmp_path, max_model_len=128, max_num_batched_tokens=128, dtype=dtype
    ) as engine:
        for kind in POOL:
            await check(engine, model, kind, 0 if dtype == "float64" else 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", HEADS)
async def test_heads_score_pairs_as_transformers_does(
    name: str, dtype: str, tmp_path: Path
) -> None:
    tokenizer = pair_tokenizer()
    model = save_model(tmp_path, name, HEADS[name], tokenizer)
    query, documents = "a red circle?", ["There is a red circle.", "no", "The dog is lazy; the fox"]
    expected = []
    for document in documents:
        pair = tokenizer(query, document, return_token_type_ids=True, return_tensors="pt")
        assert pair["token_type_ids"].max() == 1
        if getattr(model.config, "type_vocab_size", 1) == 1:
            del pair["token_type_ids"]
        with torch.inference_mode():
            expected.append(float(model(**pair).logits[0, 0]))
    async with running_engine(tmp_path, max_model_len=128, dtype=dtype) as engine:
        found = await engine.score(query, documents)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert len(set(found)) == 3
        assert await engine.score(query, documents[1:]) == pytest.approx(found[1:], abs=1e-5)
        assert await engine.score(query, []) == []


@pytest.mark.parametrize("budget", [13, 2048])
@pytest.mark.parametrize("is_backbone", [False, True], ids=["with a head", "backbone"])
async def test_prompts_with_images_embed_as_transformers_does(
    is_backbone: bool, budget: int, tmp_path: Path
) -> None:
    family = families.FAMILIES["qwen3-vl"]
    model = families.save(family, tmp_path)
    processor = family.processor()
    if is_backbone:
        families.save_folder(model.model, processor, tmp_path)
    texts = [f"Describe {PLACE} in a word", f"{PLACE} or {PLACE}?", "No image at all"]
    images = [families.tiny_image(seed).resize(size) for seed, size in enumerate(family.sizes)]
    given = [images[:1], images[1:3], []]
    async with running_engine(tmp_path, max_num_batched_tokens=budget, block_size=4) as engine:
        for kind in ("last", "mean"):
            found = await asyncio.gather(
                *(
                    engine.embed(text, images=media, pooling=kind, normalize=False)
                    for text, media in zip(texts, given, strict=True)
                )
            )
            for text, media, vector in zip(texts, given, found, strict=True):
                inputs = processor(text=text, images=media or None, return_tensors="pt")
                with torch.inference_mode():
                    rows = model.model(**inputs).last_hidden_state[0].numpy()
                assert cosine(vector, POOL[kind](rows)) >= 1 - 1e-5, text
