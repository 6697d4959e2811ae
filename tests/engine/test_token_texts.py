"""What single tokens stand for: joined, they are the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from aioengine.engine.detokenizer import TokenTexts
from aioengine.errors import InvalidRequestError
from tests.processors.conftest import make_tokenizer
from tests.support.engines import running_engine
from tests.support.tiny import tiny_llama, tiny_tokenizer


def byte_fallback() -> Any:
    """Pieces of words and, for all else, bytes, as Llama 2's."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁red", "ish", "a"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("style", ["bytes", "words"])
@pytest.mark.parametrize("text", ["A red circle, above a blue square.", "a  b\nc", "x = (y + 1);"])
def test_they_spell_the_text(style: str, text: str) -> None:
    tokenizer = make_tokenizer(style)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 3
    spelt = b"".join(bytes(texts.utf8(token_id)) for token_id in ids).decode()
    assert spelt.removeprefix(" ") == text


def test_parts_of_a_character() -> None:
    tokenizer = make_tokenizer("bytes")
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("é😀", add_special_tokens=False)
    assert len(ids) == 6
    assert b"".join(bytes(texts.utf8(i)) for i in ids).decode() == "é😀"
    assert [texts.text(i) for i in ids] == ["\ufffd"] * 6


def test_bytes_among_pieces() -> None:
    tokenizer = byte_fallback()
    texts = TokenTexts(tokenizer)
    pieces = ["▁red", "ish", "▁", "<0xC3>", "<0xA9>", "a"]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert b"".join(bytes(texts.utf8(i)) for i in ids).decode() == " redish éa"


def test_special_and_unknown_ids() -> None:
    tokenizer = make_tokenizer("bytes")
    texts = TokenTexts(tokenizer)
    assert texts.text(tokenizer.eos_token_id) == "</s>"
    assert texts.text(len(tokenizer) + 5) == ""  # a model's vocabulary may be larger


async def test_an_engine_tells_the_text_of_token_ids(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    async with running_engine(tmp_path) as engine:
        token_ids = tokenizer.encode("the dog", add_special_tokens=False)
        for given in (token_ids, tuple(token_ids), np.array(token_ids)):
            assert await engine.detokenize(given) == "the dog"
        for wrong in (None, 5, "ab", {5: 6}):
            with pytest.raises(InvalidRequestError, match="a list of token ids") as caught:
                await engine.detokenize(wrong)  # type: ignore[arg-type]
            assert caught.value.parameter == "tokens"
        with pytest.raises(InvalidRequestError, match=r"tokens\[1\] must be a token id"):
            await engine.detokenize([5, -1])
