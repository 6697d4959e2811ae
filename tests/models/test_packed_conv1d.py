"""Convolutions over time that are products, against PyTorch's in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from aioengine.kernels.linear import pack_linear
from aioengine.models.fusion.packed_conv1d import PackedConv1d, pack_convolutions

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Front(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x)
        return found


def front(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Front:
    return Front(layer).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "bias"),
    [(80, 3, 1, 1, True), (32, 3, 2, 1, True), (1, 127, 64, 0, False), (7, 4, 3, 2, True)],
)
@pytest.mark.parametrize("shape", [(1, 300), (3, 301), ()], ids=str)
def test_the_same_as_a_convolution(
    shape: tuple[int, ...],
    channels: int,
    kernel: int,
    stride: int,
    padding: int,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    if pack_linear(torch.zeros(32, 32, dtype=dtype)) is None:
        pytest.skip(f"this CPU has no way for {dtype}")
    torch.manual_seed(0)
    model = front(nn.Conv1d(channels, 48, kernel, stride, padding, bias=bias), dtype)
    x = torch.randn(*shape[:1], channels, *(shape[1:] or (299,))).to(dtype)
    wanted = copy.deepcopy(model).double()(x.double())
    assert pack_convolutions(model) == 1
    assert type(model.conv) is PackedConv1d and model.conv.weight.isnan().all()
    for given in (x, x.transpose(-1, -2).contiguous().transpose(-1, -2)):
        found = model(given)
        assert found.shape == wanted.shape and found.dtype == dtype
        assert found.transpose(-1, -2).is_contiguous()
        bound = 4 * torch.finfo(dtype).eps * float(wanted.abs().max())
        bound = max(bound, 1e-5 * float(wanted.abs().max()))
        torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    assert x.dim() == 2 or torch.equal(model(x[:1]), model(x)[:1]), "an item has no company"


def test_what_is_left_alone() -> None:
    class Reader(Front):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * self.conv.weight.sum()

    class Other(nn.Conv1d):
        pass

    hooked = nn.Conv1d(4, 4, 3)
    hooked.register_forward_pre_hook(lambda *_: None)
    models = [
        front(nn.Conv1d(4, 4, 3, groups=2)),
        front(nn.Conv1d(4, 4, 3, dilation=2)),
        front(nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular")),
        front(nn.Conv1d(4, 4, 3, padding="same")),
        front(nn.Conv1d(4, 4, 3), torch.float64),
        front(hooked),
        front(Other(4, 4, 3)),
        Reader(nn.Conv1d(4, 4, 3)).requires_grad_(False),
    ]
    for model in models:
        x = torch.randn(2, 4, 20).to(next(model.parameters()).dtype)
        wanted, kind = model(x), type(model.conv)
        assert pack_convolutions(model) == 0
        assert type(model.conv) is kind and torch.equal(model(x), wanted)


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("shape", [(32, 4), (32, 3), (16, 20), (64, 20)], ids=str)
def test_inputs_that_do_not_fit(shape: tuple[int, int], stride: int) -> None:
    model = front(nn.Conv1d(32, 32, 5, stride))
    wrong = torch.randn(1, *shape)
    with pytest.raises(RuntimeError):
        model(wrong)
    if pack_convolutions(model):
        with pytest.raises(RuntimeError, match="does not fit"):
            model(wrong)
