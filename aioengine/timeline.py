"""A picture of who did what when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aioengine.instruments import STAGES, StageSpan

__all__ = ["draw_timeline"]

COLOURS = {
    "fetch": "#7f8c8d",
    "decode": "#2980b9",
    "process": "#16a085",
    "encode": "#c0392b",
    "step": "#8e44ad",
}


def draw_timeline(spans: Sequence[StageSpan], path: Path) -> Path | None:
    """Draw one lane a stage into a PNG file; None if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    stages = [stage for stage in STAGES if any(span.stage == stage for span in spans)]
    zero = min((span.start for span in spans), default=0.0)
    figure = Figure(figsize=(10, 1.2 + 0.55 * len(stages)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for lane, stage in enumerate(stages):
        bars = [
            ((span.start - zero) * 1e3, max((span.end - span.start) * 1e3, 0.05))
            for span in spans
            if span.stage == stage
        ]
        axes.broken_barh(
            bars, (lane - 0.4, 0.8), facecolors=COLOURS[stage], edgecolors="white", linewidth=0.3
        )
    axes.set_yticks(range(len(stages)), [f"{s} ({_count(spans, s)})" for s in stages])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title("Stages of all requests, side by side", loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    return path


def _count(spans: Sequence[StageSpan], stage: str) -> int:
    return sum(span.stage == stage for span in spans)
