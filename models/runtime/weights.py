"""Weights of models that are defined here: read from safetensors files, laid into empty modules.

transformers does this for its own classes. Nothing is drawn at random on the way, no weight lies in
memory twice, and what the module computes for itself (rotary frequencies, say) is left as it is.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig
from transformers.utils import cached_file

from aioengine.errors import ModelLoadError
from aioengine.models.quantization.checkpoints import is_quantized
from aioengine.models.runtime.hf_loading import loading
from aioengine.models.runtime.load_progress import counted
from aioengine.models.runtime.upload import WeightUpload, move_weights

__all__ = ["build_empty", "copy_weight", "copy_weights", "load_defined", "read_weights"]

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 5


def load_defined(
    definition: Callable[[Any], nn.Module],
    path: str | os.PathLike[str],
    *,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    revision: str | None = None,
) -> Any:
    """A model of ours with its weights and its `generation_config`, in eval mode.

    Its `load_weights` is given every tensor of the checkpoint once. Raises ModelLoadError where
    files are missing or damaged, where weights do not fit or are not expected, and where one of the
    module's own was not loaded.
    """
    if is_quantized(hf_config):
        raise ModelLoadError(f"{_name(definition)} takes no quantized checkpoints")
    model: Any = build_empty(definition, hf_config, dtype, device)
    try:
        with torch.no_grad(), WeightUpload(device) as upload:
            loaded = set(model.load_weights(_uploaded(read_weights(path, revision), upload)))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(
            f"weights of {Path(path).name!r} could not be loaded: {type(error).__name__}: {error}"
        ) from error
    missing = _not_among(loaded, model)
    if missing:
        raise ModelLoadError(
            f"{len(missing)} weights of {_name(definition)} are not in the checkpoint: "
            f"{', '.join(missing[:_SHOWN])}"
        )
    model.generation_config = _generation_config(path, revision)
    return model


def build_empty(
    definition: Callable[[Any], nn.Module],
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """The module with parameters that hold nothing yet, of `dtype` on `device`, and its buffers.

    Buffers have the values that `__init__` gives them, where float32 is the default. Raises
    ModelLoadError where one has none.
    """
    thread = threading.get_ident()

    def hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        # The hook is the whole process's. A parameter that is shared comes twice.
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        return nn.Parameter(torch.empty_like(parameter, dtype=kind, device="meta"), False)

    with loading(), torch.device("cpu"), torch.no_grad():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        # Registered without data, so that drawing initial values costs nothing.
        handle = register_module_parameter_registration_hook(hollow)
        try:
            model = definition(copy.deepcopy(hf_config))
        finally:
            handle.remove()
            torch.set_default_dtype(before)
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    data = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(data, False)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise ModelLoadError(f"the buffer {path}.{name} of {_name(definition)} is empty")
    return move_weights(model.eval().requires_grad_(False), device)


def _uploaded(
    weights: Iterable[tuple[str, Tensor]], upload: WeightUpload
) -> Iterator[tuple[str, Tensor]]:
    """The same on the device, where a definition copies them to their places."""
    return ((name, upload(tensor)) for name, tensor in weights)


def read_weights(
    path: str | os.PathLike[str], revision: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of a folder's or hub id's safetensors files, read as they are taken.

    Files come from where `from_pretrained` would take them, and offline from its cache. Raises
    ModelLoadError where there are none, or other weights than their index says; OSError and
    SafetensorError for files that cannot be read.
    """
    files, promised = _find_files(path, revision)
    places: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - it is no mapping
                places.setdefault(name, file)
    yield from counted("weights", _read(places), len(places))
    missing = sorted(promised - places.keys())
    if missing:
        raise ModelLoadError(
            f"{len(missing)} weights of the checkpoint's index are not in its files: "
            f"{', '.join(missing[:_SHOWN])}"
        )


def _read(places: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor from its file, one file after another."""
    for file, names in groupby(places, key=places.__getitem__):
        with safe_open(file, framework="pt") as shard:
            for name in names:
                yield name, shard.get_tensor(name)


def _find_files(path: str | os.PathLike[str], revision: str | None) -> tuple[list[str], set[str]]:
    """The safetensors files, and the names that must be in them."""
    source = os.fspath(path)
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    single = cached_file(source, _FILE, **options, _raise_exceptions_for_connection_errors=False)
    if single is not None:
        return [single], set()
    index = cached_file(source, _INDEX, **options)
    if index is None:
        raise ModelLoadError(f"{Path(source).name!r} has no weights in safetensors files")
    places = json.loads(Path(index).read_text())["weight_map"]
    names = sorted({str(name) for name in dict(places).values()})
    if any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
        raise ModelLoadError("the checkpoint's index names files that are not beside it")
    # One by one: a part that is missing is named.
    found = [cached_file(source, name, revision=revision) for name in names]
    return [file for file in found if file is not None], set(places)


def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copies each tensor into the parameter or buffer of its own name; the names.

    A `load_weights` for modules that are named as their checkpoint is. Raises ModelLoadError for a
    name that the module does not have, and for other shapes.
    """
    targets, loaded = module.state_dict(keep_vars=True), set()
    for name, tensor in weights:
        if name not in targets:
            raise ModelLoadError(
                f"the checkpoint has a weight that {_name(type(module))} has no place for: {name}"
            )
        copy_weight(name, targets[name], tensor)
        loaded.add(name)
    return loaded


def copy_weight(name: str, target: Tensor, tensor: Tensor) -> None:
    """Copies a tensor into a parameter, or a part of one; `name` is for the error.

    Raises ModelLoadError where the shapes differ: PyTorch would broadcast.
    """
    if target.shape != tensor.shape:
        raise ModelLoadError(
            f"the weight {name} has the shape {list(tensor.shape)} in the checkpoint, and by its "
            f"config {list(target.shape)}"
        )
    with torch.no_grad():
        target.copy_(tensor)


def _not_among(loaded: set[str], model: nn.Module) -> list[str]:
    """Parameters and saved buffers without a loaded name, shared ones having several."""
    tensors = model.state_dict(keep_vars=True)
    done = {id(tensor) for name, tensor in tensors.items() if name in loaded}
    return sorted(name for name, tensor in tensors.items() if id(tensor) not in done)


def _generation_config(path: str | os.PathLike[str], revision: str | None) -> Any:
    try:
        return GenerationConfig.from_pretrained(os.fspath(path), revision=revision or "main")
    except OSError:  # there is none, and the model's config says all
        return GenerationConfig()


def _name(definition: Any) -> str:
    return str(getattr(definition, "__name__", definition))
