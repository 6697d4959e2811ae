"""JSON as Gemma writes it: keys may be bare words, and strings stand between marks of their own."""

from __future__ import annotations

import json
import re

__all__ = ["QUOTE", "as_json"]

QUOTE = '<|"|>'
"""Mark around a string, in which nothing is escaped."""
PART = re.compile(
    rf"{re.escape(QUOTE)}(?P<text>.*?)(?P<end>{re.escape(QUOTE)}|\Z)"
    r'|"(?:\\.|[^"\\])*+"?'
    r"|(?<=[{,])(?P<key>\w+)(?=:)",
    re.DOTALL,
)
"""String or bare key: each letter belongs to one part, however many strings have no end."""


def as_json(text: str) -> str:
    """Return a value as JSON; the text itself where it is JSON, or none can be made of it."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        try:
            return json.dumps(json.loads(PART.sub(_plain, text)))
        except (ValueError, RecursionError):
            pass
    return text


def _plain(part: re.Match[str]) -> str:
    if part["key"] is not None:
        return f'"{part["key"]}"'
    return json.dumps(part["text"]) if part["end"] else part[0]
