"""`aioengine demo` with a tiny model in the shipped one's place."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Command


def test_the_demo(command: Command, folder: Path, image_files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command("demo", *image_files, "--model", folder, "--out", out, "--max-tokens", "4")
    assert done.status == 0
    lines = done.out.splitlines()
    for path in image_files:
        assert sum(line.startswith(f"{path.name}: ") for line in lines) == 2
    assert any(line.startswith("encoder cache: 2 of 4 items found, 2 encoded") for line in lines)
    names = {str(event["name"]).split()[0] for event in trace(out)}
    assert {"fetch", "decode", "process", "encode", "step"} <= names
    assert (out / "timeline.png").stat().st_size > 0


def trace(folder: Path) -> list[dict[str, object]]:
    events: list[dict[str, object]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return events
