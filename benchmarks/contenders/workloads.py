"""What is asked in the peer benchmark: images, prompts and clips, new ones for every round."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

QUESTION = "What is in it?"
NUM_REQUESTS, MAX_TOKENS = 16, 64
VGA, FULL_HD, UHD = (640, 480), (1920, 1080), (3840, 2160)
RATE = 16_000
CLIP_TOKENS = 224


def prompt(num_images: int) -> str:
    """The benchmark model's chat template, rendered: some 280 tokens with one image."""
    return f"user: {'<image>' * num_images}{QUESTION}\nassistant:"


def image(folder: Path, seed: int, size: tuple[int, int]) -> str:
    """The path of a JPEG with a photograph's detail: noise in two octaves over a gradient."""
    path = folder / f"{size[0]}x{size[1]}-{seed}.jpg"
    if path.exists():
        return str(path)
    width, height = size
    rng = np.random.default_rng((seed, width))

    def noise(cell: int) -> np.ndarray[Any, Any]:
        cells = rng.integers(0, 256, (-(-height // cell), -(-width // cell), 3), dtype=np.uint8)
        smooth = Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC)
        return np.asarray(smooth, dtype=np.float32)

    ramp = np.linspace(0, 255, width, dtype=np.float32)[None, :, None]
    mixed = 0.25 * ramp + 0.5 * noise(64) + 0.25 * noise(8)
    buffer = io.BytesIO()
    Image.fromarray(mixed.astype(np.uint8)).save(buffer, "JPEG", quality=90)
    path.write_bytes(buffer.getvalue())
    return str(path)


def many_small(folder: Path, round_number: int, count: int) -> list[dict[str, Any]]:
    """W1 and W2: an image for each request."""
    first = 1000 + 100 * round_number
    return [{"text": prompt(1), "images": [image(folder, first + i, VGA)]} for i in range(count)]


def eight_large(folder: Path, round_number: int) -> list[dict[str, Any]]:
    """W4: one prompt with eight images."""
    first = 1000 + 100 * round_number
    return [{"text": prompt(8), "images": [image(folder, first + i, FULL_HD) for i in range(8)]}]


def many_large(folder: Path, round_number: int, count: int) -> list[dict[str, Any]]:
    """W5: images of the size that cameras take."""
    first = 1000 + 100 * round_number
    return [{"text": prompt(1), "images": [image(folder, first + i, UHD)]} for i in range(count)]


def streams() -> list[str]:
    """W5: what runs meanwhile."""
    return [f"user: Tell me story number {i}, a long one.\nassistant:" for i in range(4)]


def clips(folder: Path, speech: Path, count: int, skip_s: float = 0) -> list[str]:
    """W6: the audio files, then the same with their first words cut off, as arrays on disk.

    With `skip_s`, the others begin later too, so that they are new.
    """
    import soundfile

    paths = sorted(speech.glob("*.wav"))
    files = [soundfile.read(path, dtype="float32")[0] for path in paths]
    turns = range(-(-count // len(files)))
    found = []
    for number, samples in enumerate(
        [each[turn * RATE + int(skip_s * RATE) :] for turn in turns for each in files][:count]
    ):
        path = folder / f"clip-{number}.npy"
        np.save(path, samples)
        found.append(str(path))
    return found
