"""SentencePiece models without the package: texts become what SentencePiece makes of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from aioengine.errors import ModelLoadError
from aioengine.processors.hf.sentencepiece import (
    load_internlm2_tokenizer,
    read_sentencepiece,
    to_fast_tokenizer,
)

WORDS = "▁t he ▁the in ▁a at ▁c ▁cat er ing ▁pict ur e▁ ure pi ct ▁p ic . .. ... ▁▁ ▁▁▁▁ \n \n\n"
LETTERS = "▁abcdefghijklmnopqrstuvwxyz<>.,\né"
TEXTS = ("", "the cat", " the  picture", "then    <image>\n\nat", "ééé", "汉字 and 😀", "a...b\tc")
# What SentencePiece 0.2.3 gives for `model_file(False)` and `model_file(True)`.
RECORDED: dict[bool, list[list[int]]] = {
    False: [
        [],
        [303, 261, 267],
        [262, 280, 274, 275, 273],
        [303, 261, 297, 281, 310, 292, 296, 284, 290, 288, 311, 282, 265],
        [315, 315, 315],
        [234, 181, 141, 233, 177, 155, 264, 297, 287, 283, 244, 163, 156, 132],
        [284, 279, 285, 13, 286],
    ],
    True: [
        [],
        [262, 267],
        [283, 262, 280, 274, 275, 273],
        [262, 297, 281, 310, 292, 296, 284, 290, 288, 311, 282, 265],
        [283, 315, 315, 315],
        [283, 234, 181, 141, 233, 177, 155, 264, 297, 287, 283, 244, 163, 156, 132],
        [264, 279, 285, 13, 286],
    ],
}


def number(field: int, value: int) -> bytes:
    """A field of a message that is a number below 128 (its own number may be larger)."""
    return varint(field << 3) + varint(value)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def content(field: int, data: bytes) -> bytes:
    """A field of a message that is bytes, text or another message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def piece(text: str, score: float, kind: int) -> bytes:
    score_field = varint(2 << 3 | 5) + struct.pack("<f", score)
    return content(1, content(1, text.encode()) + score_field + number(3, kind))


def model_file(
    dummy_prefix: bool, *, model_type: int = 2, byte_fallback: int = 1, squeezes: int = 0
) -> bytes:
    """A tokenizer.model: control pieces, a symbol of a user's, bytes, words by rank, letters."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("[UNUSED]", 0.0, 4)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    joined = [word for word in dict.fromkeys(WORDS.split(" ")) if len(word) > 1]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(joined)]
    pieces += [(letter, -1000.0 - i, 1) for i, letter in enumerate(dict.fromkeys(LETTERS))]
    trainer = number(3, model_type) + number(35, byte_fallback)
    normalizer = content(1, b"identity") + number(3, dummy_prefix) + number(4, squeezes)
    return (
        b"".join(piece(*each) for each in pieces)
        + content(2, trainer)
        + content(3, normalizer + number(5, 1))
    )


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_texts_become_what_sentencepiece_makes_of_them(tmp_path: Path, dummy_prefix: bool) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file(dummy_prefix))
    model = read_sentencepiece(tmp_path / "tokenizer.model")
    assert model.adds_dummy_prefix is dummy_prefix
    tokenizer = to_fast_tokenizer(model)
    mine = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert mine == RECORDED[dummy_prefix]
    assert [tokenizer.decode(ids) for ids in mine] == list(TEXTS)


def write_folder(folder: Path, **changes: Any) -> int:
    """A folder as InternVL2-2B's, with the first of its added tokens' ids."""
    (folder / "tokenizer.model").write_bytes(model_file(False))
    first = len(read_sentencepiece(folder / "tokenizer.model").pieces)
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    settings = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "bos_token": "<s>",
        "pad_token": {"content": "</s>", "__type": "AddedToken"},
        "added_tokens_decoder": {
            "3": {"content": "<|im_end|>", "special": True, **flags},
            str(first): {"content": "<img>", "special": True, **flags},
        },
        "chat_template": "{{ bos_token }}",
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    added = {"<img>": first, "<IMG_CONTEXT>": first + 1}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    return first


def test_internlm2_s_tokenizer_without_its_code(tmp_path: Path) -> None:
    first = write_folder(tmp_path)
    tokenizer = load_internlm2_tokenizer(str(tmp_path), None)
    ids = tokenizer("the<img><IMG_CONTEXT> cat<|im_end|>")["input_ids"]
    assert ids[0] == 1 and ids[-1] == 3 and [first, first + 1] == ids[-4:-2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.eos_token_id) == ("<s>", "</s>", 2)
    assert tokenizer.chat_template == "{{ bos_token }}" and len(tokenizer) == first + 2
    tokenizer.save_pretrained(tmp_path)
    again = load_internlm2_tokenizer(str(tmp_path), None)
    assert again("the<img> cat")["input_ids"] == tokenizer("the<img> cat")["input_ids"]
    # A piece that texts are made of is called otherwise: it is one no more.
    flags = {"special": True, "normalized": False}
    cat = tokenizer.convert_tokens_to_ids("▁cat")
    added = {
        str(cat): {"content": "<|plugin|>", **flags},
        str(first): {"content": "<img>", **flags},
    }
    write_folder(tmp_path, add_bos_token=False, added_tokens_decoder=added)
    (tmp_path / "tokenizer.json").unlink()
    other = load_internlm2_tokenizer(str(tmp_path), None)
    assert other("<img><|plugin|>")["input_ids"] == [first, cat]
    assert other.tokenize("the cat") == ["t", "he", "▁c", "at"]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.model"):
        load_internlm2_tokenizer(str(tmp_path), None)
    file = tmp_path / "tokenizer.model"
    for data in (
        model_file(False, model_type=1),
        model_file(False, byte_fallback=0),
        model_file(False, squeezes=1),
        b"",
    ):
        file.write_bytes(data)
        with pytest.raises(ModelLoadError, match="supported here"):
            read_sentencepiece(file)
    for data in (model_file(False)[:-3], b"\xff" * 20, b"\x0b", b"\x08\x01", b"\x0a\x01\xff"):
        file.write_bytes(data)
        with pytest.raises(ModelLoadError, match="damaged"):
            read_sentencepiece(file)
    first = write_folder(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<far>": first + 9}))
    with pytest.raises(ModelLoadError, match="does not follow"):
        load_internlm2_tokenizer(str(tmp_path), None)
    (tmp_path / "added_tokens.json").write_text("[")
    with pytest.raises(ModelLoadError, match="no JSON"):
        load_internlm2_tokenizer(str(tmp_path), None)
