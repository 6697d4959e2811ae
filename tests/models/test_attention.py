"""The seam: routing by config, slots on modules, models side by side."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from aioengine.errors import ModelLoadError
from aioengine.kernels.attention import select_backend
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder, attach_slot
from aioengine.kernels.metadata import build_cross_metadata, build_metadata
from aioengine.models.runtime.attention import (
    ATTENTION_NAME,
    Attention,
    AttentionType,
    route_attention,
)
from aioengine.models.runtime.transformers_model import TransformersModel
from tests.models.driver import Driver, Request
from tests.support.tiny import BOS, tiny_llama, tiny_llava, tiny_pixels


def test_one_function_and_no_mask_is_registered() -> None:
    assert ATTENTION_NAME in AttentionInterface._global_mapping
    assert ATTENTION_NAME not in AttentionMaskInterface._global_mapping
    assert not any(word in ATTENTION_NAME for word in ("sdpa", "flash", "flex"))


def test_only_the_decoder_is_routed() -> None:
    hf = tiny_llava()
    model = TransformersModel(hf)
    assert hf.model.language_model.config._attn_implementation == ATTENTION_NAME
    assert hf.model.vision_tower.config._attn_implementation == "sdpa"
    assert hf.config._attn_implementation == "sdpa"
    assert hf.config.text_config._attn_implementation == "sdpa"
    assert model.dtype == torch.float64
    assert model.hidden_size == 48
    assert model.vocab_size == 320
    assert model.max_position_embeddings == 1024
    assert model.device.type == "cpu"


def test_the_vision_tower_is_as_before() -> None:
    hf = tiny_llava()
    pixels = tiny_pixels(2).double()
    with torch.no_grad():
        expected = hf.get_image_features(pixels).pooler_output
        actual = TransformersModel(hf).embed_multimodal(pixel_values=pixels)
    for before, after in zip(expected, actual, strict=True):
        assert torch.equal(before, after)


def test_a_module_without_a_slot_gets_plain_attention() -> None:
    hf = tiny_llama()
    ids = torch.tensor([[BOS, 7, 8, 9]])
    mask = torch.full((4, 4), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected = hf(input_ids=ids).logits
        route_attention(hf.model)
        actual = hf(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(actual, expected)


def test_a_shared_config_is_copied_once() -> None:
    hf = tiny_llama()
    shared = hf.config
    route_attention(hf.model)
    assert hf.model.config is hf.model.layers[0].self_attn.config
    assert hf.model.config is not shared
    assert shared._attn_implementation == "sdpa"


def test_the_step_is_cleared_after_a_failure() -> None:
    model = TransformersModel(tiny_llama())
    driver = Driver(model)
    with pytest.raises(RuntimeError):
        model.forward(torch.zeros(2, 5, dtype=torch.float64), torch.arange(2), [None])  # type: ignore[list-item]
    assert model._holder.current is None
    driver.step([(Request([BOS, 5, 6]), 3)])
    assert model._holder.current is None


def test_two_models_in_two_threads_do_not_disturb_each_other() -> None:
    prompts = [[BOS, 5, 6, 7, 8, 9, 10], [BOS, 40, 41, 42]]

    def run(seed: int) -> list[Tensor]:
        model = TransformersModel(tiny_llama(seed=seed))
        requests = [Request(list(prompt)) for prompt in prompts]
        Driver(model, block_size=2 + seed).generate(requests, 24, chunk=2 + seed)
        return [request.all_logits for request in requests]

    expected = [run(seed) for seed in range(2)]
    found: dict[int, list[Tensor]] = {}
    together = threading.Barrier(2)

    def work(seed: int) -> None:
        together.wait()
        found[seed] = run(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        for alone, beside in zip(expected[seed], found[seed], strict=True):
            assert torch.equal(alone, beside)


class OwnDecoder(nn.Module):
    """One layer of attention, as a model that is defined here has it."""

    def __init__(self, kind: AttentionType) -> None:
        super().__init__()
        self.attention = Attention(4, 8, 8**-0.5, 2, attn_type=kind)


def draw_heads(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(num_tokens, 32, generator=generator, dtype=torch.float64)
    key = torch.randn(num_tokens, 16, generator=generator, dtype=torch.float64)
    return query, key, key.flip(0).contiguous()


def dense(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    heads = [x.view(x.shape[0], -1, 8).transpose(0, 1) for x in (query, key, value)]
    out = nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


def test_own_models_decode_over_pages() -> None:
    holder = StepHolder()
    layer = OwnDecoder(AttentionType.DECODER).attention
    attach_slot(layer, LayerSlot(layer=0, group=0, holder=holder))
    cache = torch.full((3, 4, 2, 8), torch.nan, dtype=torch.float64)
    caches = [(cache, cache.clone())]
    query, key, value = draw_heads(7)
    outputs = []
    for start, end in ((0, 3), (3, 6), (6, 7)):
        meta = build_metadata(block_size=4, block_tables=[[2, 0]], starts=[start], ends=[end])
        with holder.hold(StepContext([meta], caches, select_backend())):
            outputs.append(layer(query[start:end], key[start:end], value[start:end]))
    expected = dense(query, key, value, is_causal=True)
    torch.testing.assert_close(torch.cat(outputs), expected)


def test_own_encoders_see_everything() -> None:
    layer = OwnDecoder(AttentionType.ENCODER).attention
    query, key, value = draw_heads(5)
    expected = dense(query, key, value, is_causal=False)
    torch.testing.assert_close(layer(query, key, value), expected)
    batch = layer(*(x.expand(3, *x.shape).contiguous() for x in (query, key, value)))
    torch.testing.assert_close(batch, expected.expand(3, -1, -1))


def test_own_models_attend_to_what_an_encoder_made() -> None:
    """Keys and values are written by the step that has them; then nothing is given, and read."""
    holder = StepHolder()
    layer = OwnDecoder(AttentionType.ENCODER_DECODER).attention
    attach_slot(layer, LayerSlot(layer=0, group=0, holder=holder))
    cache = torch.full((3, 4, 2, 8), torch.nan, dtype=torch.float64)
    caches = [(cache, cache.clone())]
    query, key, value = draw_heads(7)
    outputs = []
    for start, end in ((0, 3), (3, 6), (6, 7)):
        is_new = start == 0
        meta = build_cross_metadata(
            block_size=4, block_tables=[[2, 0]], query_lens=[end - start], context_lens=[7],
            is_new=[is_new],
        )  # fmt: skip
        given = (key, value) if is_new else (key[:1] * torch.nan, value[:1])
        with holder.hold(StepContext([meta], caches, select_backend())):
            outputs.append(layer(query[start:end], *given))
    expected = dense(query, key, value, is_causal=False)
    torch.testing.assert_close(torch.cat(outputs), expected)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="num_kv_heads"):
        Attention(4, 8, 1.0, 3)
