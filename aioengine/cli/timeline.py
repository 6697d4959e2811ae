"""An image of who did what when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aioengine.instruments import StageSpan

__all__ = ["draw_timeline"]

LEGEND = {
    "fetch": ("#7f8c8d", "fetch the file"),
    "decode": ("#2980b9", "decode the image"),
    "process": ("#16a085", "resize and normalise"),
    "encode": ("#c0392b", "vision encoder"),
    "step": ("#b39ddb", "part of a decoder step"),
}
"""Stage -> its colour and its meaning."""


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
