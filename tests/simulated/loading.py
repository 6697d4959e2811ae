"""Weights of models on their way to the simulated device: in pieces, and without waiting."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.quantizers import quantizer_finegrained_fp8

from aioengine.models.quantization import checkpoints
from aioengine.models.runtime import upload
from aioengine.models.runtime.checkpoint import read_config
from aioengine.models.runtime.registry import resolve
from aioengine.models.runtime.upload import WeightUpload, move_weights
from tests.models import test_quantized_checkpoints
from tests.parity import test_deepseek_vl2, test_molmo, test_qwen_vl
from tests.simulated.device import DEVICE, LAUNCH_THREAD, SimulatedMode, SimulatedTensor
from tests.support.tiny import save_tiny_llava, tiny_llama, tiny_tokenizer

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _on_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits of this thread are counted, and fail the test."""
    monkeypatch.setattr(threading.current_thread(), "name", LAUNCH_THREAD)
    yield


def llava(folder: Path) -> None:
    save_tiny_llava(folder)


def tied_llama(folder: Path) -> None:
    model = tiny_llama(torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def qwen_vl(folder: Path) -> None:
    test_qwen_vl.save(test_qwen_vl.build(), test_qwen_vl.TINY, folder)


def deepseek(folder: Path) -> None:
    settings = test_deepseek_vl2.settings_of("tiny")
    test_deepseek_vl2.save(test_deepseek_vl2.build(settings), settings, folder)


def molmo(folder: Path) -> None:
    test_molmo.save(folder, test_molmo.tiny_config())


def quantized_llama(folder: Path) -> None:
    model = tiny_llama(torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": test_quantized_checkpoints.FP8}
    file.write_text(json.dumps(config))
    test_quantized_checkpoints.pack(folder)


def load(folder: Path, device: str) -> nn.Module:
    hf_config = read_config(folder, revision=None, trust_remote_code=False)
    kind = resolve(hf_config.architectures).chosen_for(hf_config)
    options = {"dtype": torch.float32, "device": torch.device(device), "revision": None}
    module: nn.Module = kind.load_module(folder, hf_config=hf_config, **options)
    return module


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("save", [llava, tied_llama, quantized_llama, qwen_vl, deepseek, molmo])
def test_nothing_is_waited_for(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers asks for accelerate, and unpacks without it.
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: name)
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    save(tmp_path)
    there, here = _loaded(tmp_path), weights(load(tmp_path, "cpu"))
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert isinstance(tensor, SimulatedTensor), name
        assert not tensor.requires_grad
        assert torch.equal(tensor.elem, here[name]), name
    assert DEVICE.copies["to the device"] >= len(here)


def _loaded(folder: Path) -> dict[str, Tensor]:
    with SimulatedMode():
        return weights(load(folder, "cuda"))


def test_each_is_copied_once_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = nn.Sequential(nn.Linear(8, 6), nn.Linear(8, 6), nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    module[0].bias = nn.Parameter(torch.arange(12.0)[::2])  # not dense
    module.register_buffer("turned", torch.randn(5, 4).mT)
    wanted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    monkeypatch.setattr(upload, "PIECE_BYTES", 64)
    with SimulatedMode():
        move_weights(module, CUDA)
    assert module[1].weight is module[0].weight
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert torch.equal(tensor.elem, wanted[name]), name
    assert module.turned.stride() == (1, 4)
    # 48 numbers in pieces of 16, 20 in two; two biases; four of 3 numbers, and a count.
    assert DEVICE.copies["to the device"] == 3 + 2 + 2 + 4 + 1


def test_few_pieces_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PIECE_BYTES", 4)
    with SimulatedMode(), WeightUpload(CUDA) as copies:
        found = copies(torch.arange(9.0))
        assert len(copies._on_the_way) == upload.MAX_PIECES
    assert not copies._on_the_way
    assert isinstance(found, SimulatedTensor) and found.elem.tolist() == list(range(9))


def test_other_streams_read_what_has_arrived() -> None:
    with SimulatedMode():
        with WeightUpload(CUDA) as copies:
            found = copies(torch.ones(4))
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            read = found + 1
        other.record_event().synchronize()
        del read
    assert not DEVICE.order.findings
