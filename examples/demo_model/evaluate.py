"""Measures the saved demo model on held-out scenes and writes ``evaluation.json``.

    python examples/demo_model/evaluate.py

Everything goes the way a user's request would: saved processor, Hugging Face ``generate``, greedy.
An answer counts only where it equals the expected text to the last character.
"""

import argparse
import datetime
import io
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import PIL
import scenes
import torch
import transformers
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "aioengine" / "assets" / "demo_llava"


@dataclass(frozen=True)
class Item:
    """One prompt about one held-out scene."""

    kind: str
    seed: int
    text: str
    answer: str


class Model:
    """The saved model with its processor."""

    def __init__(self, folder: Path, threads: int = 2) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        model: Any = LlavaForConditionalGeneration.from_pretrained(folder)
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def answer(self, images: Sequence[Image.Image], texts: Sequence[str]) -> list[str]:
        """Greedy answers to one question about each image."""
        prompts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}],
                add_generation_prompt=True,
            )
            for text in texts
        ]
        inputs = self.processor(
            text=prompts,
            images=list(images),
            padding=True,
            add_special_tokens=False,
            return_tensors="pt",
        ).to(self.device)
        output = self.model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        answers: list[str] = self.processor.batch_decode(output, skip_special_tokens=True)
        return answers


# ---------------------------------------------------------------------------------------------
# Ways an image may arrive


def as_drawn(seed: int) -> Image.Image:
    """480 px square, no compression."""
    return scenes.draw(scenes.make_layout(seed), 480)


def as_jpeg(seed: int) -> Image.Image:
    """300 to 800 px square through JPEG at quality 85."""
    image = scenes.draw(scenes.make_layout(seed), Random(seed).randint(300, 800))
    return _through_jpeg(image, 85)


def as_odd(seed: int) -> Image.Image:
    """64 to 2000 px, sides up to a third apart, through JPEG at quality 60 to 95."""
    rng = Random(seed)
    short = round(64 * (1500 / 64) ** rng.random())
    long = round(short * rng.uniform(1.0, 1.33))
    size = (short, long) if rng.random() < 0.5 else (long, short)
    return _through_jpeg(scenes.draw(scenes.make_layout(seed), size), rng.randint(60, 95))


def _through_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


WAYS: dict[str, tuple[Callable[[int], Image.Image], int]] = {
    "480 px": (as_drawn, 0),
    "300-800 px, JPEG quality 85": (as_jpeg, 20_000),
    "64-2000 px, not square, JPEG quality 60-95": (as_odd, 40_000),
}
"""Each way with the offset of its first seed in HELD_OUT_SEEDS."""


# ---------------------------------------------------------------------------------------------
# Measuring


def items(first: int, count: int) -> Iterator[Item]:
    """``count`` items of each kind, from as many scenes as that takes."""
    left = dict.fromkeys(("description", *scenes.QUESTION_KINDS), count)
    for seed in scenes.HELD_OUT_SEEDS[first:]:
        if not any(left.values()):
            return
        things, rng = scenes.make_layout(seed).things, Random(seed + 1)
        prompt = rng.choice(scenes.DESCRIPTION_PROMPTS)
        found = [Item("description", seed, prompt, scenes.describe(things))]
        found += [Item(q.kind, seed, q.text, q.answer) for q in scenes.ask(things, rng)]
        for item in found:
            if left[item.kind] > 0:
                left[item.kind] -= 1
                yield item


def measure(
    model: Model, way: Callable[[int], Image.Image], first: int, count: int, batch: int = 50
) -> dict[str, Any]:
    """Exactly right answers per kind, and the seeds used."""
    # Sorted by kind, so that a batch's answers are of about one length.
    wanted = sorted(items(first, count), key=lambda item: item.kind)
    right = dict.fromkeys(("description", *scenes.QUESTION_KINDS), 0)
    faults = []
    for start in range(0, len(wanted), batch):
        chunk = wanted[start : start + batch]
        answers = model.answer([way(item.seed) for item in chunk], [item.text for item in chunk])
        for item, answer in zip(chunk, answers, strict=True):
            right[item.kind] += answer == item.answer
            if answer != item.answer:
                faults.append([item.seed, item.text, item.answer, answer])
    results = {
        kind: {"right": number, "of": count, "share": round(number / count, 4)}
        for kind, number in right.items()
    }
    seeds = [min(item.seed for item in wanted), max(item.seed for item in wanted)]
    return {
        "seeds": seeds,
        "results": results,
        "examples of faults": faults[:: len(faults) // 8 + 1],
    }


def about(folder: Path, notes: Path) -> dict[str, Any]:
    """When and with what the numbers were made, and how long training took."""
    training = json.loads(notes.read_text()) if notes.exists() else {}
    config = json.loads((folder / "config.json").read_text())
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pillow": PIL.__version__,
        "architecture": config["architectures"][0],
        "decoding": "greedy",
        "training steps": training.get("steps"),
        "training minutes": training.get("minutes"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the demo model on held-out scenes.")
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--count", type=int, default=1000, help="items of each kind")
    parser.add_argument("--notes", type=Path, default=HERE / "runs" / "best.json")
    parser.add_argument("--output", type=Path, default=HERE / "evaluation.json")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = Model(options.model, options.threads)
    report = about(options.model, options.notes)
    report["held-out seeds"] = [scenes.HELD_OUT_SEEDS.start, scenes.HELD_OUT_SEEDS.stop - 1]
    report["pictures"] = {}
    for name, (way, first) in WAYS.items():
        report["pictures"][name] = measured = measure(model, way, first, options.count)
        shares = {kind: result["share"] for kind, result in measured["results"].items()}
        print(name, shares, flush=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
