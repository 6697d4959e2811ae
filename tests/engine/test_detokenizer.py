"""Text comes out piece by piece: all of it, whole characters only, and no further than a stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from aioengine.engine.detokenizer import REPLACEMENT, Detokenizer
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPECIAL = tuple(TOKENIZER.all_special_ids)

token_ids = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60)
texts = st.text(
    st.sampled_from("ab <é€😀日\u0301\u200d\ufffd"), max_size=30
)  # characters of one to four bytes, marks, and the replacement character itself


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=skip_special_tokens))


@cache
def by_byte() -> dict[int, int]:
    """Byte -> the id of its own token, after the alphabet of byte-level tokenizers."""
    alphabet = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [byte for byte in range(256) if byte not in alphabet]
    letters = {byte: chr(byte) for byte in alphabet}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {byte: TOKENIZER.convert_tokens_to_ids(letter) for byte, letter in letters.items()}


def byte_ids(data: bytes) -> list[int]:
    """One token a byte: the most broken-up form that a text can have."""
    return [by_byte()[byte] for byte in data]


def without_tail(text: str) -> str:
    """The text without what may be an incomplete character at its end."""
    return text.rstrip(REPLACEMENT)


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> tuple[list[str], str | None]:
    """The pieces up to a stop or the end, and the stop."""
    pieces = []
    for token_id in ids:
        piece = detokenizer.add(token_id)
        pieces.append(piece.text)
        if piece.stop is not None:
            return pieces, piece.stop
    pieces.append(detokenizer.flush().text)
    return pieces, None


# ---- all of the text, and whole characters only


@given(ids=token_ids, skip=st.booleans())
@settings(deadline=None, max_examples=300)
def test_pieces_make_up_the_whole_text(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, [], skip_special_tokens=skip)
    pieces, _ = stream(detokenizer, ids)
    assert "".join(pieces) == detokenizer.text == without_tail(decode(ids, skip))


@given(text=texts, cut=st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_no_piece_shows_half_a_character(text: str, cut: int) -> None:
    data = text.encode()
    detokenizer = Detokenizer(TOKENIZER, [])
    shown = ""
    ids = byte_ids(data[: max(0, len(data) - cut)])
    for token_id in ids:
        shown += detokenizer.add(token_id).text
        assert text.startswith(shown)
    assert shown + detokenizer.flush().text == without_tail(decode(ids))


@given(prompt=texts, text=texts)
@settings(deadline=None, max_examples=100)
def test_the_prompt_is_context_and_not_output(prompt: str, text: str) -> None:
    prompt_ids, ids = byte_ids(prompt.encode()), byte_ids(text.encode())
    pieces, _ = stream(Detokenizer(TOKENIZER, prompt_ids), ids)
    assert "".join(pieces) == without_tail(text)


def test_a_character_may_be_split_by_special_tokens() -> None:
    """They leave no text, so the bytes on both sides of them belong together."""
    first, second = byte_ids("😀".encode())[:2], byte_ids("😀".encode())[2:]
    for count in (1, 7, 8, 15, 16, 40, 60):
        ids = [*first, *[SPECIAL[0]] * count, *second, *encode("!")]
        pieces, _ = stream(Detokenizer(TOKENIZER, []), ids)
        assert "".join(pieces) == decode(ids) == "😀!"


def test_broken_bytes_are_shown_as_such_once_they_are_certain() -> None:
    ids = byte_ids(b"a\x80\x80\xf0\x9fb\xff")
    pieces, _ = stream(Detokenizer(TOKENIZER, []), ids)
    assert "".join(pieces) == without_tail(decode(ids))
    assert "b" in "".join(pieces)


def test_long_outputs_take_constant_work_per_token() -> None:
    longest = 0

    class Counting:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return str(TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens))

    detokenizer = Detokenizer(Counting(), encode("a prompt " * 100))
    stream(detokenizer, encode("What is in the picture? " * 200))
    assert longest <= 32


# ---- stop strings


def plain_stop(
    ids: Sequence[int], stops: Sequence[str], include: bool, min_tokens: int
) -> tuple[str, str | None]:
    """What stop strings mean: at the first token after which the text so far holds one that was not
    complete before, the text ends where the one that is complete first ends (or begins)."""
    before = ""
    for number in range(1, len(ids) + 1):
        text = without_tail(decode(ids[:number]))
        ends = [
            (at + len(stop), -len(stop), stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if ends and number > min_tokens:
            end, _, stop = min(ends)
            return text[: end if include else end - len(stop)], stop
        before = text
    return before, None


@given(
    text=st.text(st.sampled_from("abcé"), max_size=40),
    stops=st.lists(st.text(st.sampled_from("abcé"), min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
    in_bytes=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_stop_strings(
    text: str, stops: list[str], include: bool, min_tokens: int, in_bytes: bool
) -> None:
    ids = byte_ids(text.encode()) if in_bytes else encode(text)
    detokenizer = Detokenizer(
        TOKENIZER, [], stop=stops, include_stop=include, min_tokens=min_tokens
    )
    pieces, stop = stream(detokenizer, ids)
    assert ("".join(pieces), stop) == plain_stop(ids, stops, include, min_tokens)
    assert detokenizer.text == "".join(pieces)


@given(
    text=st.text(st.sampled_from("ab"), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab"), min_size=2, max_size=4), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=100)
def test_what_was_shown_is_never_taken_back(text: str, stops: list[str]) -> None:
    """Text that turns out to belong to a stop string has not been shown; other text soon is."""
    ids = byte_ids(text.encode())
    expected, _ = plain_stop(ids, stops, False, 0)
    detokenizer = Detokenizer(TOKENIZER, [], stop=stops)
    shown = ""
    for number, token_id in enumerate(ids, 1):
        piece = detokenizer.add(token_id)
        shown += piece.text
        assert expected.startswith(shown)
        if piece.stop is not None:
            break
        assert number - len(shown) < max(map(len, stops))


@given(
    text=st.text(st.sampled_from("ab"), max_size=20),
    places=st.lists(st.integers(0, 20), max_size=5),
    stops=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_marks_stand_where_they_were_written(
    text: str, places: list[int], stops: list[str], include: bool
) -> None:
    """They change nothing of the text or of where it stops, and none comes behind what is cut."""
    ids: list[int] = []
    marked, at = "", 0
    for place in sorted(min(each, len(text)) for each in places):
        ids += [*byte_ids(text[at:place].encode()), SPECIAL[0]]
        marked += text[at:place] + "|"
        at = place
    ids += byte_ids(text[at:].encode())
    marked += text[at:]
    detokenizer = Detokenizer(
        TOKENIZER, [], stop=stops, include_stop=include, marks={SPECIAL[0]: "|"}
    )
    found = ""
    for token_id in ids:
        piece = detokenizer.add(token_id)
        found += piece.marked
        if piece.stop is not None:
            break
    else:
        found += detokenizer.flush().marked
        assert found == marked
    expected = plain_stop(byte_ids(text.encode()), stops, include, 0)[0]
    assert found.replace("|", "") == detokenizer.text == expected
    assert marked.startswith(found)


@pytest.mark.parametrize(
    ("text", "stops", "stop", "shown"),
    [
        ("hello world", ["lo wo"], "lo wo", "hel"),
        ("abcd", ["bcd", "c"], "c", "ab"),  # complete first
        ("abcd", ["cd", "abcd"], "abcd", ""),  # both complete at once: the longer
        ("aaab", ["aab"], "aab", "a"),  # a beginning inside a beginning
        ("ab", ["abc"], None, "ab"),  # held back, and given out at the end
        ("xé!", ["é"], "é", "x"),
    ],
)
def test_stop_strings_by_example(text: str, stops: list[str], stop: str | None, shown: str) -> None:
    for ids in (encode(text), byte_ids(text.encode())):
        pieces, found = stream(Detokenizer(TOKENIZER, [], stop=stops), ids)
        assert ("".join(pieces), found) == (shown, stop)


def test_two_stops_in_one_token() -> None:
    ids = [*encode("What is in the picture? ")]
    long = max(ids, key=lambda i: len(decode([i])))
    text = decode([long])
    assert len(text) >= 4
    detokenizer = Detokenizer(TOKENIZER, [], stop=[text[3], text[1:3]])
    piece = detokenizer.add(long)
    first = min([text[3], text[1:3]], key=lambda stop: text.index(stop) + len(stop))
    assert piece.stop == first
    assert piece.text == text[: text.index(first)]


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama's: what is not in the vocabulary comes as one token a byte."""
    letters = [chr(code) for code in range(33, 127)]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {letter: 256 + number for number, letter in enumerate(["\u2581", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@given(prompt=texts, text=texts)
@example(prompt="\u200d\ufffd\u200d\u200d", text="\u00e9")
@settings(deadline=None, max_examples=200)
def test_tokenizers_that_fall_back_to_bytes(prompt: str, text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    prompt_ids, ids = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    pieces, _ = stream(Detokenizer(tokenizer, prompt_ids), ids)
    assert "".join(pieces) == without_tail(text)


@pytest.mark.parametrize("text", ["hello \U0001f642 b", "\u4f60\u597d\u5417 today", "\u00e9\u00e9"])
def test_long_runs_of_bytes(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    pieces, _ = stream(Detokenizer(tokenizer, ()), tokenizer.encode(text * 40).ids)
    assert "".join(pieces) == text * 40


def test_bytes_that_never_become_text_do_not_pile_up() -> None:
    detokenizer = Detokenizer(TOKENIZER, ())
    pieces = [detokenizer.add(by_byte()[0x80]).text for _ in range(1000)]
    assert len("".join(pieces)) > 900
    assert len(detokenizer._window) < 200


def test_hostile_stop_strings_take_no_time() -> None:
    """A mismatch after a long match must not try all shorter ones, for each of 64 strings."""
    stops = ["a" * 1023 + "z"] + ["b" + "a" * 1000 + chr(99 + number) for number in range(63)]
    detokenizer = Detokenizer(TOKENIZER, [], stop=stops)
    stream(detokenizer, byte_ids(b"a" * 900))
    begin = time.thread_time()
    detokenizer.add(byte_ids(b"!")[0])
    assert time.thread_time() - begin < 0.005
    assert detokenizer.text == "a" * 900 + "!"
