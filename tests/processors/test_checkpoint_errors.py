"""What messages say of a checkpoint, and leave out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aioengine.processors.checkpoint_errors import shown, without_folders


def test_a_folder_is_shown_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "deep" / "model") == "model"
    assert shown(str(tmp_path / "nowhere")) == "nowhere"
    assert shown("deep/model") == "model"
    assert shown(Path("deep/other")) == "other"
    assert shown(".") == tmp_path.name
    assert shown("some-team/some-model") == "some-team/some-model"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("no file {folder}/config.json", "no file model/config.json"),
        ("'{folder}' is odd\nand more", "'model' is odd"),
        ("see /some/where/hub/abc/config.json, or a/b", "see config.json, or a/b"),
        ("see scheme://some.host/some/page", "see scheme://some.host/some/page"),
        ("", ""),
    ],
)
def test_folders_on_the_way_are_left_out(tmp_path: Path, said: str, kept: str) -> None:
    folder = tmp_path / "model"
    assert without_folders(ValueError(said.format(folder=folder)), folder) == kept
    relative = os.path.relpath(folder)
    assert without_folders(ValueError(said.format(folder=folder)), relative) == kept


def test_long_ones_are_cut() -> None:
    assert len(without_folders(ValueError("x" * 10_000), "model")) < 310
