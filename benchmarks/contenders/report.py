"""From answers to figures: medians, ratios within rounds, and whether all made the same tokens."""

from __future__ import annotations

import platform
import statistics
from pathlib import Path
from typing import Any

OURS = "aioengine"
UNITS = {
    "W1": "tokens/s",
    "W2": "tokens/s",
    "W3": "s",
    "W4": "s",
    "W5": "ms",
    "W6": "clips/s",
}
TITLES = {
    "W1": "16 images, cold",
    "W2": "the same again, warm",
    "W3": "import to ready",
    "W4": "eight 1920x1080 images: first token",
    "W5": "event loop under 32 4K images",
    "W6": "Whisper tiny.en, 16 clips",
}
AIMS = {
    "W1": "1.25 times the best peer",
    "W2": "2.2 times the best peer",
    "W3": "4 s",
    "W4": "0.5 of vLLM's",
    "W5": "p99 3 ms, worst 12 ms",
    "W6": "2 times transformers, batched",
}


def condense(workload: str, measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What is kept of the answers to one workload: numbers, without tokens and texts."""
    kept: dict[str, Any] = {
        "samples": {
            name: [_numbers(workload, answer) for answer in answers]
            for name, answers in measured.items()
        }
    }
    if workload in ("W1", "W2", "W4"):
        kept["prompt_tokens"] = {
            name: sorted(set(answers[-1]["prompt_tokens"])) for name, answers in measured.items()
        }
        kept["equal_to_transformers"] = _equal(measured, "tokens")
    if workload == "W6":
        kept["equal_to_transformers"] = _equal(measured, "texts")
    stages = [answer.get("stages_s") for answer in measured.get(OURS, [])]
    if stages and stages[-1]:
        kept["stages_s"] = stages[-1]
    return kept


def _numbers(workload: str, answer: dict[str, Any]) -> dict[str, Any]:
    if workload == "W5":
        return answer
    if workload == "W3":
        return {key: answer[key] for key in ("ready_s", "first_token_s") if key in answer}
    found = {"seconds": round(answer["seconds"], 4), "stolen": answer["stolen"]}
    if workload in ("W1", "W2"):
        counts = answer.get("num_tokens") or [len(tokens) for tokens in answer["tokens"]]
        found["rate"] = round(sum(counts) / answer["seconds"], 2)
        if answer.get("first_token_s") is not None:
            found["first_token_s"] = round(answer["first_token_s"], 3)
    if workload == "W6":
        found["rate"] = round(len(answer["texts"]) / answer["seconds"], 3)
    return found


def _equal(measured: dict[str, list[dict[str, Any]]], what: str) -> dict[str, str]:
    """How many outputs equal those of transformers' batch, and the same tokens before the first
    that differs."""
    found = {}
    for name, answers in measured.items():
        pairs = [
            (mine, theirs)
            for answer, other in zip(answers, measured.get("transformers", []), strict=False)
            for mine, theirs in zip(answer.get(what, []), other[what], strict=False)
        ]
        if name == "transformers" or not pairs:
            continue
        found[name] = f"{sum(mine == theirs for mine, theirs in pairs)} of {len(pairs)}"
    return found


def machine(dtype: str, threads: int) -> dict[str, Any]:
    """What everything ran on."""
    model = platform.processor() or platform.machine()
    flags: list[str] = []
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            if key.strip() == "flags":
                flags = [flag for flag in value.split() if flag in ("avx2", "avx512f")]
                flags += [flag for flag in value.split() if "bf16" in flag]
    except OSError:
        pass
    return {"cpu": model, "flags": flags, "threads": threads, "dtype": dtype}


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """Medians and ratios of everything measured so far."""
    found = {
        name: _summarize_one(name, measured)
        for name, measured in sorted(results["workloads"].items())
    }
    return {
        "machine": results.get("machine"),
        "versions": results["versions"],
        "workloads": found,
    }


def _summarize_one(name: str, measured: dict[str, Any]) -> dict[str, Any]:
    samples = measured["samples"]
    one: dict[str, Any] = {"unit": UNITS[name], "aim": AIMS[name]}
    if name == "W5":
        keys = ("lag_ms_p50", "lag_ms_p99", "lag_ms_max", "held_ms_p99", "held_ms_max")
        keys += ("seconds", "streamed_tokens", "stolen")
        for key in keys:
            one[key] = {
                entrant: round(statistics.median(each[key] for each in those), 2)
                for entrant, those in samples.items()
                if all(key in each for each in those)
            }
        return one
    key = {"W3": "ready_s", "W4": "seconds"}.get(name, "rate")
    for label in ("median", "first_token_s", "stolen"):
        each = key if label == "median" else label
        values = {
            entrant: round(statistics.median(sample[each] for sample in those), 3)
            for entrant, those in samples.items()
            if all(each in sample for sample in those)
        }
        if values:
            one[label] = values
    one["ours_over"] = {
        entrant: round(
            statistics.median(
                mine[key] / other[key] for mine, other in zip(samples[OURS], those, strict=False)
            ),
            2,
        )
        for entrant, those in samples.items()
        if entrant != OURS
    }
    one["rounds"] = len(samples[OURS])
    extra = ("prompt_tokens", "equal_to_transformers", "stages_s")
    return one | {key: measured[key] for key in extra if measured.get(key)}


def table(found: dict[str, Any]) -> str:
    """For those who read it on a terminal."""
    lines = [f"{found['machine']}", f"{found['versions']}"]
    for name, one in found["workloads"].items():
        lines.append(f"{name} {TITLES[name]} ({one['unit']}); the aim: {one['aim']}")
        for key, value in one.items():
            if isinstance(value, dict):
                lines.append(f"    {key}: " + ", ".join(f"{k} {v}" for k, v in value.items()))
    return "\n".join(lines)
