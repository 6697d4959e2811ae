"""Tokens to text, piece by piece: no half characters, stop strings found where they straddle.

A token's text depends on its neighbours, so a short window of tokens is decoded anew with each
token, and what was not there before is new. Replacement characters at the end may be the first
bytes of a longer character and wait (some tokenizers show all bytes in a row as unknown until the
last of them is there). Text that may be the beginning of a stop string waits too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

__all__ = ["Detokenizer", "Piece", "fast_tokenizer"]

REPLACEMENT = "\ufffd"
WINDOW = 8
"""Tokens kept for context; a character takes four bytes, so four tokens, at most."""
MAX_UNREAD = 64
"""Tokens that may wait for a whole character. More of them are not text, and are shown as such."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = ...) -> str:
        """The text of `token_ids`."""
        ...


def fast_tokenizer(tokenizer: Any) -> Tokenizer:
    """What decodes for a transformers tokenizer, without its Python layers where they do nothing.

    They take most of the time, once for each token of each stream.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return cast("Tokenizer", tokenizer)
    return cast("Tokenizer", backend)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text that may be shown, and the stop string that it ran into, if any."""

    text: str
    stop: str | None = None


class Detokenizer:
    """One completion's text. `min_tokens`: stop strings must not be complete before so many."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._matchers = [_Matcher(string) for string in stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._prompt_tail = tuple(prompt_token_ids[-WINDOW - 3 :])
        self._window: list[int] = []
        self._whole = 0  # tokens of the window that end with a character
        self._num_read = 0  # characters of the window that are out
        self._num_tokens = 0
        self._held = ""  # decoded, not yet shown: it may begin a stop string
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
        fresh = self._decode_fresh()
        if not self._matchers:
            return self._show(fresh)
        text = self._held + fresh
        found = self._find_stop(fresh)
        if found is not None:
            stop, end = found
            end += len(self._held)
            self._held = ""
            return self._show(text[: end if self._include_stop else end - len(stop)], stop)
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = text[len(text) - keep :]
        return self._show(text[: len(text) - keep])

    def flush(self) -> Piece:
        """What was held back for a stop string that did not come. Half a character stays out."""
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str, stop: str | None = None) -> Piece:
        if text:
            self._shown.append(text)
        return Piece(text, stop)

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

    def _decode_fresh(self) -> str:
        whole = self._decode(self._window)
        num_unread = len(self._window) - self._whole
        is_whole = not whole.endswith(REPLACEMENT) or num_unread >= MAX_UNREAD
        end = len(whole) if is_whole else len(whole.rstrip(REPLACEMENT))
        fresh = whole[self._num_read : end]
        self._num_read = max(self._num_read, end)
        if is_whole and num_unread >= WINDOW:
            # The window begins where a character does, and so it does after this.
            del self._window[: self._whole]
            self._whole = len(self._window)
            self._num_read = len(self._decode(self._window))
        return fresh

    def _find_stop(self, fresh: str) -> tuple[str, int] | None:
        """The stop string that is complete first, the longest of several, and where in `fresh` it
        ends. Those complete before `min_tokens` are passed over."""
        for end, character in enumerate(fresh, 1):
            complete = [m.stop for m in self._matchers if m.is_complete_with(character)]
            if complete and self._num_tokens > self._min_tokens:
                return max(complete, key=len), end
        return None


class _Matcher:
    """Follows one stop string through a text in constant time per character, on average.

    `matched`: how many last characters of the text begin the string. Method: Knuth, Morris and
    Pratt, "Fast pattern matching in strings" (1977).
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = _shorter_beginnings(stop)

    def is_complete_with(self, character: str) -> bool:
        """Take the next character."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        if self.matched < len(self.stop):
            return False
        self.matched = self._shorter[-1]
        return True


@lru_cache(maxsize=1024)
def _shorter_beginnings(stop: str) -> list[int]:
    """matched - 1 -> how long the next shorter beginning is that matches too."""
    shorter = [0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = shorter[length - 1]
        length += stop[length] == character
        shorter.append(length)
    return shorter
