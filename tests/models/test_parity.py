"""A flattened, chunked, paged batch against transformers, one request at a time, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.text import TextModel
from tests.models.driver import Driver, Request
from tests.support.tiny import (
    BOS,
    EOS,
    IMAGE,
    NUM_IMAGE_TOKENS,
    VOCAB_SIZE,
    draw_weights,
    tiny_llama,
    tiny_llava,
    tiny_pixels,
)

IMAGE_TOKENS = [IMAGE] * NUM_IMAGE_TOKENS
PROMPTS = [
    [BOS, 20, 30, *IMAGE_TOKENS, 40, 50, 60, 70, 80],
    [BOS, 90, 91, 92, 93],
    [BOS, *IMAGE_TOKENS, 33, *IMAGE_TOKENS, 44],
    [BOS, 99, 98, 97, 96, 95, 94, *IMAGE_TOKENS, 11],
]
NUM_TOKENS = 12


class Llava(TransformersModel):
    """As the family file has it, without its processor."""


def prepare(model: Any) -> tuple[list[Request], list[Tensor | None]]:
    """The requests, and the pixels of each: request i's images are its own."""
    requests, pixels = [], []
    for i, prompt in enumerate(PROMPTS):
        count = prompt.count(IMAGE) // NUM_IMAGE_TOKENS
        pixels.append(tiny_pixels(count, seed=i).to(model.dtype) if count else None)
        requests.append(Request(list(prompt)))
    return requests, pixels


def reference_tokens(model: Any, prompt: list[int], pixels: Tensor | None) -> list[int]:
    """transformers' own greedy tokens. The end of sequence is a token like any other here."""
    ids = torch.tensor([prompt])
    media = {} if pixels is None else {"pixel_values": pixels}
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=None,
        eos_token_id=VOCAB_SIZE + 1,
        **media,
    )
    tokens: list[int] = out[0].tolist()
    return tokens


def encode_all(model: TransformersModel, requests: list[Request], pixels: list[Any]) -> None:
    """All requests' images through the encoder in one call."""
    items = [{"pixel_values": p} for batch in pixels if batch is not None for p in batch]
    with torch.inference_mode():
        rows = iter(model.encode("image", items))
    for request, batch in zip(requests, pixels, strict=True):
        request.rows = [next(rows) for _ in range(0 if batch is None else len(batch))]


@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_llava(tower: str, num_kv_heads: int, backend: str) -> None:
    hf = tiny_llava(tower=tower, num_key_value_heads=num_kv_heads)
    requests, pixels = prepare(hf)
    expected = [reference_tokens(hf, p, x) for p, x in zip(PROMPTS, pixels, strict=True)]
    with torch.no_grad():
        dense = [
            hf(input_ids=torch.tensor([tokens[:-1]]), pixel_values=x).logits[0]
            for tokens, x in zip(expected, pixels, strict=True)
        ]

    model = Llava(hf)
    encode_all(model, requests, pixels)
    # Chunks of 7 to 10 tokens end inside every image, and prompts end at different steps.
    Driver(model, backend=backend).generate(requests, NUM_TOKENS, chunk=7)
    assert len({tuple(tokens[-NUM_TOKENS:]) for tokens in expected}) == len(expected)
    for request, tokens, logits in zip(requests, expected, dense, strict=True):
        assert request.tokens == tokens
        torch.testing.assert_close(request.all_logits, logits, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_chunks_change_nothing(chunk: int) -> None:
    hf = tiny_llava()
    model = Llava(hf)
    alone, pixels = prepare(hf)
    encode_all(model, alone, pixels)
    together = [Request(list(r.tokens), r.rows) for r in alone]
    for request in alone:
        Driver(model).generate([request], NUM_TOKENS, chunk=1000)
    Driver(model, seed=1).generate(together, NUM_TOKENS, chunk=chunk)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.all_logits, other.all_logits, atol=1e-9, rtol=1e-9)


def test_float32_is_close() -> None:
    hf = tiny_llava(torch.float32)
    requests, pixels = prepare(hf)
    with torch.no_grad():
        dense = [
            hf(input_ids=torch.tensor([p]), pixel_values=x).logits[0]
            for p, x in zip(PROMPTS, pixels, strict=True)
        ]
    model = Llava(hf)
    encode_all(model, requests, pixels)
    Driver(model).step([(r, len(r.tokens)) for r in requests])
    for request, logits in zip(requests, dense, strict=True):
        tolerance = 1e-4 * max(1.0, float(logits.abs().max()))
        torch.testing.assert_close(request.all_logits, logits, atol=tolerance, rtol=0)
        assert request.all_logits.dtype == torch.float32


COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def text_models() -> dict[str, Any]:
    """Families whose decoders differ in what they pass to attention."""
    with torch.random.fork_rng(devices=[]):
        return {
            "llama": tiny_llama(),
            "mistral": MistralForCausalLM(MistralConfig(**COMMON, sliding_window=5)),
            "qwen2": Qwen2ForCausalLM(
                Qwen2Config(
                    **COMMON, use_sliding_window=True, sliding_window=4, max_window_layers=1
                )
            ),
            "qwen3": Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=12)),
            "gemma2": Gemma2ForCausalLM(
                Gemma2Config(**COMMON, head_dim=12, sliding_window=4, query_pre_attn_scalar=10)
            ),
            "phi3": Phi3ForCausalLM(Phi3Config(**COMMON)),
        }


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"])
def test_text_models(name: str) -> None:
    hf = text_models()[name]
    draw_weights(hf)
    # Soft capping exists in transformers' eager attention only, whose softmax runs in float32.
    is_eager = name == "gemma2"
    hf.set_attn_implementation("eager" if is_eager else "sdpa")
    tolerance = 1e-5 if is_eager else 1e-9
    hf = hf.double().eval()
    hf.config.architectures = [type(hf).__name__]
    prompts = [[BOS, 5, 6, 7, 8, 9, 10, 11, 12, 13], [BOS, 100, 101], [BOS, 50, 51, 52, 53, 54]]
    expected = [reference_tokens(hf, prompt, None) for prompt in prompts]
    with torch.no_grad():
        dense = [hf(input_ids=torch.tensor([tokens[:-1]])).logits[0] for tokens in expected]
    requests = [Request(list(prompt)) for prompt in prompts]
    Driver(TextModel(hf)).generate(requests, NUM_TOKENS, chunk=4)
    for request, tokens, logits in zip(requests, expected, dense, strict=True):
        assert request.tokens == tokens
        torch.testing.assert_close(request.all_logits, logits, atol=tolerance, rtol=tolerance)
