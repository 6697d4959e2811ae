"""The figure of docs/benchmarks.md: a panel for each workload, a bar for each contender."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ORDER = ("aioengine", "vllm", "openvino", "transformers", "transformers, one by one")
NAMES = {
    "aioengine": "aioengine",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
    "transformers, one by one": "… one by one",
}
COLOURS = {
    "aioengine": "#1b6ca8",
    "vllm": "#b8b8b8",
    "openvino": "#9a9a9a",
    "transformers": "#cfcfcf",
    "transformers, one by one": "#e2e2e2",
}
PANELS = {
    "W1": ("W1  16 images at once, cold", "tokens per second", "more is better"),
    "W2": ("W2  the same again, warm", "tokens per second", "more is better"),
    "W3": ("W3  import to ready", "seconds", "less is better"),
    "W4": ("W4  eight Full HD images", "seconds to the first token", "less is better"),
    "W5": ("W5  event loop under 32 4K images", "ms late, 99th percentile", "less is better"),
    "W6": ("W6  Whisper tiny.en, 16 clips", "clips per second", "more is better"),
}


def values_of(name: str, one: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = one["lag_ms_p99"] if name == "W5" else one["median"]
    return found


def shown(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def panel(axes: Axes, name: str, one: dict[str, Any]) -> None:
    values = values_of(name, one)
    entrants = [entrant for entrant in ORDER if entrant in values]
    heights = [values[entrant] for entrant in entrants]
    labels = [NAMES[entrant] for entrant in entrants]
    places = range(len(entrants))
    axes.barh(places, heights, color=[COLOURS[entrant] for entrant in entrants], height=0.68)
    for place, entrant, height in zip(places, entrants, heights, strict=True):
        label = shown(height)
        if name == "W5":
            label += f"  (worst {shown(one['lag_ms_max'][entrant])})"
        weight = "bold" if entrant == "aioengine" else "normal"
        axes.annotate(
            label,
            (height, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
            fontweight=weight,
        )
    title, unit, direction = PANELS[name]
    axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", pad=8)
    axes.set_xlabel(f"{unit} ({direction})", fontsize=10.5)
    axes.set_yticks(list(places), labels, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, max(heights) * (1.6 if name == "W5" else 1.22))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9.5, colors="#555555")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")


def caption(results: dict[str, Any]) -> str:
    machine = results["machine"] or {}
    flags = ", ".join(flag for flag in machine.get("flags", [])) or "no vector flags known"
    versions = ", ".join(
        f"{name} {version.partition('-')[0].partition('+')[0]}"
        for name, version in results["versions"].items()
    )
    return (
        f"{machine.get('threads')} cores of {machine.get('cpu')} ({flags}), {machine.get('dtype')} "
        f"for everybody; LLaVA of 0.29 B parameters, random weights, W6: Whisper tiny.en.\n"
        f"Medians over rounds taken in turns. {versions}."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the figure."""
    names = [name for name in PANELS if name in results["workloads"]]
    num_rows = -(-len(names) // 2)
    figure, grid = plt.subplots(num_rows, 2, figsize=(12, 2.75 * num_rows + 0.7), squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        panel(axes, name, results["workloads"][name])
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    figure.text(0.012, 0.012, caption(results), fontsize=9.5, color="#444444", va="bottom")
    figure.tight_layout(rect=(0, 0.065, 1, 1), h_pad=2.0, w_pad=2.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)
