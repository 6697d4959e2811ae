"""Every block of Python in the documents for newcomers runs as it stands."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import ROOT
from tests.examples.conftest import skip_unless_shipped

PAGES = ("README.md", "docs/getting_started.md", "docs/from_vllm.md", "docs/from_transformers.md")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
async def test_its_blocks_run(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as in a notebook: names go on, and `await` stands by itself."""
    skip_unless_shipped()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "blocks"}
    code = blocks(page)
    assert code
    for block in code:
        if "asyncio.run(" in block:  # a whole script; the loop is this test's
            block = block.replace("asyncio.run(main())", "await main()").replace(
                'if __name__ == "__main__":', "if True:"
            )
        compiled = compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, names)
        if inspect.iscoroutine(result):
            await result
    assert "square" in capsys.readouterr().out
