"""A folder for a GGUF file, as transformers would have saved the model.

Where config.json lies beside the file, that and what else is there is linked; otherwise config and
tokenizer are made from the file's metadata, for families whose metadata say all. The weights are
linked in either case and read by `quantization.gguf_weights`.
"""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerFast

from aioengine.errors import ModelLoadError
from aioengine.models.quantization.gguf_blocks import FLOATS
from aioengine.models.quantization.gguf_encoders import is_encoder
from aioengine.models.quantization.gguf_file import GgufFile
from aioengine.models.quantization.gguf_weights import (
    ARCHITECTURE,
    check_gguf,
    parts_of,
)
from aioengine.processors.checkpoint_errors import shown

__all__ = ["GgufFolder", "open_gguf"]

_CONFIG = "config.json"
_LINKED = (".json", ".jinja", ".model", ".txt", ".gguf")
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Of architectures whose metadata say all that a config does."""
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
_ROPE = "rope.freq_base"
_HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
"""Which must be as long as a head."""
_TOKENS = "tokenizer.ggml.tokens"
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_WAY_OUT = "put the model's config.json and its tokenizer's files beside it"


class GgufFolder:
    """A new folder, which is removed with this object."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="aioengine-gguf-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def open_gguf(source: str | os.PathLike[str]) -> GgufFolder | None:
    """The folder of a GGUF file; None for no such file.

    Raises ModelLoadError.
    """
    path = Path(source)
    if path.suffix.lower() != ".gguf" or not path.is_file():
        return None
    path = path.resolve()
    parts = parts_of(path)
    files = check_gguf(parts)
    made = GgufFolder()
    is_described = (path.parent / _CONFIG).is_file()
    others = sorted(path.parent.iterdir()) if is_described else ()
    links = [*parts, *(each for each in others if _is_linked(each))]
    try:
        for each in links:
            (made.path / each.name).symlink_to(each)
    except OSError as error:
        raise ModelLoadError(f"no link to {shown(source)!r} can be made: {error}") from error
    if not is_described:
        _describe(files, made.path)
    return made


def _is_linked(path: Path) -> bool:
    is_weights = path.suffix == ".gguf" and not is_encoder(path)
    return path.is_file() and path.suffix in _LINKED and not is_weights


def _describe(files: list[GgufFile], folder: Path) -> None:
    """Write config, tokenizer and generation config of a file whose metadata say all."""
    settings = _settings(files)
    name = files[0].path.name
    try:
        AutoConfig.for_model(**settings).save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=name)
        tokenizer.save_pretrained(folder)
    # transformers and tokenizers raise whatever their code stumbles over.
    except Exception as error:
        raise ModelLoadError(
            f"transformers cannot make config and tokenizer of {name!r} "
            f"({type(error).__name__}: {error!s:.200}); {_WAY_OUT}"
        ) from error
    metadata = files[0].metadata
    special = {
        field: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, field in _SPECIAL.items()
    }
    ends = [special["eos_token_id"], metadata.get("tokenizer.ggml.eot_token_id")]
    special["eos_token_id"] = sorted({each for each in ends if isinstance(each, int)})
    known = {field: value for field, value in special.items() if value not in (None, [])}
    (folder / "generation_config.json").write_text(json.dumps(known))


def _settings(files: list[GgufFile]) -> dict[str, Any]:
    """The fields of config.json. Raises ModelLoadError for what metadata leave open."""
    file = files[0]
    name, metadata = str(file.metadata[ARCHITECTURE]), file.metadata
    if name not in _CLASSES:
        known = ", ".join(_CLASSES)
        raise ModelLoadError(
            f"{file.path.name!r} is of the architecture {name!r}, whose metadata do not say all "
            f"that the model needs, as those of {known} do: {_WAY_OUT}"
        )
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    tensors = {tensor for each in files for tensor in each.tensors}
    scaled = sorted(each for each in tensors if each.startswith(("rope_freqs", "rope_factors")))
    unknown = sorted(own.keys() - _FIELDS.keys() - {_ROPE, *_HEAD_SIZES}) + scaled
    if unknown:
        raise ModelLoadError(
            f"{file.path.name!r} says {', '.join(unknown[:5])}, which is not understood: {_WAY_OUT}"
        )
    settings = {field: own[key] for key, field in _FIELDS.items() if key in own}
    settings.setdefault("vocab_size", metadata.get(_TOKENS))
    _check_numbers(file, settings)
    heads = settings["hidden_size"] // max(settings["num_attention_heads"], 1)
    size = settings.setdefault("head_dim", heads)
    if any(own.get(key, size) != size for key in _HEAD_SIZES):
        raise ModelLoadError(
            f"{file.path.name!r} has keys, values or rotations of different sizes: {_WAY_OUT}"
        )
    return settings | {
        "model_type": name,
        "architectures": [_CLASSES[name]],
        "rope_parameters": {"rope_type": "default", "rope_theta": own.get(_ROPE, 10000.0)},
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(files),
    }


def _check_numbers(file: GgufFile, settings: Mapping[str, Any]) -> None:
    needed = [key for key in _FIELDS if key != "attention.key_length"]
    wrong = [key for key in needed if not _is_number(settings.get(_FIELDS[key]))]
    if wrong:
        raise ModelLoadError(
            f"{file.path.name!r} does not say {', '.join(wrong)} in a number: {_WAY_OUT}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _dtype(files: list[GgufFile]) -> str:
    """The dtype that matrices are in; what is packed was mostly bfloat16."""
    kinds = {
        place.kind for each in files for place in each.tensors.values() if len(place.shape) > 1
    }
    dtype = FLOATS[kinds.pop()] if len(kinds) == 1 and kinds <= FLOATS.keys() else None
    return "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")
