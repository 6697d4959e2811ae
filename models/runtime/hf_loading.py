"""Building and loading transformers' models without leaving marks on the process.

While transformers loads, it sets PyTorch's default dtype and patches its initialisers for the whole
process; one lock keeps loads of several engines apart, and what was changed is put back.
"""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import snapshot_download

from aioengine.errors import ModelLoadError
from aioengine.models.quantization.checkpoints import (
    check_packed_names,
    check_quantization,
    unpacked,
)
from aioengine.models.quantization.gguf_weights import find_gguf, read_gguf
from aioengine.models.quantization.packed_checkpoints import (
    PackedWeights,
    packing_of,
    read_packed,
)
from aioengine.models.runtime.load_progress import counted, is_watched
from aioengine.models.runtime.registry import resolve
from aioengine.models.runtime.upload import move_weights
from aioengine.processors.checkpoint_errors import shown, without_folders

__all__ = [
    "Held",
    "bounded_builds",
    "build_on_meta",
    "load_config",
    "load_pretrained",
    "loading",
    "padding_of",
    "pin_rotary",
]

_LOAD_LOCK = threading.RLock()
_HELD: ContextVar[Held | None] = ContextVar("held", default=None)
# Some weights are registered twice or thrice, as those that are tied, some are made of parts of
# others in the files, and a few are made and not read.
_MORE_WEIGHTS, _FEW_WEIGHTS = 4, 1000
_MORE_NUMBERS, _FEW_NUMBERS = 2, 1 << 20
_MORE_TABLES, _FEW_BYTES = 4, 1 << 30
_SHOWN = 3
_LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
"""How configs call the tokens of the longest sequence, the first that is there."""


def load_config(
    source: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The config of a folder or hub id: of the class that its architecture's model class names.

    Where that names none, transformers chooses. Raises what transformers raises, and ModelLoadError
    for a quantized checkpoint that is not read here.
    """
    settings, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    check_quantization(settings, source)
    own: type[Any] | None = None
    with suppress(ModelLoadError):  # an unknown architecture: whoever needs its class will say so
        own = resolve(settings.get("architectures")).config_class
    if own is not None:
        return own.from_pretrained(source, revision=revision)
    return AutoConfig.from_pretrained(
        source, revision=revision, trust_remote_code=trust_remote_code
    )


@contextmanager
def loading() -> Iterator[None]:
    """Around all that builds a model: one at a time, and the process as it was before."""
    with _LOAD_LOCK:
        # A bar on stderr is the application's to draw. Where the variable is set, it has chosen.
        silence = (
            transformers_logging.is_progress_bar_enabled()
            and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
        )
        if silence:
            transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if silence:
                transformers_logging.enable_progress_bar()


@contextmanager
def _weights_counted() -> Iterator[None]:
    """Meanwhile, what transformers counts on a bar is reported too, if this load is watched."""
    if not is_watched():
        yield
        return

    def hook(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        # The hook is the whole process's: a bar of another thread is none of this load's.
        if is_watched() and args and isinstance(args[0], Sized):
            items, *others = args
            total = len(items)
            args = (counted("weights", items, total), *others)
            options = {"total": total, **options}
        return bar(*args, **options) if before is None else before(bar, args, options)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        last = transformers_logging.set_tqdm_hook(before)
        if last is not hook:  # another one's, set meanwhile, stays
            transformers_logging.set_tqdm_hook(last)


@dataclass(frozen=True, slots=True)
class Held:
    """Contents of a checkpoint's files, by their headers: so many tensors of so many numbers at
    most, in so many bytes."""

    num_tensors: int
    num_numbers: int
    num_bytes: int


@contextmanager
def bounded_builds() -> Iterator[Callable[[Held | None], None]]:
    """Let this thread build no model that is much larger than what it is told meanwhile."""
    before = _HELD.get()
    try:
        yield _HELD.set  # type: ignore[misc]
    finally:
        _HELD.set(before)


def build_on_meta(model_class: Any, hf_config: Any) -> Any:
    """The model with shapes and without weights, ready to be probed.

    Raises ModelLoadError where the config's settings make no model, or one that is much larger than
    what the checkpoint holds (`bounded_builds`): a number too many could take hours, or all memory.
    """
    held = _HELD.get()
    with loading(), torch.device("meta"), torch.no_grad():
        try:
            with _counting_weights(model_class, hf_config, held):
                model = model_class(copy.deepcopy(hf_config))
        except ModelLoadError:
            raise
        # Whatever a class raises for settings that cannot be, they are the checkpoint's.
        except Exception as error:
            raise ModelLoadError(
                f"{model_class.__name__} cannot be built of this config.json: "
                f"{type(error).__name__}: {error!s:.300}"
            ) from error
        # Grouped matrix matmuls of expert layers are checked for bfloat16 on this device.
        model = model.to(torch.bfloat16).eval()
    if held is not None:
        num_numbers = sum(each.numel() for each in model.parameters())
        table_bytes = sum(each.nbytes for each in model.buffers())
        if num_numbers > _MORE_NUMBERS * held.num_numbers + _FEW_NUMBERS:
            raise _too_large(model_class, hf_config, f"{num_numbers} numbers", held.num_numbers)
        if table_bytes > _MORE_TABLES * held.num_bytes + _FEW_BYTES:
            found = f"{table_bytes} bytes of tables"
            raise _too_large(model_class, hf_config, found, f"{held.num_bytes} in all")
    for module in _rotary_modules(model):
        # Frequencies do not matter to a probe, and choosing them would read data that is not there.
        _set_static(module)
    return model


@contextmanager
def _counting_weights(model_class: Any, hf_config: Any, held: Held | None) -> Iterator[None]:
    """Meanwhile, raise ModelLoadError in this thread when more weights are made than `held` has."""
    if held is None:
        yield
        return
    most = _MORE_WEIGHTS * held.num_tensors + _FEW_WEIGHTS
    builder, count = threading.get_ident(), 0

    def note(*_: Any) -> None:
        nonlocal count
        if threading.get_ident() == builder:  # the hook is the whole process's
            count += 1
            if count > most:
                found = f"more than {most} weights"
                raise _too_large(model_class, hf_config, found, held.num_tensors)

    hook = register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        hook.remove()


def _too_large(model_class: Any, hf_config: Any, found: str, held: int | str) -> ModelLoadError:
    numbers = sorted(_integers(hf_config.to_dict()), key=lambda pair: -pair[1])
    largest = ", ".join(f"{name} {value}" for name, value in numbers[:_SHOWN])
    return ModelLoadError(
        f"{model_class.__name__} of this config.json would have {found}, where the checkpoint has "
        f"{held}: correct config.json, whose largest numbers are {largest}, or fetch it and the "
        "weights from one place again"
    )


def _integers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _integers(value)
        elif type(value) is int:
            yield str(name), value


def load_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    *,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    revision: str | None = None,
) -> Any:
    """The model with its weights, from safetensors files only, in eval mode and without gradients.

    Quantized ones are plain, and layers know their weights in groups where these are read so.
    Raises ModelLoadError where files or weights are missing or do not fit: transformers would draw
    missing weights at random.
    """
    options: dict[str, Any] = {
        "config": unpacked(hf_config),
        "dtype": dtype,
        "output_loading_info": True,
    }
    options["ignore_mismatched_sizes"] = True  # reported, and refused below
    try:
        with loading(), _weights_counted():
            packed = _read_packed(model_class, path, revision, hf_config, dtype)
            if packed is None:
                options |= {"revision": revision or "main", "use_safetensors": True}
                model, report = model_class.from_pretrained(path, **options)
            else:
                model, report = model_class.from_pretrained(
                    None, state_dict=packed.plain, **options
                )
                with suppress(OSError):  # most have one
                    model.generation_config = GenerationConfig.from_pretrained(
                        path, revision=revision
                    )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelLoadError(
            f"weights of {shown(path)!r} could not be loaded: {without_folders(error, path)}"
        ) from error
    _check_report(report, model_class.__name__)
    if packed is not None and torch.device(device).type == "cpu":
        packed.attach(model)
    model.eval().requires_grad_(False)
    _heed_score_caps(model)
    return move_weights(model, device)


def _read_packed(
    model_class: Any,
    path: str | os.PathLike[str],
    revision: str | None,
    hf_config: Any,
    dtype: torch.dtype,
) -> PackedWeights | None:
    """Weights that are read here: packed ones and those of GGUF files."""
    packing = packing_of(hf_config)
    if packing is not None:
        if getattr(hf_config, "transformers_weights", None):
            raise ModelLoadError(
                "transformers_weights in config.json is not followed where weights are packed: "
                "call the file model.safetensors"
            )
        return read_packed(_fetch(path, revision), packing, dtype)
    files = find_gguf(Path(path)) if os.path.isdir(path) else []
    return read_gguf(files, build_on_meta(model_class, hf_config), dtype) if files else None


def _fetch(path: str | os.PathLike[str], revision: str | None) -> str:
    """The folder of a folder or hub id."""
    if os.path.isdir(path):
        return os.fspath(path)
    wanted = ["*.safetensors", "*.json"]
    found: str = snapshot_download(os.fspath(path), revision=revision, allow_patterns=wanted)
    return found


def _heed_score_caps(model: nn.Module) -> None:
    """Have layers that cap attention scores run eagerly; mutates configs.

    SDPA cannot cap scores, and older versions of transformers take it all the same. Raises
    ModelLoadError for caps that are no positive numbers.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = getattr(config, field, None)
            if cap is not None and not (isinstance(cap, int | float) and 0 < cap < math.inf):
                raise ModelLoadError(
                    f"config.json: {field} is {cap!r:.40}, and must be a positive number or null"
                )
        caps = getattr(config, "attn_logit_softcapping", None) is not None
        if caps and config._attn_implementation == "sdpa":
            config._attn_implementation_internal = "eager"


def _check_report(report: Mapping[str, Any], name: str) -> None:
    """Raises ModelLoadError where a weight has another shape or is missing."""
    others = sorted(report["mismatched_keys"])
    if others:
        weight, found, wanted = others[0]
        raise ModelLoadError(
            f"{len(others)} weights of {name} have other shapes in the checkpoint than by its "
            f"config.json: {weight} has {list(found)} and not {list(wanted)}. Fetch both from one "
            "place again"
        )
    check_packed_names(report["unexpected_keys"], f"the checkpoint of {name}")
    # The pooler of a backbone is read by heads only, which name it by the backbone.
    missing = sorted(each for each in report["missing_keys"] if not each.startswith("pooler."))
    if missing:
        raise ModelLoadError(
            f"{len(missing)} weights of {name} are not in the checkpoint: "
            f"{', '.join(missing[:5])}. Fetch config.json and weights from one place again"
        )


def limit_of(text_config: Any) -> int | None:
    """Find the tokens of the longest sequence that a config allows; None where it sets no limit.

    Within what Doge's attention keeps: beyond it, how a prompt is cut and padded decides what is
    kept.
    Raises ModelLoadError for a limit below one token.
    """
    # A config may keep another name beside the usual one, of what its weights were trained on.
    held = [name for name in _LIMITS if getattr(text_config, name, None) is not None][:1]
    held.append("keep_window_size")
    limits = {name: getattr(text_config, name, None) for name in held}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ModelLoadError(f"config.json: {name} is {limit}, and must be positive or null")
    return min((int(each) for each in limits.values() if each is not None), default=None)


def padding_of(decoder: nn.Module) -> int | None:
    """Find the id of padding where a decoder gives it a position of its own and does not count it.

    That is fairseq's way: the id is that position too, and those of tokens come behind it.
    """
    modules: Any = decoder.modules()
    own = [each for each in modules if hasattr(each, "create_position_ids_from_input_ids")]
    return int(own[-1].padding_idx) if own else None


def pin_rotary(root: nn.Module, max_model_len: int | None) -> None:
    """Fix rotary frequencies that transformers would choose by a batch's longest sequence.

    A flattened batch holds many requests, so one request's length would change another's output.
    "longrope" takes the long factors if `max_model_len` exceeds the length the model was first
    trained on, else the short ones, once and for all. "dynamic" is the plain rotation up to that
    length; beyond it there is no choice that fits all requests, which raises ModelLoadError.
    `max_model_len` None means the model's own maximum. Mutates the rotary modules.
    """
    for module in _rotary_modules(root):
        layer_types = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        for layer_type in layer_types:
            _pin(module, layer_type, max_model_len)
        _set_static(module)


def _rotary_modules(root: nn.Module) -> list[Any]:
    return [module for module in root.modules() if hasattr(module, "rope_type")]


def _set_static(module: Any) -> None:
    """Make the module's forward leave its frequencies alone from now on."""
    if isinstance(module.rope_type, dict):
        module.rope_type = dict.fromkeys(module.rope_type, "default")
    else:
        module.rope_type = "default"


def _pin(module: Any, layer_type: str | None, max_model_len: int | None) -> None:
    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if "dynamic" not in rope_type and rope_type != "longrope":
        return
    longest = max_model_len or module.config.max_position_embeddings
    if "dynamic" in rope_type:
        if longest > module.original_max_seq_len:
            raise ModelLoadError(
                f"rope_type {rope_type!r} scales with the longest sequence of a batch beyond "
                f"{module.original_max_seq_len} tokens: set max_model_len to that or less"
            )
        return
    # The module chooses by the largest position it is shown: show it the largest there can be.
    position = torch.tensor([[longest - 1]], device=module.inv_freq.device)
    sample = torch.zeros(1, 1, 1, device=module.inv_freq.device)
    with torch.no_grad():
        if layer_type is None:
            module(sample, position)
        else:
            module(sample, position, layer_type=layer_type)
