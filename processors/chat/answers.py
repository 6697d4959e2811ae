"""Answers of a model, read as they come: what it thinks, what it says, and what it calls.

A format is a generator that reads from an `AnswerText`: where it needs text that has not come, it
yields None, and is gone on with when there is more. What it yields beside is final: pieces of the
same text come out however it is cut, and nothing of it is lost but marks and the blanks around
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from aioengine.processors.chat.tools import MAX_ID, NAME

__all__ = ["AnswerParser", "AnswerText", "JsonScan", "Parse", "Piece", "Reading"]

Kind = Literal["content", "reasoning", "call", "arguments"]
BLANKS = " \t\r\n"
SPACE = re.compile(r"[ \t\r\n]*")
MOST_IN_VAIN = 1 << 16
"""Characters of an answer that are read as calls and are none; behind these it calls no more.

Else an answer of thousands of calls that do not end would be read to its end for each.
"""
ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("type", "id", "name", *ARGUMENT_KEYS)


class Piece(NamedTuple):
    """Part of an answer: more text of a kind; of a call, its name first (`call`), with an id if the
    model gives one, then its arguments. `call`: its number, from 0."""

    kind: Kind
    text: str
    call: int = 0
    id: str | None = None


Reading = Generator[Piece | None, None, Any]
"""Yields pieces, and None where more text is needed."""
Tools = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its arguments, an object."""
Parse = Callable[["AnswerText", Tools], Reading]
"""Reads an answer to a prompt with such tools."""


@lru_cache(maxsize=256)
def _beginnings(ends: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str], int]:
    """Return all that some text of `ends` begins with, first letters of these, and the greatest
    length."""
    found = frozenset(end[:n] for end in ends for n in range(1, len(end)))
    return found, frozenset(end[0] for end in ends), max(map(len, ends)) - 1


class AnswerText:
    """An answer as far as it has come, and been read. `tail`: the end of the prompt, which may have
    begun the answer."""

    def __init__(self, tail: str = "") -> None:
        self.tail = tail
        self.is_over = False
        self.num_calls = 0
        self.kind: Kind | None = None
        """Of the text that is being read, up to an end that has not come."""
        self.blanks = ""
        """Before the end that was read last."""
        self._text = ""
        self._at = 0
        self._mark: int | None = None  # from here on it may be read once more
        self._num_in_vain = 0
        self._seen: dict[str, tuple[int, int]] = {}
        """Text -> characters left where it was looked for, and where it is."""

    def add(self, text: str) -> None:
        """Take the text that comes next."""
        first = self._at if self._mark is None else min(self._at, self._mark)
        self._text = self._text[first:] + text
        self._seen.clear()
        self._at -= first
        if self._mark is not None:
            self._mark -= first

    def until(self, kind: Kind | None, *ends: str, strips: bool = False, call: int = 0) -> Reading:
        """Read text of a kind up to the first of `ends`, which is returned; None: there is none.

        Blanks before an end are left out, and with `strips` those at the beginning. Of the kind
        None, all is left out.
        """
        self.kind = kind
        held: list[str] = []  # blanks that may stand before an end: each seen once
        while True:
            if strips:
                self._skip_blanks()
            place, end = self._find(ends)
            whole = self._text[self._at : place if end else self._certain(ends)]
            self._at += len(whole) + len(end)
            is_last = self.is_over and not end
            text = whole.rstrip(BLANKS) if ends and not is_last else whole
            blanks = whole[len(text) :]
            if text or is_last:
                text, held = "".join([*held, text]), []
            held += [blanks] if blanks else []
            if text and kind is not None:
                strips = False
                yield Piece(kind, text, call)
            if end:
                self.blanks, self.kind = "".join(held), None
                return end
            if self.is_over:
                return None
            yield None

    def _find(self, ends: Sequence[str]) -> tuple[int, str]:
        """Find the first of the ends, the longest of those at one place; "" if there is none, or
        one may have begun before it."""
        found = [(place, end) for end in ends if (place := self._place(end)) >= 0]
        place, end = min(found, key=lambda each: (each[0], -len(each[1])), default=(-1, ""))
        if end and len(ends) > 1 and place > self._certain(ends):
            return -1, ""
        return place, end

    def _place(self, end: str) -> int:
        """Find a text; -1: it is not there. Each part is looked through once until more comes."""
        num_left = len(self._text) - self._at
        from_there, found = self._seen.get(end, (-1, 0))
        if not found <= num_left <= from_there:
            place = self._text.find(end, self._at)
            found = 0 if place < 0 else len(self._text) - place
            self._seen[end] = num_left, found
        return len(self._text) - found if found else -1

    def _certain(self, ends: Sequence[str]) -> int:
        """Return how far the text goes that no end can begin in."""
        if self.is_over or not ends:
            return len(self._text)
        beginnings, letters, longest = _beginnings(tuple(ends))
        last = self._text[max(self._at, len(self._text) - longest) :]
        held = 0
        if not letters.isdisjoint(last):  # seldom
            held = next((n for n in range(len(last), 0, -1) if last[-n:] in beginnings), 0)
        return len(self._text) - held

    def peek(self, *words: str) -> Reading:
        """Read over blanks; return the word that comes next, None for another text."""
        longest = max(map(len, words), default=1)
        num_blanks = 0  # seen already
        while True:
            start = self._behind_blanks(self._at + num_blanks)
            num_blanks = start - self._at
            begin = self._text[start : start + longest]
            found = next((word for word in words if begin.startswith(word)), None)
            if found is not None or self.is_over:
                return found
            if begin and not any(word.startswith(begin) for word in words):
                return None
            yield None

    def take(self, *words: str) -> Reading:
        """Read over blanks and the word that comes next, which is returned; None: none does."""
        found = yield from self.peek(*words)
        if found is not None:
            self._skip_blanks()
            self._at += len(found)
        return found

    def text_until(self, *ends: str) -> Reading:
        """Read all up to the first of `ends`, and return it, with the end; None: there is none, and
        nothing has been read."""
        parts: list[str] = []  # each looked through once, however long the text becomes
        while True:
            place, end = self._find(ends)
            if self.is_over and not end:
                if parts:
                    self.put_back("".join(parts))
                return None
            parts.append(self._text[self._at : place if end else self._certain(ends)])
            self._at += len(parts[-1]) + len(end)
            if end:
                return "".join(parts), end
            yield None

    def put_back(self, text: str) -> None:
        """Have a text that was read come once more."""
        self._num_in_vain += len(text)
        begin = self._at - len(text)
        if begin >= 0 and self._text.startswith(text, begin):
            self._at = begin
        else:
            self._text, self._at = text + self._text[self._at :], 0

    @property
    def is_tiring(self) -> bool:
        """Return whether so much was read in vain that it should be enough."""
        return self._num_in_vain > MOST_IN_VAIN

    @property
    def is_spent(self) -> bool:
        """Return whether the answer is over, and all of it but blanks has been read."""
        return self.is_over and self._behind_blanks(self._at) == len(self._text)

    def rest(self) -> str:
        """Read all that has come."""
        text, self._at = self._text[self._at :], len(self._text)
        return text

    def begin_call(self, name: str, call_id: object = None) -> Piece:
        """Make the piece that a call begins with. An id that a conversation cannot have is none."""
        self.num_calls += 1
        self._mark = None
        is_text = isinstance(call_id, str) and call_id.isprintable()
        own = str(call_id) if is_text and 0 < len(str(call_id)) <= MAX_ID else None
        return Piece("call", name, self.num_calls - 1, own)

    def arguments(self, text: str) -> Piece:
        """Make a piece of the arguments of the call that has begun last."""
        return Piece("arguments", text, self.num_calls - 1)

    def attempt(self, reading: Reading) -> Reading:
        """Read what may be a call. Returns whether one has begun; if not, nothing has been read."""
        if self.is_tiring:
            return False
        num_calls, self._mark = self.num_calls, self._at
        yield from reading
        if self.num_calls > num_calls:
            return True
        self._num_in_vain += self._at - self._mark
        self._at, self._mark = self._mark, None
        return False

    def name(self) -> Reading:
        """Read over blanks and the name of a tool, which is returned; None: there is none."""
        yield from self.peek()
        self._skip_blanks()
        while True:
            found = NAME.match(self._text, self._at)
            end = found.end() if found else self._at
            if end < len(self._text) or self.is_over:
                self._at = end
                return found and found[0]
            yield None

    def json_call(self, *before: str, only: Container[str] | None = None) -> Reading:
        """Read a call that is a JSON object with a name and arguments, in any order.

        `before`: words that come first; `only`: names that a call can have, where an object that
        has anything else than a call is none. Returns whether it was one; if not, nothing has been
        read.
        """
        return (yield from self.attempt(self._json_call([*before, "{"], only)))

    def _json_call(self, words: Sequence[str], only: Container[str] | None) -> Reading:
        name: str | None = None
        call_id: str | None = None
        waiting, num_calls, is_other = "", self.num_calls, False
        for word in words:
            if (yield from self.take(word)) is None:
                return
        end: str | None = ","
        while end == ",":
            end = None
            key = (yield from self.peek('"')) and (yield from self._value())
            if key is None or (yield from self.take(":")) is None:
                break
            kind = key.strip('"')
            is_other = is_other or kind not in CALL_KEYS
            if is_other and only is not None and self.num_calls == num_calls:
                return
            if kind in ARGUMENT_KEYS and name is not None and self.num_calls == num_calls:
                yield self.begin_call(name, call_id)
                if not (yield from self.object_of_arguments()):
                    return
            elif (value := (yield from self._value())) is None:
                break
            elif kind in ARGUMENT_KEYS:
                waiting = waiting or _string(value) or value
            elif kind == "id":
                call_id = _string(value)
            elif kind == "name" and name is None:
                name = _string(value)
                if name is None or not NAME.fullmatch(name) or name not in (only or (name,)):
                    return
                if waiting:
                    yield self.begin_call(name, call_id)
                    yield self.arguments(waiting)
            end = yield from self.take(",", "}")
        is_open = not is_other and self.num_calls == num_calls
        if name is not None and is_open and (end or self.is_spent):
            yield self.begin_call(name, call_id)
            yield self.arguments("{}" if end else "")

    def object_of_arguments(self) -> Reading:
        """Read arguments as they come, an object or one written in a string. Returns whether they
        have come to their end."""
        if (yield from self.peek('"')) is not None:
            text = yield from self._value()
            yield self.arguments(_string(text or "") or text or "")
            return text is not None
        self._skip_blanks()
        scan = JsonScan()
        while True:
            begin = self._at
            self._at, is_whole = scan.over(self._text, begin)
            if self._at > begin:
                yield self.arguments(self._text[begin : self._at])
            if is_whole or self.is_over:
                return is_whole
            yield None

    def _value(self) -> Reading:
        """Read one JSON value, and return its text; None where it has no end."""
        yield from self.peek()
        self._skip_blanks()
        scan, found = JsonScan(), ""
        while True:
            begin = self._at
            self._at, is_whole = scan.over(self._text, begin)
            found += self._text[begin : self._at]
            if is_whole:
                return found
            if self.is_over:
                return None
            yield None

    def _skip_blanks(self) -> None:
        self._at = self._behind_blanks(self._at)

    def _behind_blanks(self, place: int) -> int:
        found = SPACE.match(self._text, place)
        assert found is not None
        return found.end()


class JsonScan:
    """Finds the end of a JSON value that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = self._is_escape = self._has_begun = False

    def over(self, text: str, start: int) -> tuple[int, bool]:
        """Return how far the value goes in `text` from `start` on, and whether it ends there."""
        for place in range(start, len(text)):
            letter = text[place]
            if self._is_text:
                if self._is_escape:
                    self._is_escape = False
                elif letter == "\\":
                    self._is_escape = True
                elif letter == '"':
                    self._is_text = False
                    if not self._depth:
                        return place + 1, True
                continue
            if letter == '"':
                self._is_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:  # below 0: of what is around it
                    return place + (self._depth == 0), True
            elif not self._depth and self._has_begun and letter in ", \t\r\n":
                return place, True
            self._has_begun = True
        return len(text), False


def _string(value: str) -> str | None:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


class AnswerParser:
    """One answer, read by its format as it comes."""

    def __init__(self, parse: Parse, tail: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """`tail`: the end of the prompt; `tools`: the schemas of those in it."""
        self._text = AnswerText(tail)
        functions = [tool["function"] for tool in tools]
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self._reading: Reading = parse(self._text, schemas)
        self._first: list[Piece] = []
        self._first = self._pieces()

    @property
    def is_thinking(self) -> bool:
        """Return whether more text would be reasoning; the prompt may have begun it."""
        return self._text.kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        """Return what more text makes certain."""
        self._text.add(text)
        return self._pieces()

    def finish(self) -> list[Piece]:
        """Return what is left at the end of the answer."""
        self._text.is_over = True
        return self._pieces()

    def _pieces(self) -> list[Piece]:
        found, self._first = self._first, []
        for piece in self._reading:
            if piece is None:
                break
            found.append(piece)
        return found
