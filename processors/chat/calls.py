"""Grammars of answers that have to call a tool: as the model's format writes calls, with arguments
that satisfy the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["CallForm", "write_grammar"]

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value, whatever a schema asks for."""


class CallForm(NamedTuple):
    """Form of calls in a format: `first`, calls with `between` in between, and `last`. A call is
    `before`, where NAME stands for the tool's, its arguments in JSON, and `after`."""

    before: str
    after: str = ""
    first: str = ""
    between: str = ""
    last: str = ""


def write_grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_one: bool,
    thought: str = "",
    special: Mapping[str, int],
) -> str:
    """Write the grammar, in llguidance's Lark, of an answer that calls some of `tools`.

    `is_one`: one call, else any number. `thought`: the mark that ends what the model thinks, which
    the prompt has begun. `special`: marks that are tokens of their own.
    """
    words = re.compile(f"({'|'.join(map(re.escape, special))})") if special else None

    def literal(text: str) -> str:
        parts = words.split(text) if words else [text]
        shown = (f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts)
        return " ".join(each for each in shown if each != '""')

    rules, names = [], []
    for number, tool in enumerate(tools):
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": STYLE}
        before = literal(form.before.replace("NAME", function["name"]))
        names.append(f"call{number}")
        rules.append(f"call{number}: {before} arguments{number} {literal(form.after)}")
        rules.append(f"arguments{number}: %json {json.dumps(schema)}")
    more = "" if is_one else f"({literal(form.between)} call)*"
    start = f"start: {'thought ' if thought else ''}{literal(form.first)} call {more} "
    lines = [start + literal(form.last), f"call: {' | '.join(names)}", *rules]
    if thought in special:
        lines.append(f"thought: /(?s:.*)/ <[{special[thought]}]> /\\n*/")
    elif thought:
        lines += ["thought: thoughts /\\n*/", f"thoughts[lazy]: /(?s:.*){_pattern(thought)}/"]
    return "\n".join(lines) + "\n"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
