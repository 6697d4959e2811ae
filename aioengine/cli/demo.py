"""`aioengine demo`: images described side by side, and how it went."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from aioengine import (
    AsyncEngine,
    EngineStatistics,
    MediaConfig,
    RequestOutput,
    SamplingParams,
    demo_images,
)
from aioengine.cli.checks import check_items
from aioengine.cli.loading import new_runner
from aioengine.cli.options import DEMO, MODEL, Commands, checked, decimal, model_source
from aioengine.cli.prompts import chat_message
from aioengine.instruments import StageSpan, TraceRecorder
from aioengine.streams.together import run_together

__all__ = ["add_parser", "run"]

DESCRIBE = "Describe the picture."
QUESTION = "How many objects are there?"
NEXT_STAGE = {
    "fetch": "lay out",
    "decode": "process",
    "process": "encode",
    "encode": "prefill",
    "step": "prefill",
}
"""What a request waits for once a stage has worked for it, until its first token."""

LEGEND = {
    "fetch": ("#7f8c8d", "fetch the file"),
    "decode": ("#2980b9", "decode the image"),
    "process": ("#16a085", "resize and normalise"),
    "encode": ("#c0392b", "vision encoder"),
    "step": ("#b39ddb", "part of a decoder step"),
}
"""Stage -> its colour and its meaning."""


@dataclass
class Row:
    """One request on the display."""

    image: Path
    stage: str = "fetch"
    num_tokens: int = 0
    text: str = ""
    output: RequestOutput | None = None
    inter_token_s: list[float] = field(default_factory=list)


def add_parser(commands: Commands) -> None:
    """The flags of the command."""
    parser = commands.add_parser("demo", help="describe images with the demo model, all at once")
    parser.add_argument(
        "images", nargs="*", type=_image_file, help="image files (default: the shipped)"
    )
    parser.add_argument("--model", type=model_source, default=DEMO, help=MODEL)
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the timeline goes")
    parser.add_argument(
        "--max-tokens",
        type=checked(decimal, bool, "a positive number"),
        default=96,
        metavar="N",
        help="of each answer (default: 96)",
    )
    parser.set_defaults(run=run)


def _image_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    check_items([("image", path) for path in options.images], MediaConfig())
    with new_runner() as runner:
        runner.run(run_demo(options))


async def run_demo(options: argparse.Namespace) -> None:
    """Describe all images at once, ask one more question about each, and report."""
    console = Console()
    images = options.images or demo_images()
    console.print(
        "The demo model is a small LLaVA trained on rendered shapes and digits. It is real, and it "
        "knows nothing of photographs."
    )
    trace = TraceRecorder()
    begin = time.perf_counter()
    async with AsyncEngine.from_pretrained(options.model) as engine:
        console.print(f"loaded in {time.perf_counter() - begin:.2f} s")
        engine.instruments.listeners.append(trace)
        ask = partial(_round, engine, console, images, options.max_tokens)
        described = await ask("describe", DESCRIBE)
        console.print(f"\nOne more question about each: {QUESTION!r}")
        asked = await ask("ask", QUESTION)
        _report(console, {"describe": described, "ask": asked}, engine.statistics())
    options.out.mkdir(parents=True, exist_ok=True)
    trace.write(options.out / "trace.json")
    console.print(f"timeline: {options.out / 'trace.json'} (open it in Perfetto)")
    drawn = draw_timeline(trace.spans, options.out / "timeline.png")
    console.print(f"          {drawn or '(no PNG: matplotlib is missing)'}")


async def _round(
    engine: AsyncEngine,
    console: Console,
    images: Sequence[Path],
    max_tokens: int,
    title: str,
    question: str,
) -> tuple[list[Row], float]:
    """One request for each image, all at once; the rows and the seconds that it took."""
    rows = [Row(image) for image in images]
    names = {f"{title} {row.image.stem}": row for row in rows}

    def listen(span: StageSpan) -> None:
        for name in span.requests:
            row = names.get(name)
            if row is not None and not row.num_tokens:
                row.stage = NEXT_STAGE.get(span.stage, row.stage)

    engine.instruments.listeners.append(listen)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    begin = time.perf_counter()
    try:
        with _display(console, rows):
            await run_together(
                _describe(engine, console, name, row, question, params)
                for name, row in names.items()
            )
    finally:
        engine.instruments.listeners.remove(listen)
    return rows, time.perf_counter() - begin


async def _describe(
    engine: AsyncEngine,
    console: Console,
    name: str,
    row: Row,
    question: str,
    params: SamplingParams,
) -> None:
    messages = [chat_message(question, [("image", row.image)])]
    async with engine.stream(messages, params, request_id=name) as stream:
        before = time.perf_counter()
        async for delta in stream:
            now = time.perf_counter()
            if row.num_tokens:
                row.inter_token_s.append((now - before) / max(1, len(delta.token_ids)))
            before = now
            row.stage = "decode tokens"
            row.num_tokens += len(delta.token_ids)
            row.text += delta.text
        row.output = await stream.result()
    row.stage = "done"
    if not console.is_terminal:
        console.print(f"{row.image.name}: {row.text.strip()}", soft_wrap=True)


def _display(console: Console, rows: Sequence[Row]) -> AbstractContextManager[object]:
    """A table that follows the rows, where there is a terminal."""
    if not console.is_terminal:
        return nullcontext()
    return Live(get_renderable=lambda: _live_table(rows), console=console, refresh_per_second=12)


def _live_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("image", no_wrap=True)
    table.add_column("stage", no_wrap=True, min_width=13)
    table.add_column("tokens", justify="right")
    table.add_column("text")
    for row in rows:
        table.add_row(row.image.name, row.stage, str(row.num_tokens), row.text.strip())
    return table


def _report(
    console: Console, rounds: dict[str, tuple[list[Row], float]], statistics: EngineStatistics
) -> None:
    table = Table(box=None, pad_edge=False, title_justify="left")
    for column in ("", "requests", "first token (median / last)", "between tokens", "tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, (rows, took) in rounds.items():
        first = sorted(
            row.output.timings.first_token or 0.0 for row in rows if row.output is not None
        )
        between = sorted(gap for row in rows for gap in row.inter_token_s) or [0.0]
        num_tokens = sum(row.num_tokens for row in rows)
        table.add_row(
            name,
            str(len(rows)),
            f"{first[len(first) // 2] * 1e3:.0f} / {first[-1] * 1e3:.0f} ms",
            f"{between[len(between) // 2] * 1e3:.1f} ms",
            f"{num_tokens / took:.0f}",
        )
    console.print()
    console.print(table)
    encoded = statistics.encoder_cache_hits + statistics.encoder_cache_misses
    console.print(
        f"\nencoder cache: {statistics.encoder_cache_hits} of {encoded} items found, "
        f"{statistics.encoder_items_run} encoded\n"
        f"prefix cache:  {statistics.prefix_hit_tokens} of {statistics.prefix_query_tokens} "
        f"prompt tokens found"
    )


def draw_timeline(spans: Sequence[StageSpan], path: Path) -> Path | None:
    """Draw one lane a request into a PNG file; None if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return None
    requests = list(dict.fromkeys(name for span in spans for name in span.requests))
    zero = min((span.start for span in spans), default=0.0)
    figure = Figure(figsize=(11, 1.6 + 0.26 * len(requests)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # Steps first: what went on at the same time lies over them.
    order = sorted(LEGEND, key="step".__ne__)
    for lane, request in enumerate(requests):
        for stage in order:
            bars = [
                ((span.start - zero) * 1e3, (span.end - span.start) * 1e3)
                for span in spans
                if span.stage == stage and request in span.requests
            ]
            axes.broken_barh(bars, (lane - 0.38, 0.76), facecolors=LEGEND[stage][0])
    axes.set_yticks(range(len(requests)), requests, fontsize=8)
    axes.set_ylim(len(requests) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds")
    axes.set_title("What was done for each request, and when", loc="left", fontsize=11)
    handles = [Patch(color=colour, label=meaning) for colour, meaning in LEGEND.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(LEGEND), fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    return path
