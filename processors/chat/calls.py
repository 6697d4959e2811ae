"""Grammars of answers that have to call a tool: as the model's format writes calls, with arguments
that satisfy the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.schemas import (
    NotWritableError,
    may_be_json,
    pattern_of,
    quoted,
    variants_of,
)

__all__ = ["CallForm", "CallGrammar", "write_grammar"]

PLAIN = frozenset(
    {"type", "properties", "required", "title", "description", "$schema", "$defs", "definitions"}
)
"""Keys of a schema that only names its properties."""
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value, whatever a schema asks for."""
LINES = r"/\n{0,4}/"
"""Between what is thought and a call: a model that likes blank lines has to come to its call."""
DEFINITIONS = ("$defs", "definitions")
OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$schema", "$id", "title",
             "description", "default", "examples", "$comment", *DEFINITIONS}  # fmt: skip
"""Keys of a schema that arguments in tags can follow."""


class CallForm(NamedTuple):
    """Form of calls in a format: `first`, calls with `between` in between, and `last`. A call is
    `before`, where NAME stands for the tool's, its arguments, and `after`. Arguments are a JSON
    object, or each stands in the two marks `argument`, in which KEY is its name."""

    before: str
    after: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    argument: tuple[str, str] | None = None

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call as the model does."""
        shown = json.dumps(arguments)
        if self.argument is not None:
            opening, closing = self.argument
            texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            found = (opening.replace("KEY", key) + text + closing for key, text in texts.items())
            shown = "".join(found)
        return self.before.replace("NAME", name) + shown + self.after


class CallGrammar(NamedTuple):
    """Grammar of an answer, in llguidance's Lark. `tools`: place -> name of those that it calls;
    `alone` writes the grammar for one of them."""

    text: str
    tools: Mapping[int, str]
    alone: Callable[[int], str]

    def refusal(self, place: int, reason: str) -> InvalidRequestError:
        """Make the error for a tool of which no grammar can be made."""
        return _refusal(place, self.tools[place], reason)


def write_grammar(
    form: CallForm,
    tools: Mapping[int, Mapping[str, Any]],
    *,
    is_one: bool,
    thought: str = "",
    special: Mapping[str, int],
) -> CallGrammar:
    """Write the grammar of an answer that calls some of `tools`, which are given by their place.

    `is_one`: one call, else any number. `thought`: the mark that ends what the model thinks, which
    the prompt has begun. `special`: marks that are tokens of their own. Raises InvalidRequestError
    for a tool whose arguments the form cannot write.
    """
    writer = _Writer(form, special)

    def write(wanted: Mapping[int, Mapping[str, Any]]) -> str:
        rules = [line for place in wanted for line in writer.call(place, wanted[place]["function"])]
        more = "" if is_one else f"({writer.literal(form.between)} call)*"
        start = f"start: {'thought ' if thought else ''}{writer.literal(form.first)} call {more} "
        names = " | ".join(f"call{place}" for place in wanted)
        lines = [start + writer.literal(form.last), f"call: {names}", *rules]
        if thought in special:
            lines.append(f"thought: /(?s:.*)/ <[{special[thought]}]> {LINES}")
        elif thought:
            ending = re.escape(thought).replace("/", "\\/")
            lines += [f"thought: thoughts {LINES}", f"thoughts[lazy]: /(?s:.*){ending}/"]
        return "\n".join(lines) + "\n"

    names = {place: tool["function"]["name"] for place, tool in tools.items()}
    return CallGrammar(write(tools), names, lambda place: write({place: tools[place]}))


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without arguments that it does not name, unless it says more than names: a small
    model would make them up."""
    required, names = schema.get("required", []), schema.get("properties") or {}
    are_lists = isinstance(required, list) and isinstance(names, Mapping)
    are_named = are_lists and all(isinstance(name, str) and name in names for name in required)
    is_plain = are_named and schema.keys() <= PLAIN
    return {"additionalProperties": False, **schema} if is_plain else schema


class _Writer:
    """Writes the rules of calls."""

    def __init__(self, form: CallForm, special: Mapping[str, int]) -> None:
        self._form = form
        self._special = special
        self._words = re.compile(f"({'|'.join(map(re.escape, special))})") if special else None

    def literal(self, text: str) -> str:
        """Write a text of the format's own, whose marks may be tokens."""
        parts = self._words.split(text) if self._words else [text]
        special = self._special
        shown = (f"<[{special[part]}]>" if part in special else quoted(part) for part in parts)
        return " ".join(each for each in shown if each != '""')

    def call(self, place: int, function: Mapping[str, Any]) -> Iterator[str]:
        """Write the rules for calls of one tool."""
        name, schema = function["name"], function.get("parameters") or {}
        # A name is letters, though a special token may be spelled like it.
        before = f" {quoted(name)} ".join(map(self.literal, self._form.before.split("NAME")))
        yield f"call{place}: {before} arguments{place} {self.literal(self._form.after)}"
        kinds = schema.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise _refusal(place, name, "must be of an object, as arguments are")
        if self._form.argument is None:
            whole = {**_closed(schema), "type": "object", "x-guidance": STYLE}
            yield f"arguments{place}: %json {json.dumps(whole)}"
            return
        try:
            yield from self._arguments(place, schema, self._form.argument)
        except NotWritableError as error:
            raise _refusal(place, name, f"cannot be followed in this format: {error}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _refusal(place, name, f"is no JSON schema ({type(error).__name__})") from error

    def _arguments(
        self, place: int, schema: Mapping[str, Any], marks: tuple[str, str]
    ) -> Iterator[str]:
        if unknown := schema.keys() - OF_OBJECT:
            raise NotWritableError(f"it has {', '.join(sorted(unknown))}")
        required = schema.get("required", ())
        known = schema.get("properties") or {}
        others = {key: schema.get("additionalProperties", True) for key in required}
        names: list[str] = []
        rules: list[str] = []
        for number, (key, value) in enumerate({**others, **known}.items()):
            if not key.strip() or key != key.strip() or re.search(r"[>\n]", key):
                raise NotWritableError(f"no argument can have the name {key!r:.40}")
            rule = f"value{place}_{number}"
            opening = self._around(marks[0], key)
            names.append(f"({opening} {rule})" + ("" if key in required else "?"))
            try:
                rules += self._value(rule, value, schema, marks[1])
            except NotWritableError as error:
                raise NotWritableError(f"{key!r:.40} {error}") from error
        yield f"arguments{place}: {' '.join(names) or quoted('')}"
        yield from rules

    def _around(self, mark: str, key: str) -> str:
        before, after = mark.split("KEY")
        return f"{self.literal(before)} {quoted(key)} {self.literal(after)}"

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any], mark: str) -> Iterator[str]:
        """Write the rules of a value with the mark behind it, which is not in it."""
        variants = variants_of(schema, root)
        texts = [each for each in variants if each.get("type", "string") == "string"]
        free = [each for each in texts if "enum" not in each]
        kinds = ("null", "object", "array") if free else ("null", *OTHER_KINDS)
        others = [each for each in variants if each.get("type") in kinds]
        end = mark.strip()
        named = [text for each in texts if "enum" in each for text in each["enum"]]
        named = [text for text in named if end not in text and not _is_other(text, others)]
        branches = [f"{quoted(text)} {self.literal(mark)}" for text in named]
        for number, each in enumerate(free):
            bare = not each.keys() & {"pattern", "minLength", "maxLength"} and not others
            found = pattern_of(each, end if bare else mark.removesuffix("\n"), others)
            shown = [f"~/{each[1:]}/" if each[0] == "~" else f"/{each}/" for each in found]
            if not bare:
                closing = re.escape(end).replace("/", r"\/")
                shown.append(rf"~/(?s:.*){closing}(?s:.+)/")
            yield f"{rule}_text{number}[lazy]: {' & '.join(shown)}"
            branches.append(f"{rule}_text{number} " + quoted("\n"))
        if others:
            definitions = {key: root[key] for key in DEFINITIONS if key in root}
            whole = {"anyOf": others, **definitions, "x-guidance": STYLE}
            yield f"{rule}_json: %json {json.dumps(whole)}"
            branches.append(f"{rule}_json {self.literal(mark)}")
        if not branches:
            raise NotWritableError("has no value that can be written")
        yield f"{rule}: {' | '.join(branches)}"


OTHER_KINDS = ("boolean", "integer", "number", "object", "array")


def _is_other(text: str, others: list[dict[str, Any]]) -> bool:
    """Return whether a text would be read as a value of another type."""
    is_null = text.strip() in ("null", "None") and any(
        each.get("type") == "null" for each in others
    )
    return is_null or may_be_json(text, others)


def _refusal(place: int, name: str, reason: str) -> InvalidRequestError:
    path = f"tools[{place}].function.parameters"
    return InvalidRequestError(f"{path} of {name} {reason}", parameter=path)
