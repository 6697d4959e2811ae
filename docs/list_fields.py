"""Write the end of docs/serving.md: each field of the API's requests, and what becomes of it.

python docs/list_fields.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from aioengine.asgi.api.fields import Field, done
from aioengine.asgi.api.openapi import TABLES

PAGE = Path(__file__).resolve().parent / "serving.md"
MARK = "<!-- From here on: docs/list_fields.py -->\n"
HEAD = """
## Every field

A field that stands in no table is refused by name, with the one that was probably meant. `null` is
as good as no field.
"""


def table(name: str, fields: dict[str, Field]) -> Iterator[str]:
    """Lines for the fields of one endpoint: those done without a word together, last."""
    yield f"\n### {name}\n\n| field | | |\n|---|---|---|\n"
    plain = [field for field, found in fields.items() if found == done()]
    for field, found in fields.items():
        if field not in plain:
            yield f"| `{field}` | {found.handling} | {found.note} |\n"
    if plain:
        yield f"| {', '.join(f'`{field}`' for field in plain)} | done | |\n"


def page() -> str:
    """The whole page: what stands before the mark, and the tables."""
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    lines = [line for name, fields in TABLES.items() for line in table(name, dict(fields))]
    return f"{before.rstrip()}\n\n{MARK}{HEAD}{''.join(lines)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
