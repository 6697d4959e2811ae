"""Runs the example of pydantic-ai with a model that is made to call its tools."""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.scripts import script_all
from tests.support.tools_model import save_tiny_caller

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


def main() -> None:
    """Run it; it prints the answer."""
    folder = Path(tempfile.mkdtemp())
    save_tiny_caller(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["example", str(folder), "What is six times seven?"])
        script_all(patch, lambda prompt: "It is 42." if "42" in prompt else CALL)
        runpy.run_path(str(ROOT / "examples" / "pydantic_agent.py"), run_name="__main__")


main()
