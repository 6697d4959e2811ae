"""Write the list of rooms and files in docs/architecture.md, from the docstrings they begin with.

python docs/list_modules.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
MARK = "<!-- From here on: docs/list_modules.py -->\n"
ROOMS = ("aioengine", "models", "kernels", "processors", "streams")
"""From the top floor downwards."""


def list_folder(folder: Path) -> str:
    """One folder as a heading, the summary of its package, and its files; then those inside."""
    files = sorted(folder.glob("*.py"), key=lambda path: path.stem)
    own = [path for path in files if path.stem != "__init__"]
    inside = sorted(path.parent for path in folder.glob("*/__init__.py"))
    lines = [f"## `{folder.relative_to(ROOT)}/`", "", summary(folder / "__init__.py"), ""]
    lines += [f"- `{path.name}`: {summary(path)}" for path in own]
    parts = ["\n".join(lines) + "\n"]
    parts += [list_folder(path) for path in inside if not path.is_symlink()]
    return "\n".join(parts)


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def page() -> str:
    """The page, its list made anew."""
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    return head + mark + "\n" + "\n".join(list_folder(ROOT / room) for room in ROOMS)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
