"""Words of the source: no model's name outside `models/`, docstrings on every setting, openers."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source import ROOT, files, tree

FAMILIES = (
    "llava|clip|siglip|llama|qwen|mistral|mixtral|pixtral|gemma|phi|bart|mbart|whisper|blip|fuyu|"
    "molmo|internvl|chameleon|florence|deepseek|idefics|paligemma|bert|vit|dinov2|falcon|granite"
)
ABOUT_THE_DEMO = ("__init__.py", "demo.py")
"""The shipped model's folder has a name, and whoever shows the model says what it is."""

OPENERS = (
    "what|who|whose|where|those|as|whether|how|why|when|which|that|of|in|to|for|from|with|by|at|on|"
    "if|it|they|there|this|these|here|so|many|much"
)
"""Words that no docstring opens with: it opens with an imperative verb or a noun phrase."""


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    opener = re.compile(rf"\W*({OPENERS})\b", re.IGNORECASE)
    wrong, count = [], 0
    for path in files():
        for node in ast.walk(tree(path)):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            text = ast.get_docstring(node)
            if text is None:
                continue
            count += 1
            if opener.match(text):
                wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert count > 1000
    assert not wrong, "\n".join(wrong)


def test_no_model_is_named_outside_models() -> None:
    family = re.compile(rf"(?<![a-z])({FAMILIES})(?![a-z])", re.IGNORECASE)
    for path in files("aioengine", "kernels", "streams"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if path.name in ABOUT_THE_DEMO and ("demo model" in line or "demo_llava" in line):
                continue
            assert not family.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("config", "EngineConfig"),
        ("config", "MediaConfig"),
        ("sampling_params", "SamplingParams"),
        ("sampling_params", "StructuredOutputs"),
    ],
)
def test_every_setting_says_what_it_means(module: str, name: str) -> None:
    (node,) = (
        node
        for node in tree(ROOT / "aioengine" / f"{module}.py").body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    fields = [
        (statement.target.id, following)
        for statement, following in zip(node.body, node.body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    assert fields
    silent = [
        field
        for field, following in fields
        if not (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
    ]
    assert not silent, f"{name}: no docstring after {', '.join(silent)}"


def test_every_module_says_what_it_is() -> None:
    for path in files():
        assert ast.get_docstring(tree(path)), path.relative_to(ROOT)


def test_everything_is_annotated() -> None:
    for path in files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                assert node.returns is not None, where
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for argument in arguments:
                    known = argument.annotation is not None or argument.arg in ("self", "cls")
                    assert known, f"{where}({argument.arg})"
