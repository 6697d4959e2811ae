"""A last layer whose feed-forward module computes the rows alone that are read of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from aioengine.kernels.layer_slot import attach_slot, slot_of
from aioengine.kernels.reference import ReferenceBackend
from aioengine.models.fusion.fused_mlp import cut_last_layer
from tests.models.fusion.test_decoder_plan import LAYERS, Steps, routed

DTYPES = [torch.float64, torch.float32]


def llama(dtype: torch.dtype) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return routed(LlamaConfig(**sizes, **heads, vocab_size=64, pad_token_id=0), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[2, 4], [4], []], ids=str)
def test_rows_that_are_read(rows: list[int], dtype: torch.dtype) -> None:
    model = llama(dtype)
    plain = copy.deepcopy(model)
    assert cut_last_layer(model) == 1
    steps = [Steps(each, dtype, backend=ReferenceBackend()) for each in (model, plain)]
    counted: list[int] = []
    inner = model.layers[-1].mlp.down_proj
    inner.register_forward_pre_hook(lambda _, args: counted.append(args[0].shape[1]))
    whole = [each.modules() for each in steps]
    assert torch.equal(*whole) and counted == [8, 5]
    del counted[:]
    steps[0].wanted = torch.tensor(rows, dtype=torch.int64)
    found = steps[0].modules()
    assert counted == ([len(rows)] * 2 if rows else [])
    for first in (0, 8):
        places = [first + row for row in rows]
        torch.testing.assert_close(found[places], whole[1][places])


class Mixed(nn.Module):
    """A feed-forward module of which each row knows the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x).cumsum(1)
        return found


def mixes_rows(model: Any) -> None:
    model.layers[-1].mlp = Mixed()


def comes_first(model: Any) -> None:
    """Keys depend on what the module gives."""
    layer = model.layers[-1]

    def forward(self: Any, x: Tensor, position_embeddings: Any = None, **named: Any) -> Tensor:
        x = x + self.mlp(x)
        found: Tensor = self.self_attn(x, position_embeddings, None)[0]
        return x + found

    layer.__class__ = type("First", (type(layer),), {"forward": forward})


def is_called_twice(model: Any) -> None:
    model.layers[0].mlp = model.layers[-1].mlp


def has_attention_behind_it(model: Any) -> None:
    slot: Any = slot_of(model.layers[-1].self_attn)
    attach_slot(model.layers[-1].self_attn, type(slot)(slot.layer, slot.group, slot.holder))


def has_a_listener(model: Any) -> None:
    model.layers[-1].mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change", [mixes_rows, comes_first, is_called_twice, has_attention_behind_it, has_a_listener]
)
def test_layers_that_compute_all(change: Callable[[Any], None]) -> None:
    model = llama(torch.float64)
    change(model)
    kind = type(model.layers[-1].mlp)
    slots = [slot_of(each.self_attn) for each in model.layers]
    assert cut_last_layer(model) == 0
    assert type(model.layers[-1].mlp) is kind
    assert [slot_of(each.self_attn) for each in model.layers] == slots
