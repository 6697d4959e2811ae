"""Write docs/api.md: the public names, their signatures and docstrings.

python docs/list_api.py
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from aioengine.errors import AioEngineError

PAGE = Path(__file__).resolve().parent / "api.md"
HEAD = """# API reference

Made by `docs/list_api.py` from signatures and docstrings. What may be set is on a page of its own:
[`options.md`](options.md). [`getting_started.md`](getting_started.md) has examples.
"""
MODULES = (
    ("aioengine", "The engine and all that goes in and out. Importing it loads no torch."),
    ("aioengine.errors", "Every error that is raised on purpose, below one root."),
    ("aioengine.asgi", "An engine as a web application; needs the extra `serve`."),
    ("aioengine.metrics", "Prometheus; needs `prometheus-client`, which is in `serve`."),
    ("aioengine.tracing", "OpenTelemetry; needs the extra `telemetry`."),
    ("aioengine.instruments", "Listeners of an engine's events and spans: `engine.instruments`."),
    ("aioengine.ray_serve", "Replicas behind Ray Serve; needs the extra `ray`."),
    ("aioengine.processors", "For families of your own: their processing."),
    ("aioengine.models", "For families of your own: their models."),
)
LISTED = {"EngineConfig", "MediaConfig", "SamplingParams", "StructuredOutputs"}
"""Classes whose fields docs/options.md lists."""
MAX_LINE = 100


def entry(name: str, value: Any) -> Iterator[str]:
    """One public name's lines."""
    if inspect.ismodule(value):
        return
    yield f"### {name}\n"
    if not callable(value):
        has_text = type(value).__module__.startswith("aioengine")
        yield text(value) if has_text else f"`{name}`: {shown(value)}\n"
        return
    is_plain = inspect.isclass(value) and (
        dataclasses.is_dataclass(value) or issubclass(value, enum.Enum | AioEngineError | tuple)
    )
    if not is_plain:
        yield block(signature(name, value))
    if inspect.isclass(value) and issubclass(value, AioEngineError):
        yield f"A kind of `{value.__bases__[0].__name__}`.\n"
    yield text(value)
    if inspect.isclass(value):
        yield from members(name, value)


def members(name: str, value: type[Any]) -> Iterator[str]:
    """Lines for the fields and the public methods of a class."""
    if issubclass(value, enum.Enum):
        yield "".join(f"- `{each.name}` = `{each.value!r}`\n" for each in value)
    elif name in LISTED:
        yield f"Fields: [`options.md`](options.md#{name.lower()}).\n"
    elif dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        yield "".join(f"- `{each.name}: {each.type}`\n" for each in fields if each.init)
    for member, found in own_members(value):
        if member.startswith("_") or not is_documented(found):
            continue
        if isinstance(found, property | cached_property):
            yield f"**`{name}.{member}`**\n"
        else:
            inner = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            yield block(signature(f"{name}.{member}", inner))
        yield text(found)


def own_members(value: type[Any]) -> Iterator[tuple[str, Any]]:
    """Members of a class, and of bases of ours that only exist for it."""
    for owner in value.__mro__:
        is_ours = owner.__module__.startswith("aioengine.engine.")
        if owner is value or (is_ours and owner.__name__ not in ("AsyncEngine", "Engine")):
            yield from vars(owner).items()


def is_documented(found: object) -> bool:
    """Whether a member of a class is one that a user calls or reads."""
    if isinstance(found, type) or found is None:
        return False
    is_method = inspect.isfunction(found) or isinstance(found, classmethod | staticmethod)
    is_value = isinstance(found, property | cached_property)
    return (is_method or is_value) and bool(inspect.getdoc(found))


def signature(name: str, value: Callable[..., Any]) -> str:
    """A call as it is written in source, over several lines where it is long."""
    found = inspect.signature(value)
    parameters = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    found = found.replace(parameters=parameters)
    prefix = "async " if inspect.iscoroutinefunction(value) else ""
    line = f"{prefix}{name}{found}".replace("'", "")
    if len(line) <= MAX_LINE:
        return line
    arrow = f" -> {found.return_annotation}" if " -> " in line else ""
    inner = str(found.replace(return_annotation=inspect.Signature.empty)).replace("'", "")[1:-1]
    parts = [str(each).replace("'", "") for each in parameters]
    marks = inner.split(", ")
    if "*" in marks:
        keyword = next(i for i, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY)
        parts.insert(keyword, "*")
    lines = "".join(f"    {part},\n" for part in parts)
    return f"{prefix}{name}(\n{lines}){arrow}"


def block(code: str) -> str:
    """Code, apart from the text."""
    return f"```\n{code}\n```\n"


def text(value: object) -> str:
    """A docstring as a paragraph or more."""
    return (inspect.getdoc(value) or "") + "\n"


def shown(value: object) -> str:
    """A constant or a type alias."""
    return f"`{value!r}`".replace("typing.", "").replace("collections.abc.", "")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for module_name, note in MODULES:
        module = import_module(module_name)
        parts.append(f"## {module_name}\n\n{note}\n")
        for name in sorted(module.__all__, key=str.lower):
            if name != "__version__":
                parts += entry(name, getattr(module, name))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
