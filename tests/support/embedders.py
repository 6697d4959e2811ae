"""Tiny models that embed and score, whole on disk, as transformers and sentence-transformers write
them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import PAD, draw_weights, tiny_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
}
QWEN3: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 12}


def save_model(folder: Path, name: str, config: Any, tokenizer: Any = None) -> Any:
    """Write a model of transformers' class `name` to a folder; returns it in float64."""
    config.architectures = [name]
    with torch.random.fork_rng(devices=[]):
        model = getattr(hf, name)(config)
    draw_weights(model)
    model = model.to(torch.float64).eval().requires_grad_(False)
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return model


def save_modules(folder: Path, kinds: Sequence[str], **pooling: Any) -> None:
    """Write what sentence-transformers does beside a model: its modules, and how it pools."""
    modules = [
        {"idx": index, "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules:
        if "Pooling" in str(module["path"]):
            (folder / str(module["path"])).mkdir()
            (folder / f"{module['path']}/config.json").write_text(json.dumps(pooling))


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that marks pairs of texts as BERT's does, with types of tokens."""
    backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", cls_token="<s>", sep_token="</s>"
    )


def states(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """transformers' last hidden states [tokens, width] of one prompt."""
    with torch.inference_mode():
        found = model.base_model(torch.tensor([token_ids])).last_hidden_state[0]
    return np.asarray(found.numpy())


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of two vectors, in float64."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
