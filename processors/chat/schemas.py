"""JSON schemas of arguments that are written as plain text: what a text stands for, and which texts
stand for a value that the schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "NotWritableError",
    "argument_variants",
    "cast_text",
    "may_be_json",
    "pattern_of",
    "quoted",
    "variants_of",
]

MAX_VISITS = 256
"""Schemas and references looked at, of one value."""
KINDS = ((bool, "boolean"), (str, "string"), (int | float, "number"), (Mapping, "object"))
LOGIC = {"not", "if", "then", "else"}
ABOUT = {"title", "description", "default", "examples", "format", "$comment", "deprecated",
         "readOnly", "writeOnly", "nullable", "contentMediaType", "contentEncoding"}  # fmt: skip
"""Keys of a schema that say nothing of which values it allows."""
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?:)?|.", re.DOTALL)
"""Part of a regular expression."""


class NotWritableError(ValueError):
    """A schema whose values cannot be written as plain text. Holds the reason in words."""


def variants_of(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the schemas, of one type each or of none, one of which a value satisfies.

    `root`: the schema that references point into. Raises NotWritableError.
    """
    return list(_variants(schema, root, iter(range(MAX_VISITS))))


def _variants(
    schema: Any, root: Mapping[str, Any], visits: Iterator[int]
) -> Iterator[dict[str, Any]]:
    if next(visits, None) is None:
        raise NotWritableError("has too many alternatives")
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise NotWritableError("allows no value")
    rest = {key: value for key, value in schema.items() if key not in ABOUT}
    if schema.get("nullable") is True:  # as transformers writes Optional
        yield {"type": "null"}
    if "$ref" in rest:
        aim = _resolve(root, rest.pop("$ref"))
        yield from _variants({**aim, **rest}, root, visits)
    elif branches := next((key for key in ("anyOf", "oneOf", "allOf") if key in rest), None):
        given = rest.pop(branches)
        if branches == "allOf" and len(given) != 1:
            raise NotWritableError("has an allOf")
        found = [list(_variants({**rest, **each}, root, visits)) for each in given]
        named = [kind for each in found for kind in {_matched(variant) for variant in each}]
        if branches == "oneOf" and (len(named) > len(set(named)) or None in named):
            raise NotWritableError("has a oneOf of the same types")
        for each in found:
            yield from each
    elif "enum" in rest or "const" in rest:
        values = rest.pop("enum") if "enum" in rest else [rest.pop("const")]
        kinds = _types(rest)
        if "const" in rest or "pattern" in rest or LOGIC & rest.keys():
            raise NotWritableError("has more beside its values")
        for kind in dict.fromkeys(map(_kind, values)):
            if not kinds or kind in kinds or (kind == "number" and "integer" in kinds):
                same = [each for each in values if _kind(each) == kind]
                yield {**rest, "type": kind, "enum": same}
    else:
        for kind in _types(rest):
            yield {**rest, "type": kind}
        if not _types(rest):
            yield rest


def _matched(variant: Mapping[str, Any]) -> str | None:
    """Return the widest type of a variant's values; None: all."""
    kind = variant.get("type")
    return "number" if kind == "integer" else kind


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return next((name for kind, name in KINDS if isinstance(value, kind)), "array")


def _resolve(root: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    found: Any = root
    if not reference.startswith("#"):
        raise NotWritableError("refers to another schema")
    for part in reference[1:].split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
        if not isinstance(found, Mapping):
            raise NotWritableError("refers to what is not there")
    return found  # type: ignore[no-any-return]


def argument_variants(parameters: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """List the variants of an argument, for reading: none where they are not known."""
    try:
        return variants_of(parameters["properties"][name], parameters)
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def may_be_json(text: str, variants: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a text begins as an object or array does, where there may be one."""
    kinds = {variant.get("type") for variant in variants}
    return text.lstrip()[:1] in ("{", "[") and bool(kinds & {"object", "array"})


def cast_text(text: str, variants: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value that a text stands for; the text itself where it can be one."""
    kinds = {variant.get("type", "string") for variant in variants} or {"string"}
    bare = text.strip()
    if "null" in kinds and bare in ("null", "None"):
        return None
    texts = [
        each.get("enum", [text]) for each in variants if each.get("type", "string") == "string"
    ]
    is_text = not variants or any(text in allowed for allowed in texts)
    if is_text and not may_be_json(bare, variants):
        return text
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(bare, text)


def pattern_of(
    schema: Mapping[str, Any], end: str, variants: Sequence[Mapping[str, Any]]
) -> Sequence[str]:
    """Expressions, all of which a text of this schema and the `end` behind it match.

    One that begins with `~` must not match. `variants`: the schemas beside it, for whose values a
    text must not be taken. Raises NotWritableError.
    """
    if logic := LOGIC & schema.keys():
        raise NotWritableError(f"has {', '.join(sorted(logic))}")
    closing = r"\n".join(re.escape(line).replace("/", r"\/") for line in end.split("\n"))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    any_text = f"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"
    found = [any_text + closing]
    if "pattern" in schema:
        found.append(_whole(schema["pattern"]) + closing)
    kinds = {each.get("type") for each in variants}
    if "null" in kinds:
        found.append(rf"~\s*(null|None)\s*{closing}")
    if kinds & {"object", "array"}:
        found.append(r"~\s*[\[{](?s:.*)")
    return found


def _whole(pattern: str) -> str:
    """Return the expression for whole texts in which a schema's pattern is found."""
    parts = TOKEN.findall(pattern)
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"] and len(parts) > 0
    inner = parts[begins : len(parts) - ends]
    looks = re.search(r"\(\?(?!:)|\\[bBkpP1-9]", pattern)
    if looks or "^" in inner or "$" in inner or ((begins or ends) and _has_branches(inner)):
        raise NotWritableError("has a pattern with anchors within, looks or references")
    shown = "".join(map(_in_rust, inner))
    before, after = "" if begins else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"{before}(?:{shown}){after}"


def _in_rust(part: str) -> str:
    """Return a part of an expression as Lark takes it, where digits are not of ASCII alone."""
    is_class = part.startswith("[")
    for name, letters in ((r"\d", "0-9"), (r"\w", "A-Za-z0-9_")):
        if is_class or part == name:
            part = part.replace(name, letters if is_class else f"[{letters}]")
    return re.sub(r"(?<!\\)/", r"\/", part).replace("\n", r"\n")


def _has_branches(parts: Sequence[str]) -> bool:
    depth = 0
    for part in parts:
        depth += part.startswith("(") - (part == ")")
        if part == "|" and not depth:
            return True
    return False


def quoted(text: str) -> str:
    """Return a text as a literal of Lark."""
    # JSON leaves this one control character as it is, and Lark does not take it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
