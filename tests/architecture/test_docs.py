"""The documents say what is so."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

import aioengine
from aioengine import EngineConfig, MediaConfig, SamplingParams, StructuredOutputs
from tests.architecture.source import ROOT, files

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_EXAMPLE_LINES = 15
MAX_README_LINES = 80


def test_the_list_of_modules_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "list_modules.py"))
    text = script["PAGE"].read_text()
    assert text == script["page"](), "run docs/list_modules.py"
    assert text.count("\n- `") == len([path for path in files() if path.stem != "__init__"])


def test_the_files_that_vllm_s_names_lead_to_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, table = text.partition("## From vLLM's names to ours")
    paths = re.findall(r"`([\w/]+\.py)`", table.partition("\n## ")[0].partition("<!--")[0])
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / "aioengine" / path).exists(), path


def test_the_image_is_what_its_script_draws() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))
    assert script["DIAGRAM"].read_text() == script["draw"](), "run docs/draw_architecture.py"


def test_the_list_of_models_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "list_models.py"))
    assert script["PAGE"].read_text() == script["page"](), "run docs/list_models.py"


def test_readme_begins_with_a_tested_example() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    example = (ROOT / "examples" / "hello.py").read_text()
    assert shown[1] == example.partition('"""\n\n')[2]
    assert len([line for line in shown[1].splitlines() if line]) <= MAX_EXAMPLE_LINES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), target


def test_the_list_of_options_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "list_options.py"))
    text = script["PAGE"].read_text()
    assert text == script["page"](), "run docs/list_options.py"
    for options in (EngineConfig, MediaConfig, SamplingParams, StructuredOutputs):
        for field in dataclasses.fields(options):
            assert f"| `{field.name}` | " in text


def test_the_reference_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "list_api.py"))
    text = script["PAGE"].read_text()
    assert text == script["page"](), "run docs/list_api.py"
    for name in aioengine.__all__:
        assert name in ("errors", "__version__") or f"\n### {name}\n" in text, name


def test_the_tables_of_fields_are_what_their_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "list_fields.py"))
    assert script["PAGE"].read_text() == script["page"](), "run docs/list_fields.py"


def test_readme_is_one_screen() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MAX_README_LINES


def test_getting_started_names_every_example() -> None:
    page = (ROOT / "docs" / "getting_started.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in page


def test_readme_shows_commands_that_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"`?\bmake ([\w-]+)", (ROOT / "README.md").read_text()):
        assert command in targets
