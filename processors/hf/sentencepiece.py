"""SentencePiece models of the BPE kind as fast tokenizers, without the sentencepiece package.

A tokenizer.model is a protocol buffer (sentencepiece_model.proto of SentencePiece).
What is read of it: the pieces with their scores, and how text is normalised. Two pieces merge if
together they are one, those with the higher score first (Kudo and Richardson, "SentencePiece",
2018); what has no piece is spelt in bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import BPE, Tokenizer, decoders, normalizers, processors

from aioengine.errors import ModelLoadError
from aioengine.processors.hf.files import find_file

__all__ = [
    "SentencePieceModel",
    "load_internlm2_tokenizer",
    "read_sentencepiece",
    "to_fast_tokenizer",
]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BPE = 2
_MAX_PIECE = 256
_FLAGS = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")


@dataclass(frozen=True)
class SentencePieceModel:
    """`pieces`: (text, score, type) by id; the rest as in the model's normalizer_spec."""

    pieces: tuple[tuple[str, float, int], ...]
    adds_dummy_prefix: bool


def load_internlm2_tokenizer(source: str, revision: str | None) -> Any:
    """The tokenizer of a folder or hub id that names InternLM2's class, which is remote code.

    A tokenizer.json is taken as it is; else it is made of tokenizer.model and the added tokens of
    tokenizer_config.json and added_tokens.json. Raises ModelLoadError.
    """
    find = partial(find_file, source, revision=revision, needs_hub=True)
    if find("tokenizer.json") is not None:
        return PreTrainedTokenizerFast.from_pretrained(source, revision=revision)
    file = find("tokenizer.model")
    if file is None:
        raise ModelLoadError("there is no tokenizer.json and no tokenizer.model")
    settings = _read_json(find("tokenizer_config.json"))
    added = {
        int(index): AddedToken(**{name: each[name] for name in each if name in _FLAGS})
        for index, each in settings.get("added_tokens_decoder", {}).items()
    }
    for content, index in _read_json(find("added_tokens.json")).items():
        added.setdefault(index, AddedToken(content, normalized=False, special=True))
    model = read_sentencepiece(file)
    names = {index: token.content for index, token in added.items() if index < len(model.pieces)}
    tokenizer = to_fast_tokenizer(model, names)
    for index in sorted(added):
        tokenizer.add_tokens([added[index]])
        if tokenizer.token_to_id(added[index].content) != index:
            raise ModelLoadError(f"the added token {index} does not follow the ones before it")
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    for role, default in special.items():
        token = settings.get(role) or default
        special[role] = token["content"] if isinstance(token, dict) else token
    if settings.get("add_bos_token", True):
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=settings.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _read_json(file: Path | None) -> dict[str, Any]:
    """An object; an empty one if there is no file. Raises ModelLoadError."""
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ModelLoadError(f"{file.name} is no JSON") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file.name} is no JSON object")
    return content


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ModelLoadError for damaged files, and for kinds of models that are not built.

    These are others than BPE, those without bytes for what they do not know, and those that change
    characters or spaces of a text.
    """
    pieces: list[tuple[str, float, int]] = []
    specs: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                parts = dict(_fields(value))
                score = struct.unpack("<f", parts.get(2, b"\0\0\0\0"))[0]
                pieces.append((parts.get(1, b"").decode(), score, parts.get(3, _NORMAL)))
            elif number in specs:
                specs[number] = dict(_fields(value))
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ModelLoadError(f"{path.name} is damaged: {type(error).__name__}") from error
    trainer, normalizer = specs.values()
    is_plain = not normalizer.get(2) and not normalizer.get(4, 1) and normalizer.get(5, 1)
    if trainer.get(3, 1) != _BPE or not trainer.get(35) or not is_plain:
        raise ModelLoadError(
            f"{path.name} is no SentencePiece model that is supported here (BPE with bytes for "
            "what it does not know, and text as it is); convert it to tokenizer.json"
        )
    return SentencePieceModel(tuple(pieces), bool(normalizer.get(3, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Each field of a message: its number, and its value as an integer or as bytes."""
    stream = BytesIO(data)
    while stream.tell() < len(data):
        number, kind = divmod(_varint(stream), 8)
        if kind == 0:
            yield number, _varint(stream)
            continue
        length = _varint(stream) if kind == 2 else {1: 8, 5: 4}.get(kind, -1)
        value = stream.read(length)
        if len(value) != length:
            raise ValueError("a field ends outside of its message")
        yield number, value


def _varint(stream: BytesIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        (byte,) = stream.read(1)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a number is too long")


def to_fast_tokenizer(model: SentencePieceModel, names: dict[int, str] | None = None) -> Any:
    """A `tokenizers.Tokenizer` that does as the model does.

    `names`: id -> what its piece is called instead. Control pieces and symbols that a user has
    defined are added tokens, wherever they stand.
    """
    names = names or {}
    texts = [names.get(index, text) for index, (text, _, _) in enumerate(model.pieces)]
    vocabulary = {text: index for index, text in enumerate(texts)}
    unknown = (texts[i] for i, (_, _, kind) in enumerate(model.pieces) if kind == _UNKNOWN)
    unk_token, merges = next(unknown, None), _merges(model, names)
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    turns: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.adds_dummy_prefix:
        steps.insert(0, normalizers.Prepend("▁"))
        turns.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(turns)
    tokenizer.add_tokens(
        [
            AddedToken(texts[index], normalized=False, special=kind == _CONTROL)
            for index, (_, _, kind) in enumerate(model.pieces)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _merges(model: SentencePieceModel, renamed: Container[int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best first."""
    known = {
        text: index
        for index, (text, _, kind) in enumerate(model.pieces)
        if kind == _NORMAL and index not in renamed
    }
    found = []
    for text, index in known.items():
        score = model.pieces[index][1]
        if len(text) > _MAX_PIECE:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in known and right in known:
                found.append(((-score, index, known[left], known[right]), (left, right)))
    return [pair for _, pair in sorted(found)]
