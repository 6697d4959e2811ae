"""The example notebook in a real kernel: every cell, and every cell a second time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.examples.conftest import skip_unless_shipped

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
THREADS = """
import threading
print(*sorted(each.name for each in threading.enumerate() if each.name.startswith("aioengine")))
"""


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The notebook, whose cells a test may repeat; its kernel has to end quietly."""
    skip_unless_shipped()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    yield nbformat.read(NOTEBOOK, as_version=4)


def run(notebook: Any, folder: Path) -> None:
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": folder}}).execute()


def texts(cell: Any) -> list[str]:
    """What a cell shows, but for progress bars."""
    return [
        output["text"] if output.output_type == "stream" else output["data"]["text/plain"]
        for output in cell.outputs
        if output.output_type != "stream" or output.name != "stderr"
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_every_cell_twice(cells: Any, tmp_path: Path) -> None:
    code = [cell for cell in cells.cells if cell.cell_type == "code"]
    *work, closing = code
    doubled = [copy for cell in work for copy in (cell, nbformat.from_dict(dict(cell)))]
    threads = [nbformat.v4.new_code_cell(THREADS) for _ in range(2)]
    cells.cells = [*doubled, threads[0], closing, threads[1]]
    run(cells, tmp_path)
    made, _, picture, _, answer, answer_again, stream, _, many, _, awaited, awaited_again = doubled
    assert texts(made) == ["<Engine demo_llava is new>"]
    assert "image/png" in picture.outputs[0].data
    (shown,) = texts(answer)
    assert shown.startswith("<RequestOutput '") and texts(answer_again) == [shown]
    (text,) = texts(awaited)
    assert texts(awaited_again) == [text] and eval(text) in shown
    assert "".join(texts(stream)) == eval(text)
    assert len(eval(texts(many)[0])) == 8 and eval(texts(many)[0])[0] == eval(text)
    # Those that were replaced are gone.
    assert texts(threads[0])[0].split().count("aioengine-device") == 2
    assert texts(closing) == ["(<Engine demo_llava is closed>, <AsyncEngine demo_llava is closed>)"]
    assert texts(threads[1]) == ["\n"]
    for cell in cells.cells:
        said = "".join(each.text for each in cell.outputs if each.get("name") == "stderr")
        # A bar, or transformers' own import of tqdm, which warns where a notebook has no widgets.
        assert not said or "%|" in said or "TqdmWarning" in said, said


def test_it_is_kept_without_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert "aioengine._" not in cell.source and os.sep + "tmp" not in cell.source
