"""Layers that share one product hand out what each would have computed, however they are called."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.clip.modeling_clip import CLIPMLP, CLIPAttention
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

from aioengine.models.fusion.layer_names import LayerNames, layer_names_of
from aioengine.models.fusion.packed_linear import Merged, PackedPart, joined, pack_layers

SIZES = (12, 4, 6)


class Plain:
    """Counts how often it multiplies."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.weight, self.bias = joined(layers)
        self.nbytes = self.weight.nbytes
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.nn.functional.linear(x, self.weight, self.bias)


def make(seed: int = 0) -> tuple[list[nn.Linear], Plain, Merged]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The second has no bias, as keys often have none.
        layers = [
            nn.Linear(8, size, bias=i != 1).requires_grad_(False) for i, size in enumerate(SIZES)
        ]
    plain = Plain(layers)
    return layers, plain, Merged(plain, SIZES)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_order_of_calls(calls: list[tuple[int, int]], inference: bool) -> None:
    layers, _, merged = make()
    with torch.inference_mode(inference):
        inputs = [torch.randn(1, rows, 8) for rows in (1, 3, 3)]
        for index, which in calls:
            found = merged.part(index, inputs[which])
            torch.testing.assert_close(found, layers[index](inputs[which]), atol=1e-6, rtol=1e-6)
            assert found.is_contiguous()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_one_product_for_all(order: tuple[int, ...]) -> None:
    _, plain, merged = make()
    x = torch.randn(3, 8)
    for round_ in (1, 2):
        for index in order:
            merged.part(index, x)
        assert plain.count == round_
    for index in order:
        merged.part(index, x.clone())
    assert plain.count == 2 + len(order)


def test_an_input_that_has_changed_is_computed_again() -> None:
    """In place, between two rounds of calls: each output is handed out once."""
    layers, _, merged = make()
    x = torch.randn(3, 8)
    for _ in range(3):
        for index in range(3):
            torch.testing.assert_close(merged.part(index, x), layers[index](x), atol=1e-6, rtol=0)
        x.mul_(2)


@pytest.mark.parametrize("num_called", [1, 2, 3])
def test_nothing_is_kept(num_called: int) -> None:
    """Neither the input, nor, once that is gone, an output that nobody has asked for."""
    _, plain, merged = make()
    x = torch.randn(3, 8)
    gone = weakref.ref(x)
    for index in range(num_called):
        merged.part(index, x)
    assert (merged._last is None) == (num_called == 3)
    del x
    gc.collect()
    assert gone() is None and merged._last is None
    assert plain.count == 1


def test_two_threads_with_a_model_each() -> None:
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        layers, _, merged = make(seed)
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(200):
                x = torch.randn(2, 8, generator=generator)
                for index in (1, 0, 2):
                    wanted = layers[index](x)
                    torch.testing.assert_close(merged.part(index, x), wanted, atol=1e-6, rtol=0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        (LlamaAttention, [["q_proj", "k_proj", "v_proj"]]),
        (LlamaMLP, [["gate_proj", "up_proj"]]),
        (CLIPAttention, [["q_proj", "k_proj", "v_proj"]]),
        (CLIPMLP, []),
        # Keys may come from elsewhere, or not be computed at all.
        (BartAttention, [["k_proj", "v_proj"]]),
        (Gemma3nTextAttention, [["k_proj", "v_proj"]]),
        (T5DenseGatedActDense, [["wi_0", "wi_1"]]),
    ],
)
def test_what_is_found_in_transformers(kind: type[nn.Module], groups: list[list[str]]) -> None:
    shell = kind.__new__(kind)
    nn.Module.__init__(shell)
    for name in re.findall(r"self\.(\w+) = nn\.Linear", inspect.getsource(kind)):
        shell.add_module(name, nn.Identity())
    assert [list(names) for names in layer_names_of(shell).merged] == groups


class Elsewhere(nn.Module):
    """Has the names of an attention, and gives each layer another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return self.q_proj(x) + self.k_proj(y) * self.v_proj(y) + self.v_proj(x)


@torch.inference_mode()
def test_names_that_say_too_much() -> None:
    model = nn.Sequential(Elsewhere()).requires_grad_(False)
    x = torch.randn(5, 8)
    wanted = model(x)
    pack_layers(model)
    assert all(isinstance(each, PackedPart) for each in model[0].children())
    torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=1e-5)


class Gated(nn.Module):
    """Two of one width and one that is wider, all of the same input."""

    layer_names = LayerNames(merged=[("a", "b", "c")])

    def __init__(self, third: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 6, bias=False), nn.Linear(third, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(x)], -1)


@torch.inference_mode()
def test_layers_of_a_module() -> None:
    model = nn.Sequential(Gated(8), nn.Linear(14, 8), Gated(8)).requires_grad_(False)
    x = torch.randn(5, 8)
    wanted = model(x)
    pack_layers(model)
    parts = [module for module in model.modules() if isinstance(module, PackedPart)]
    assert len(parts) == 6 and len({id(part.merged) for part in parts}) == 2
    torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=1e-5)


def test_layers_that_do_not_fit_together_are_packed_alone() -> None:
    model = Gated(9)
    pack_layers(model)
    assert not any(isinstance(module, PackedPart) for module in model.modules())
