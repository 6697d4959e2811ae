"""Write docs/options.md: every field of the option classes, with its default and docstring.

python docs/list_options.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"
HEAD = """# Options

Made by `docs/list_options.py` from the classes. All are frozen and keyword-only, and a value that
cannot be used raises `InvalidRequestError`, which names the field, as the object is made. On the
command line a field is a flag of the same name ([`command_line.md`](command_line.md)).
"""
CLASSES = (
    ("EngineConfig", "config.py", "`AsyncEngine.from_pretrained(model, **fields)` takes them too."),
    ("MediaConfig", "config.py", "`EngineConfig(media=MediaConfig(...))`."),
    ("SamplingParams", "sampling_params.py", "One for each request."),
    ("StructuredOutputs", "sampling_params.py", "`SamplingParams(structured_outputs=...)`."),
)


def fields_of(name: str, file: str) -> list[tuple[str, str, str, str]]:
    """Each field's name, annotation, default and docstring, in the order of the class."""
    tree = ast.parse((ROOT / "aioengine" / file).read_text(encoding="utf-8"))
    (node,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    found = []
    for field, text in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant), (
            f"{name}.{field.target.id} has no docstring"
        )
        words = " ".join(str(text.value.value).split())
        annotation = ast.unparse(field.annotation)
        found.append((field.target.id, annotation, default_of(field.value), words))
    return found


def default_of(value: ast.expr | None) -> str:
    """A default as a user would write it."""
    if value is None:
        return "required"
    if isinstance(value, ast.Call):
        named = {each.arg: each.value for each in value.keywords}
        if "default" in named:
            return default_of(named["default"])
        text = ast.unparse(named["default_factory"])
        return "`{}`" if text == "dict" else f"`{text}()`"
    text = ast.unparse(value)
    parts = text.split(" * ")
    if len(parts) == 2 and parts[1] == "MIB":
        return f"{parts[0]} MiB"
    return f"{value.value:,}" if is_large(value) else f"`{text}`"


def is_large(value: ast.expr) -> bool:
    """Whether a number is easier to read with its thousands apart."""
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value >= 10_000


def table(name: str, file: str) -> str:
    """One class as a Markdown table."""
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field, annotation, default, words in fields_of(name, file):
        cells = (f"`{field}`", f"`{annotation}`", default, words)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    parts = [f"\n## {name}\n\n{note}\n\n{table(name, file)}\n" for name, file, note in CLASSES]
    return HEAD + "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
