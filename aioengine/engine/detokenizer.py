"""Tokens to text, piece by piece: no half characters, stop strings found where they straddle.

A token's text depends on its neighbours, so a short window of tokens is decoded anew with each
token, and what was not there before is new. Replacement characters at the end may be the first
bytes of a longer character and wait (some tokenizers show all bytes in a row as unknown until the
last of them is there). Text that may be the beginning of a stop string waits too.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from aioengine.types import Message, Run, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from aioengine.processors.chat.answers import AnswerParser
    from aioengine.processors.chat.answers import Piece as AnswerPiece
    from aioengine.processors.chat.renderer import ChatPrompt
    from aioengine.sampling_params import SamplingParams

__all__ = [
    "Addition",
    "Detokenizer",
    "MessageReader",
    "Piece",
    "TextReaders",
    "TokenTexts",
    "decode_long",
    "fast_tokenizer",
]

REPLACEMENT = "\ufffd"
WINDOW = 8
"""Tokens kept for context; a character takes four bytes, so four tokens, at most."""
PIECE = 4096
"""Tokens that are decoded at once: a millisecond."""
MAX_UNREAD = 64
"""Tokens that may wait for a whole character. More of them are not text, and are shown as such."""


class Tokenizer(Protocol):
    """Methods needed of a tokenizer."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = ...) -> str:
        """The text of `token_ids`."""


def fast_tokenizer(tokenizer: Any) -> Tokenizer:
    """Choose what decodes for a transformers tokenizer, without its Python layers where they do
    nothing.

    They take most of the time, once for each token of each stream.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    needs_layers = backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return cast("Tokenizer", tokenizer if needs_layers else backend)


def decode_long(tokenizer: Tokenizer, token_ids: Sequence[int], piece: int = PIECE) -> str:
    """The text of token ids, however many, in pieces: a decoder keeps the GIL while it works."""
    texts: list[str] = []
    start = 0
    while start < len(token_ids):
        context = list(token_ids[max(0, start - WINDOW) : start])
        end = start + piece
        text = tokenizer.decode([*context, *token_ids[start:end]])
        while end < min(len(token_ids), start + piece + MAX_UNREAD) and text.endswith(REPLACEMENT):
            end += 1
            text = tokenizer.decode([*context, *token_ids[start:end]])
        texts.append(text[len(tokenizer.decode(context)) if context else 0 :])
        start = end
    return "".join(texts)


class Piece(NamedTuple):
    """New text that may be shown, and the stop string that it ran into, if any. `marked`: the same
    text with the marks that are left out of it."""

    text: str
    stop: str | None = None
    marked: str = ""


class Addition(NamedTuple):
    """Additions of a token to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    runs: tuple[Run, ...] = ()


class Detokenizer:
    """One completion's text. `min_tokens`: stop strings must not be complete before so many;
    `marks`: texts of tokens that the text leaves out, but not the message that it is read as."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._open_marks: deque[tuple[int, str]] = deque()  # behind text that is not yet shown
        self._automaton = _automaton(tuple(stop)) if stop else None
        self._state = 0
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._prompt_tail = tuple(prompt_token_ids[-WINDOW - 3 :])
        self._window: list[int] = []
        self._whole = 0  # tokens of the window that end with a character
        self._num_read = 0  # characters of the window that are out
        self._num_tokens = 0
        self._held = ""  # decoded, not yet shown: it may begin a stop string
        self._num_shown = 0  # characters
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._shown)

    def add(self, token_id: int) -> Piece:
        """The text that one more token makes certain. After a stop, nothing may be added."""
        if not self._num_tokens:
            self._begin()
        self._num_tokens += 1
        self._window.append(token_id)
        # What waits for a character's end stands before a mark: none comes behind it.
        mark = self._marks.get(token_id)
        fresh = self._decode_fresh(is_whole=mark is not None)
        if mark is not None:
            self._open_marks.append((self._num_shown + len(self._held) + len(fresh), mark))
        if self._automaton is None:
            return self._show(fresh)
        text = self._held + fresh
        found = self._find_stop(self._automaton, fresh)
        if found is not None:
            stop, end = found
            end += len(self._held)
            self._held = ""
            return self._show(text[: end if self._include_stop else end - len(stop)], stop)
        keep = self._automaton.depths[self._state]
        self._held = text[len(text) - keep :]
        return self._show(text[: len(text) - keep])

    def flush(self) -> Piece:
        """Return what was held back for a stop string that did not come. Half a character stays
        out."""
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str, stop: str | None = None) -> Piece:
        marked = self._with_marks(text) if self._open_marks else text
        if text:
            self._shown.append(text)
            self._num_shown += len(text)
        return Piece(text, stop, marked)

    def _with_marks(self, text: str) -> str:
        """Return what is to be shown with the marks in it and at its end."""
        marked, at, marks = "", 0, self._open_marks
        while marks and (end := marks[0][0] - self._num_shown) <= len(text):
            marked += text[at:end] + marks.popleft()[1]
            at = end
        return marked + text[at:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _begin(self) -> None:
        """Take the prompt's last tokens for context, from where a character begins."""
        fewest = math.inf
        for length in range(WINDOW, WINDOW + 4):
            window = list(self._prompt_tail[-length:])
            text = self._decode(window)
            # A replacement character may also stand in the prompt as such.
            if text.count(REPLACEMENT) < fewest:
                fewest = text.count(REPLACEMENT)
                self._window, self._num_read = window, len(text)
            if not text.startswith(REPLACEMENT):
                break
        self._whole = len(self._window)

    def _decode_fresh(self, *, is_whole: bool) -> str:
        whole = self._decode(self._window)
        num_unread = len(self._window) - self._whole
        is_whole = is_whole or not whole.endswith(REPLACEMENT) or num_unread >= MAX_UNREAD
        end = len(whole) if is_whole else len(whole.rstrip(REPLACEMENT))
        fresh = whole[self._num_read : end]
        self._num_read = max(self._num_read, end)
        if is_whole and num_unread >= WINDOW:
            # The window begins where a character does, and so it does after this.
            del self._window[: self._whole]
            self._whole = len(self._window)
            self._num_read = len(self._decode(self._window))
        return fresh

    def _find_stop(self, automaton: _Automaton, fresh: str) -> tuple[str, int] | None:
        """The stop string that is complete first, the longest of several, and where in `fresh` it
        ends. Those complete before `min_tokens` are passed over."""
        for end, character in enumerate(fresh, 1):
            self._state = automaton.step(self._state, character)
            stop = automaton.complete[self._state]
            if stop is not None and self._num_tokens > self._min_tokens:
                return stop, end
            self._state = automaton.open[self._state]
        return None


class MessageReader:
    """Reads one completion's tokens into a message, in an order that streams can show."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[tuple[str, str, list[str]]] = []
        self.num_thought = 0
        """Tokens of reasoning, without those that begin or end it."""
        self._runs: list[list[Any]] = []  # fields of a Run, which the next token may change
        self._num_silent = 0
        """Tokens since the last that wrote something."""

    @property
    def is_thinking(self) -> bool:
        """Return whether the next token is reasoning, or ends it."""
        return self._parser.is_thinking

    def add(self, text: str, *, is_end: bool) -> Addition:
        """Add what a token adds to the completion's text, with marks."""
        was_thinking = self.is_thinking
        pieces = self._parser.feed(text)
        self.num_thought += was_thinking and self.is_thinking
        if is_end:
            pieces += self._parser.finish()
        runs = self._add_runs(pieces, is_end=is_end)
        found = {"content": "", "reasoning": ""}
        calls = []
        for piece in pieces:
            if piece.kind == "call":
                call_id = piece.id or secrets.token_hex(5)[:9]  # some templates want nine letters
                self._calls.append((call_id, piece.text, []))
                calls.append(ToolCallDelta(piece.call, call_id, piece.text))
            elif piece.kind == "arguments":
                self._calls[piece.call][2].append(piece.text)
                calls.append(ToolCallDelta(piece.call, arguments=piece.text))
            else:
                self._texts[piece.kind].append(piece.text)
                found[piece.kind] += piece.text
        return Addition(found["content"], found["reasoning"], tuple(calls), runs)

    def _add_runs(self, pieces: Sequence[AnswerPiece], *, is_end: bool) -> tuple[Run, ...]:
        """Add what one more token has written.

        Tokens before it that wrote nothing, as marks do, belong to the run before them, but for
        content, which has no marks of its own: there they belong to what follows.
        """
        if len(pieces) == 1 and not (self._num_silent or is_end):  # as most tokens do
            return (self._add_run(_run_of(pieces[0], 1)),)
        added: list[Run] = []
        num_before, num_own = self._num_silent, 1
        for piece in pieces:
            kind, _, _, call = self._runs[-1] if self._runs else _run_of(piece, 0)
            if num_before and kind != "content":
                added.append(self._add_run(Run(kind, 0, num_before, call)))
            elif num_before:
                num_own += num_before
            added.append(self._add_run(_run_of(piece, num_own)))
            num_before = num_own = 0
        self._num_silent = num_before + num_own
        if is_end and self._num_silent and self._runs:
            kind, _, _, call = self._runs[-1]
            added.append(self._add_run(Run(kind, 0, self._num_silent, call)))
        return tuple(added)

    def _add_run(self, run: Run) -> Run:
        last = self._runs[-1] if self._runs else None
        if last is not None and last[0] == run.kind and last[3] == run.call:
            last[1] += run.size
            last[2] += run.num_tokens
        else:
            self._runs.append([*run])
        return run

    @property
    def runs(self) -> tuple[Run, ...]:
        """The order of the message."""
        return tuple(Run(*each) for each in self._runs)

    @property
    def message(self) -> Message:
        """All that has been read."""
        content, reasoning = ("".join(texts) for texts in self._texts.values())
        calls = (ToolCall(own, name, "".join(arguments)) for own, name, arguments in self._calls)
        return Message(content, reasoning, tuple(calls))


def _run_of(piece: AnswerPiece, num_tokens: int) -> Run:
    """The run that a piece of an answer is, or goes on with."""
    if piece.kind == "call":
        return Run("call", 0, num_tokens, piece.call)
    kind: Any = "call" if piece.kind == "arguments" else piece.kind
    return Run(kind, len(piece.text), num_tokens, piece.call)


class TextReaders:
    """Makes what reads the tokens of completions. `tokenizer`: transformers' own, for the thread
    that reads."""

    def __init__(self, tokenizer: Any) -> None:
        self._decoder = fast_tokenizer(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token_id: token.content for token_id, token in added if token.special}

    def new(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, chat: ChatPrompt | None
    ) -> tuple[Detokenizer | None, MessageReader | None]:
        """Make those of one completion. `chat`: the conversation that it answers."""
        if not params.detokenize:
            return None, None

        marks = chat.answers.marks if chat is not None and params.skip_special_tokens else ()
        special = self._special.items() if marks else ()
        detokenizer = Detokenizer(
            self._decoder,
            prompt_token_ids,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            marks={i: text for i, text in special if any(text in mark for mark in marks)},
        )
        return detokenizer, None if chat is None else MessageReader(chat.new_parser())


class _Automaton:
    """Follows all stop strings through a text at once, in constant time per character on average.

    A state is the longest end of the text that begins a string. By state, `depths`: its length;
    `complete`: the longest string that the text ends with; `open`: the longest end that some string
    goes on from. Method: Aho and Corasick, "Efficient string matching" (1975).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.depths = [0]
        self.complete: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        for string in strings:
            state = 0
            for depth, character in enumerate(string, 1):
                state = self._next[state].setdefault(character, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self.depths.append(depth)
                    self.complete.append(None)
            self.complete[state] = string
        self._shorter = [0] * len(self._next)
        self.open = [0] * len(self._next)
        # Nearer the root first, so that the shorter ends are known.
        for state in sorted(range(len(self._next)), key=self.depths.__getitem__):
            shorter = self._shorter[state]
            self.complete[state] = self.complete[state] or self.complete[shorter]
            self.open[state] = state if self._next[state] else self.open[shorter]
            for character, child in self._next[state].items():
                self._shorter[child] = self.step(shorter, character) if state else 0

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)


_automaton = lru_cache(maxsize=64)(_Automaton)


class TokenTexts:
    """Texts of single tokens. Those of a tokenizer by bytes may be less than a character."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: transformers' own, for use on the thread of the caller."""
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = state.get("decoders", [state])
        self._is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._known: dict[int, bytes] = {}

    def text(self, token_id: int) -> str:
        """The token's text; replacement characters for bytes that are none."""
        return self._bytes(token_id).decode(errors="replace")

    def utf8(self, token_id: int) -> list[int]:
        """The bytes that it adds to a UTF-8 text."""
        return list(self._bytes(token_id))

    def is_special(self, token_id: int) -> bool:
        """Return whether texts leave it out."""
        return token_id in self._added and bool(self._added[token_id].special)

    def _bytes(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # an id of the model's that the tokenizer does not know
            return b""
        if token_id in self._added:
            return str(token).encode()
        if self._is_byte_level and all(letter in _BYTES for letter in token):
            return bytes(_BYTES[letter] for letter in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        # Behind another token, as the first one of a text may lose its space.
        before = self._tokenizer.decode(self._anchor)
        text: str = self._tokenizer.decode([*self._anchor, token_id])
        return text[len(before) :].encode()


def _byte_letters() -> dict[str, int]:
    """Letter -> byte, as tokenizers by bytes write them: printable ones as they are in Latin-1, the
    others as letters from 256 on. Radford et al., "Language Models are Unsupervised Multitask
    Learners" (2019), in its published code."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_letters()
