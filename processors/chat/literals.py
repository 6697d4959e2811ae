"""Literals: what a user types and looks like a special token or a placeholder, and stays text.

They are marked before a template is rendered, so that what came of them is known afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["START", "Literals"]

# Private-use characters: no tokenizer gives them a meaning, and they are taken out of user text.
START, END = "\ue0f0", "\ue0f1"
_MARKS = re.compile(f"[{START}{END}]")
_ESCAPED = r"\ue0f0", r"\ue0f1"
"""What templates write that show a whole object, in Python's or JSON's way."""


class Literals:
    """The `words` that user text must not be able to say.

    `marked`: finds them between marks, as its last group, and marks alone too.
    """

    def __init__(self, words: Iterable[str]) -> None:
        known = {word for word in words if word}
        pattern = _any_of(known)
        self._pattern = re.compile(pattern) if known else None
        start, end = map(re.escape, _ESCAPED)
        forms = f"{START}({pattern}){END}|{start}({pattern}){end}|{_MARKS.pattern}"
        self.marked = re.compile(forms) if known else _MARKS
        self._beginnings = {word[:n] for word in known for n in range(1, len(word))}
        self._ends = {word[n:] for word in known for n in range(1, len(word))}
        self._sizes = range(1, max(map(len, known), default=1))

    @staticmethod
    def has_marks(rendered: str) -> bool:
        """Return whether there is a mark in a text."""
        return any(mark in rendered for mark in (START, END, *_ESCAPED))

    @staticmethod
    def length(rendered: str) -> int:
        """Count the characters of a text without its marks."""
        return len(rendered) - rendered.count(START) - rendered.count(END)

    def mark(self, text: str) -> str:
        """The text with a mark around each literal."""
        text = _MARKS.sub("", text)
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: f"{START}{found[0]}{END}", text)

    def guard(self, value: Any) -> Any:
        """The value with all texts in it marked, and fenced where what stands around them could
        complete their beginning or end to a literal."""
        if isinstance(value, str):
            is_open = any(
                value[-n:] in self._beginnings or value[:n] in self._ends for n in self._sizes
            )
            return _fenced(self.mark(value)) if is_open else self.mark(value)
        if isinstance(value, Mapping):
            return {self.guard(key): self.guard(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(child) for child in value]
        return value

    def separate(
        self, conversation: list[dict[str, Any]], keys: Sequence[str]
    ) -> list[dict[str, Any]]:
        """The conversation with its texts kept apart, if joined they would spell a literal.

        `keys`: of the texts of a message, or lists of parts, in the order in which they come.
        """
        if self._pattern is None:
            return conversation
        texts = [
            _MARKS.sub("", text)
            for message in conversation
            for key in keys
            if key in message
            for text in _texts(message[key])
        ]
        apart = sum(len(self._pattern.findall(text)) for text in texts)
        if len(self._pattern.findall("".join(texts))) == apart:
            return conversation
        return [
            {**message, **{key: _fenced(message[key]) for key in keys if key in message}}
            for message in conversation
        ]


def _fenced(content: Any) -> Any:
    if isinstance(content, str):
        return f"{END}{content}{END}"
    return [{**part, "text": _fenced(part["text"])} if "text" in part else part for part in content]


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if "text" in part]


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of the words that matches, tried letter by letter.

    As a tree: with words beside each other, a text of beginnings takes as many tries as there are
    words at each letter, and `re` keeps the GIL.
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        branches = [re.escape(letter) + write(node[letter]) for letter in sorted(node) if letter]
        if not branches:
            return ""
        pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
        return f"(?:{pattern})?" if "" in node else pattern

    return write(root)
