"""Draws docs/architecture.svg: the floors, from pyproject.toml's contract, and a request's way.

python docs/draw_architecture.py
"""

from __future__ import annotations

import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIAGRAM = ROOT / "docs" / "architecture.svg"
WIDTH, HEIGHT = 1180, 700
SHELL, DEVICE, CORE, MODELS, ROOM, GROUND = (
    "#dbe7f6",
    "#f6e3d3",
    "#e2f0dc",
    "#efe0f0",
    "#f4efd6",
    "#e6e6e6",
)
FLOOR_HEIGHT = 112
FLOORS_WIDTH = 500
LANES = ((545, "event loop"), (770, "worker threads"), (995, "launch thread"))
LANE_WIDTH = 170

# Lane, top, colour, text. Boxes side by side are at work at the same time.
STATIONS = (
    (0, 70, SHELL, "generate(prompt, images)"),
    (1, 70, ROOM, "fetch; read the header; hash"),
    (1, 160, ROOM, "lay out: token ids and placeholder ranges"),
    (0, 160, CORE, "admit: a Request in the scheduler"),
    (0, 250, CORE, "schedule() → StepPlan"),
    (1, 340, ROOM, "decode and process the image"),
    (2, 250, DEVICE, "step: the text before the image"),
    (0, 430, CORE, "the image is ready; plan its encoding"),
    (2, 430, DEVICE, "encode: rows into the encoder cache"),
    (0, 520, CORE, "schedule(), commit() for every step"),
    (2, 520, DEVICE, "steps: the rest of the prompt, then a token each"),
    (0, 610, SHELL, "detokenise → TokenStream"),
)
STATION_HEIGHT = 56
WAYS = (
    (0, 1),
    (1, 2),
    (2, 3),
    (3, 4),
    (4, 6),
    (4, 5),
    (5, 7),
    (7, 8),
    (8, 9),
    (9, 10),
    (9, 11),
)


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{colour}" stroke="#555"/>'
    )


def words(x: float, y: float, text: str, *, size: int = 13, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {style}>{escape(text)}</text>'


def room(x: float, y: float, width: float, title: str, members: list[str], colour: str) -> str:
    """A box with a title and the names of the modules in it."""
    shapes = [box(x, y, width, FLOOR_HEIGHT - 14, colour)]
    shapes.append(words(x + 10, y + 20, title, style='font-weight="bold"'))
    for line, text in enumerate(textwrap.wrap("  ".join(members), int(width / 7.2))):
        shapes.append(words(x + 10, y + 42 + 18 * line, text))
    return "\n".join(shapes)


def modules_of(room: str) -> list[str]:
    """The files of a folder of aioengine/, in alphabetical order."""
    files = (ROOT / "aioengine" / room).glob("*.py")
    return sorted(file.stem for file in files if file.stem != "__init__")


def floors() -> list[str]:
    """The left half, from the layers that import-linter checks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["id"] == "floors")["layers"]
    shell, device, middle, rooms, ground = (
        layer.replace("|", ":").replace(" ", "").split(":") for layer in layers
    )
    rows = (
        [("shell: tasks, awaits, threads", shell, SHELL)],
        [("device side: plans become tensors", device, DEVICE)],
        [
            ("core: pure decisions", modules_of("core"), CORE),
            ("models", ["transformers'", "modules,", "adapted"], MODELS),
        ],
        [
            ("kernels", ["paged", "attention"], ROOM),
            ("processors", ["media", "and", "prompts"], ROOM),
            ("streams", ["queues", "and", "streams"], ROOM),
        ],
        [("ground: the standard library only", ground, GROUND)],
    )
    assert {"models", "core"} == set(middle)
    assert set(rooms) == {title for title, _, _ in rows[3]}
    shapes = [words(20, 40, "A floor imports only what lies below it", size=16)]
    for level, row in enumerate(rows):
        shares = (0.62, 0.38) if len(row) == 2 else (1 / len(row),) * len(row)
        x = 55.0
        y = 60 + level * (FLOOR_HEIGHT + 6)
        shapes.append(words(20, y + 54, f"L{4 - level}", size=15))
        for share, (title, members, colour) in zip(shares, row, strict=True):
            width = (FLOORS_WIDTH - 55) * share
            shapes.append(room(x, y, width - 6, title, members, colour))
            x += width
    return shapes


def request() -> list[str]:
    """The right half."""
    shapes = [words(545, 40, "The way of one request, from top to bottom", size=16)]
    for x, title in LANES:
        shapes.append(words(x + LANE_WIDTH / 2, 62, title, style='text-anchor="middle"'))
        shapes.append(
            f'<line x1="{x + LANE_WIDTH / 2:g}" y1="70" x2="{x + LANE_WIDTH / 2:g}" '
            f'y2="{HEIGHT - 20}" stroke="#bbb" stroke-dasharray="3 4"/>'
        )
    for start, end in WAYS:
        shapes.append(arrow(STATIONS[start], STATIONS[end]))
    for lane, top, colour, text in STATIONS:
        x = LANES[lane][0]
        shapes.append(box(x, top, LANE_WIDTH, STATION_HEIGHT, colour))
        lines = textwrap.wrap(text, 24)
        for line, part in enumerate(lines):
            y = top + STATION_HEIGHT / 2 + 5 + 17 * (line - (len(lines) - 1) / 2)
            shapes.append(words(x + LANE_WIDTH / 2, y, part, size=12, style='text-anchor="middle"'))
    return shapes


def arrow(start: tuple[int, int, str, str], end: tuple[int, int, str, str]) -> str:
    """From box to box: sideways between lanes, downwards within one."""
    (lane_1, top_1), (lane_2, top_2) = start[:2], end[:2]
    x_1, x_2 = LANES[lane_1][0], LANES[lane_2][0]
    if lane_1 == lane_2:
        points = (x_1 + LANE_WIDTH / 2, top_1 + STATION_HEIGHT, x_1 + LANE_WIDTH / 2, top_2)
    else:
        side = LANE_WIDTH if lane_2 > lane_1 else 0
        middle = STATION_HEIGHT / 2
        points = (x_1 + side, top_1 + middle, x_2 + LANE_WIDTH - side, top_2 + middle)
    ends = "".join(
        f' {key}="{value:g}"' for key, value in zip(("x1", "y1", "x2", "y2"), points, strict=True)
    )
    return f'<line{ends} stroke="#333" stroke-width="1.4" marker-end="url(#tip)"/>'


def draw() -> str:
    """Return the whole diagram as SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" fill="#222">'
    )
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#333"/></marker></defs>'
    )
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return "\n".join([head, tip, paper, *floors(), *request(), "</svg>"]) + "\n"


if __name__ == "__main__":
    DIAGRAM.write_text(draw())
