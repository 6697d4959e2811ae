"""Weights of GGUF files, under the names and in the layouts that transformers' modules have.

llama.cpp's converter (conversion/*.py) renames weights, turns rows of rotary heads for its way of
rotating and adds 1 to the norms of some families. What it does is known here for the families of
`_FAMILIES`; others are refused by name, as are files with weights that a model does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.models.quantization.gguf_blocks import (
    BLOCKS,
    check_tensors,
    kind_name,
    read_floats,
    read_grouped,
)
from aioengine.models.quantization.gguf_encoders import find_encoder, is_encoder, read_encoder
from aioengine.models.quantization.gguf_file import GgufFile
from aioengine.models.quantization.packed_checkpoints import PackedWeights

__all__ = [
    "ARCHITECTURE",
    "check_gguf",
    "find_gguf",
    "kinds_of",
    "parts_of",
    "read_gguf",
]

ARCHITECTURE = "general.architecture"
_MAX_PARTS = 999
_WAY_OUT = (
    "Take the checkpoint in safetensors; quantization='int4' rounds its decoder as it is loaded"
)
_OR = f"Or else: {_WAY_OUT[0].lower()}{_WAY_OUT[1:]}"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Family:
    """Changes that llama.cpp makes to a family's weights.

    `turns`: rows of rotary heads are in another order; `adds_one`: norms are by 1 larger;
    `has_sandwich`: there are norms before and behind each part.
    """

    turns: bool = False
    adds_one: bool = False
    has_sandwich: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(turns=True),
    "qwen2": _Family(),
    "qwen2vl": _Family(),
    "qwen3": _Family(),
    "phi3": _Family(),
    "gemma2": _Family(adds_one=True, has_sandwich=True),
    "gemma3": _Family(adds_one=True, has_sandwich=True),
}
"""By `general.architecture`."""
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AROUND = {"embed_tokens": "token_embd", "norm": "output_norm"}
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that a config says, too."""


def find_gguf(folder: Path) -> list[Path]:
    """A folder's GGUF files, but those of encoders, where it has no others; none where it has."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return []
    return [each for each in sorted(folder.glob("*.gguf")) if not is_encoder(each)]


def parts_of(path: Path) -> list[Path]:
    """All files of the model that one file is a part of. Raises ModelLoadError if some lack."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    names = [f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(min(count, _MAX_PARTS))]
    missing = [each for each in names if not (path.parent / each).is_file()]
    if missing or count > _MAX_PARTS:
        raise ModelLoadError(
            f"{path.name!r} is one of {count} parts, and {', '.join(missing[:5])} are not beside "
            "it: fetch them"
        )
    return [path.parent / each for each in names]


def check_gguf(paths: Sequence[Path]) -> list[GgufFile]:
    """The files of one model. Raises ModelLoadError for several models, and what is not read."""
    if len(paths) > 1 and list(paths) != parts_of(paths[0]):
        names = ", ".join(each.name for each in paths[:5])
        raise ModelLoadError(
            f"the folder has several GGUF files ({names}): give the path of the one to load"
        )
    files = [GgufFile(each) for each in paths]
    for file in files:
        check_tensors(file)
    name = files[0].metadata.get(ARCHITECTURE)
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(
            f"{paths[0].name!r} is of the architecture {str(name)[:40]!r}; of GGUF files {known} "
            f"are read. {_WAY_OUT}"
        )
    return files


def kinds_of(folder: Path) -> list[str]:
    """The names of the types of a folder's GGUF files, where it has any."""
    files = check_gguf(find_gguf(folder)) if find_gguf(folder) else []
    kinds = {place.kind for file in files for place in file.tensors.values()}
    return sorted(map(kind_name, kinds))


def read_gguf(paths: Sequence[Path], model: Any, dtype: torch.dtype) -> PackedWeights:
    """The weights for transformers' `model`, of which names and shapes are looked at alone.

    Raises ModelLoadError where a weight is missing, too many, or damaged.
    """
    files = check_gguf(paths)
    family = _FAMILIES[str(files[0].metadata[ARCHITECTURE])]
    places = {name: file for file in files for name in file.tensors}
    found = PackedWeights(dtype)
    unread = set(places) - set(_COMPUTED)
    sources = _sources(model, family)
    others = [name for name in _weights(model) if name not in sources]
    if others:
        encoder = find_encoder(paths[0].parent)
        if encoder is None:
            raise ModelLoadError(
                f"{paths[0].name!r} holds a decoder alone, and {type(model).__name__} has an "
                f"encoder too ({others[0]}): put its file (mmproj-....gguf) beside it. {_OR}"
            )
        for name, weight in read_encoder(encoder, others).items():
            found.add_plain(name, weight)
    heads = _Heads.of(model)
    for name, tensor in sources.items():
        if tensor not in places:
            continue  # a tied head's, or missing: transformers will say so
        unread.discard(tensor)
        turned = heads.of_weight(name) if family.turns else 0
        try:
            _read(found, name, places[tensor], tensor, family, turned)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ModelLoadError(
                f"the tensor {tensor!r} of {paths[0].name!r} cannot be read ({error!s:.120}); "
                "fetch the file again, or take another one of the model"
            ) from error
    if unread:
        raise ModelLoadError(
            f"{paths[0].name!r} has {len(unread)} tensors that {type(model).__name__} has no place "
            f"for: {', '.join(sorted(unread)[:5])}. {_WAY_OUT}"
        )
    return found


def _read(
    found: PackedWeights, name: str, file: GgufFile, tensor: str, family: _Family, heads: int
) -> None:
    """Add one weight. `heads`: whose rows are turned, 0 for none."""
    place = file.tensors[tensor]
    rows = _turned(place.shape[0], heads)
    if place.kind in BLOCKS and len(place.shape) == 2:
        weight = read_grouped(file, tensor)
        if not weight.is_finite:
            raise ValueError("its scales are no finite numbers")
        found.add_grouped(name, weight if rows is None else weight.taken(rows))
        return
    plain = read_floats(file, tensor)
    if family.adds_one and name.endswith("norm.weight"):
        plain = plain - 1
    found.add_plain(name, plain if rows is None else plain[rows])


def _turned(count: int, heads: int) -> Tensor | None:
    """The rows of a file in transformers' order: halves of heads, where llama.cpp has pairs."""
    if not heads:
        return None
    pairs = torch.arange(count).view(heads, count // heads // 2, 2)
    return pairs.transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class _Heads:
    """Numbers of heads of queries and keys."""

    queries: int
    keys: int

    @classmethod
    def of(cls, model: Any) -> _Heads:
        config = model.config.get_text_config(decoder=True)
        queries = int(config.num_attention_heads)
        return cls(queries, int(getattr(config, "num_key_value_heads", None) or queries))

    def of_weight(self, name: str) -> int:
        layer = name.rpartition(".")[0]
        return {"q_proj": self.queries, "k_proj": self.keys}.get(layer.rpartition(".")[2], 0)


def _sources(model: Any, family: _Family) -> dict[str, str]:
    """The tensor of a file that each of a model's weights is."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    inside = {name: _tensor_of(name, family) for name in _weights(decoder)}
    found = {f"{names[id(decoder)]}.{name}": each for name, each in inside.items() if each}
    return found | {f"{names[id(head)]}.{name}": f"output.{name}" for name in _weights(head)}


def _weights(module: nn.Module) -> Iterable[str]:
    return (name for name, _ in module.named_parameters(remove_duplicate=False))


def _tensor_of(name: str, family: _Family) -> str | None:
    """The tensor that a decoder's weight is; None for what no file has."""
    path, _, part = name.rpartition(".")
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", path)
    if match is None:
        return f"{_AROUND[path]}.{part}" if path in _AROUND else None
    table = _LAYER | (_SANDWICH if family.has_sandwich else {})
    return f"blk.{match[1]}.{table[match[2]]}.{part}" if match[2] in table else None
