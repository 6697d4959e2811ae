"""Pages of latents: what is attended to over them is what all heads' keys and values would give."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from aioengine.kernels.attention import AttentionArgs, AttentionBackend, select_backend
from aioengine.kernels.layer_slot import (
    LayerSlot,
    StepContext,
    StepHolder,
    attach_slot,
    slot_of,
)
from aioengine.kernels.pool import BYTES
from aioengine.kernels.reference import ReferenceBackend
from aioengine.models.fusion.packed_linear import pack_layers
from aioengine.models.latent import layers as latent_layers
from aioengine.models.latent.layers import LatentSizes, LatentSlot, attach_latents, expand
from aioengine.models.runtime.probe import group_layers
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.types import KVGroup
from tests.kernels.paging import PagedBatch, make_batch

SIZES = LatentSizes(heads=4, latent=48, turned=16, still=32, value=24)
ARGS = AttentionArgs(scale=0.3)
DECODES = [(8, 9), (0, 1), (70, 71)]
FIRST = [(0, 7), (0, 130)]
LATER = [(64, 91), (100, 103), (3, 80)]
STEPS = {
    "decodes": DECODES,
    "first chunks": FIRST,
    "later chunks": LATER,
    "all": [*DECODES, *FIRST, *LATER, (5, 6)],
}
BACKENDS = ("reference", "gather", "cpu")


def config(**others: int) -> hf.DeepseekV3Config:
    found = hf.DeepseekV3Config(
        hidden_size=64, num_attention_heads=SIZES.heads, num_key_value_heads=SIZES.heads,
        num_hidden_layers=2, q_lora_rank=None, kv_lora_rank=SIZES.latent,
        qk_rope_head_dim=SIZES.turned, qk_nope_head_dim=SIZES.still, v_head_dim=SIZES.value,
        first_k_dense_replace=8, intermediate_size=32, vocab_size=50, **others,
    )  # fmt: skip
    found.architectures = ["DeepseekV3ForCausalLM"]
    return found


def layer(dtype: torch.dtype) -> DeepseekV3Attention:
    torch.manual_seed(0)
    return DeepseekV3Attention(config(), 0).to(dtype).eval()


def latents(
    backend: AttentionBackend, chunks: Sequence[tuple[int, int]], **how: object
) -> PagedBatch:
    """Pages of one head's rows; its values are nobody's."""
    width = SIZES.latent + SIZES.turned
    return make_batch(
        chunks, backend=backend, num_heads=SIZES.heads, num_kv_heads=1, key_dim=width,
        value_dim=1, **how,
    )  # fmt: skip


def attend(
    module: nn.Module,
    backend: AttentionBackend,
    batch: PagedBatch,
    query: Tensor,
    args: AttentionArgs,
) -> Tensor:
    """The step's tokens through the slot, which writes their latents again."""
    holder = StepHolder()
    attach_latents(module, LayerSlot(0, 0, holder), SIZES)
    slot = slot_of(module)
    assert isinstance(slot, LatentSlot)
    pairs = zip(batch.keys, batch.meta.query_lens, strict=True)
    new = torch.cat([rows[len(rows) - count :] for rows, count in pairs])
    if batch.key_cache.dtype is not BYTES:
        places = batch.meta.slot_blocks.long(), batch.meta.slot_offsets.long()
        batch.key_cache[places] = torch.nan
    key, value = slot.hand_on(
        *new.transpose(0, 1)[None].split([SIZES.latent, SIZES.turned], dim=-1)
    )
    caches = [(batch.key_cache, batch.value_cache[..., :0])]
    with holder.hold(StepContext([batch.meta], caches, backend)), torch.inference_mode():
        return slot.attend(query, key[0].transpose(0, 1), value[0].transpose(0, 1), args)


def attend_to_heads(
    module: nn.Module, batch: PagedBatch, query: Tensor, args: AttentionArgs
) -> Tensor:
    """The same over keys and values of all heads, in float64."""
    found = []
    for index, rows in enumerate(batch.keys):
        with torch.no_grad():
            key, value = (each[0].transpose(0, 1) for each in expand(module, *split(rows.double())))
        count = batch.meta.query_lens[index]
        single = make_batch(
            [(len(rows) - count, len(rows))], backend=ReferenceBackend(), num_heads=SIZES.heads,
            num_kv_heads=SIZES.heads, key_dim=key.shape[-1], value_dim=SIZES.value,
        )  # fmt: skip
        table = single.meta.block_table[0].long()
        places = torch.arange(len(rows))
        single.key_cache[table[places // 4], places % 4] = key
        single.value_cache[table[places // 4], places % 4] = value
        first = sum(batch.meta.query_lens[:index])
        pages = single.key_cache, single.value_cache
        chunk = query[first : first + count].double()
        found.append(ReferenceBackend().attend(chunk, pages, single.meta, args))
    return torch.cat(found)


def split(rows: Tensor) -> list[Tensor]:
    """Rows [T, 1, ...] as a module has them: latents and turned keys [1, 1, T, ...]."""
    return [*rows.transpose(0, 1)[None].split([SIZES.latent, SIZES.turned], dim=-1)]


def queries(batch: PagedBatch, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(1)
    width = SIZES.still + SIZES.turned
    return torch.randn(batch.meta.num_tokens, SIZES.heads, width, dtype=torch.float64).to(dtype)


def largest(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("way", ["chosen", "latents", "heads"])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
def test_latents_give_what_heads_give(
    step: str, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "chosen":
        monkeypatch.setattr(latent_layers, "_pays", lambda *_: way == "heads")
    backend = select_backend(name)
    module = layer(torch.float64)
    for args in (ARGS, ARGS._replace(window=20), ARGS._replace(softcap=1.5)):
        batch = latents(backend, STEPS[step])
        query = queries(batch, torch.float64)
        found = attend(module, backend, batch, query, args)
        assert largest(found, attend_to_heads(module, batch, query, args)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BACKENDS)
def test_in_few_bits_and_packed(name: str, dtype: torch.dtype) -> None:
    backend = select_backend(name)
    batch = latents(backend, STEPS["all"], dtype=dtype)
    query = queries(batch, dtype)
    module = layer(dtype)
    wanted = attend_to_heads(layer(dtype).double(), batch, query, ARGS)
    pack_layers(module)
    found = attend(module, backend, batch, query, ARGS)
    assert largest(found, wanted) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", BACKENDS)
def test_pages_in_8_bits(name: str) -> None:
    backend = select_backend(name)
    batch = latents(backend, STEPS["all"], dtype=torch.float32, in_bytes=True)
    query = queries(batch, torch.float32)
    module = layer(torch.float32)
    found = attend(module, backend, batch, query, ARGS)
    assert largest(found, attend_to_heads(layer(torch.float64), batch, query, ARGS)) < 0.02


@pytest.mark.parametrize("count", [1, 13, 30, 64, 65])
def test_matmuls_of_some_heads_at_a_time(count: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(count, 5, 16), torch.randn(5, 32, 16)
    found = latent_layers._HeadLinear(weight)(x)
    assert largest(found, torch.einsum("thi,hoi->tho", x.double(), weight.double())) < 1e-6


def test_a_page_holds_what_all_heads_have_in_common() -> None:
    published = hf.DeepseekV3Config()
    published.architectures = ["DeepseekV3ForCausalLM"]
    groups, _ = group_layers(TransformersModel.probe(published))
    assert groups == (KVGroup("self", 1, 576, 0, None, 61),)
    assert groups[0].block_bytes(1, lambda dim: 2 * dim) == 61 * 1152


def test_a_module_keeps_its_own_way_without_the_slot() -> None:
    module = layer(torch.float64)
    rows = torch.randn(1, 1, 3, SIZES.latent + SIZES.turned, dtype=torch.float64)
    parts = rows.split([SIZES.latent, SIZES.turned], dim=-1)
    wanted = expand(module, *parts)
    attach_latents(module, LayerSlot(0, 0, StepHolder()), SIZES)
    assert module.expand_kv(*parts)[0].shape == rows.shape
    attach_slot(module, None)
    assert all(map(torch.equal, module.expand_kv(*parts), wanted))


def _turned_first(self: nn.Module, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    key, value = _plain(self, latent, turned)
    return key.roll(SIZES.turned, dims=-1), value


def _not_linear(self: nn.Module, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    key, value = _plain(self, latent, turned)
    return key, value.tanh()


def _of_other_heads(self: nn.Module, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    key, value = _plain(self, latent, turned)
    return key.flip(1), value


_plain = DeepseekV3Attention.expand_kv


@pytest.mark.parametrize("other", [_turned_first, _not_linear, _of_other_heads])
def test_what_is_expanded_otherwise_stays_so(
    other: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", other)
    with caplog.at_level(logging.INFO, logger="aioengine"):
        specs = TransformersModel.probe(config())
    assert [each.latent for each in specs] == [None, None]
    width = SIZES.still + SIZES.turned
    assert group_layers(specs)[0] == (KVGroup("self", 4, width, SIZES.value, None, 2),)
    assert caplog.text.count("all heads of DeepseekV3Attention") == 1


def test_what_is_changed_on_its_way_stays_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = DeepseekV3Attention.forward.__globals__["ALL_ATTENTION_FUNCTIONS"]
    found = attended.get_interface

    def get_interface(*names: object) -> object:
        function = found(*names)
        return lambda module, query, key, *others, **more: function(
            module, query, key * 2, *others, **more
        )

    monkeypatch.setattr(attended, "get_interface", get_interface)
    assert [each.latent for each in TransformersModel.probe(config())] == [None, None]
