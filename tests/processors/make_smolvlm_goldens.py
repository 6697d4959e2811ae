"""What transformers' own SmolVLM processor makes of videos, and how to ask it again.

`python -m tests.processors.make_smolvlm_goldens`, where torchvision (0.27 or later) and num2words
can be imported, writes smolvlm_goldens.json. The file in the repository was made with transformers
5.23.0, torchvision 0.28.0, torch 2.13.0 and num2words 0.5.14 on an x86 CPU with AVX2; with 5.24.0,
0.29.2 and 2.15.0 it comes out the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers as hf

from aioengine.processors.generic import GenericProcessingInfo
from tests.processors.hf_processors import context_for, tokenizer_with
from tests.processors.make_video_goldens import RAW, Case, clip, describe, settings_of

GOLDENS = Path(__file__).with_name("smolvlm_goldens.json")
NAME = "SmolVLMVideoProcessor"
SETTINGS = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
# One for each: transformers writes into it.
SAMPLING, OTHER_SAMPLING = (
    {"max_frames": 5, "fps": 2, "video_size": {"longest_edge": 48}} for _ in range(2)
)


def _case(*shapes: tuple[int, int, int], **options: Any) -> Case:
    shapes = shapes or ((3, 60, 83),)
    return Case(name=NAME, settings=SETTINGS, options=options, shapes=shapes)


CASES: Mapping[str, Case] = {
    "odd": _case((3, 61, 97)),
    "tall": _case((2, 211, 33)),
    "wide": _case((1, 31, 240)),
    "thin": _case((1, 200, 1)),
    "small": _case((2, 20, 30)),
    "square": _case((2, 64, 64)),
    "two": _case((2, 60, 83), (4, 90, 40)),
    "as-they-are": _case((2, 50, 41), do_resize=False),
    "not-padded": _case(do_pad=False),
    "raw": _case(**RAW),
    "not-normalised": _case(do_normalize=False),
    "not-rescaled": _case(do_rescale=False),
    "bicubic": _case(resample=3),
    "larger": _case(size={"longest_edge": 5000}),
    "a-shape": _case(size={"height": 40, "width": 56}),
    "defaults": Case(name=NAME, shapes=((1, 60, 83),)),
    "sampling": Case(
        name=NAME, settings={"video_sampling": SAMPLING, "max_image_size": {"longest_edge": 32}}
    ),
    "sampling-and-size": Case(name=NAME, settings={**SETTINGS, "video_sampling": OTHER_SAMPLING}),
}


def processor_of(processor_class: Callable[..., Any], video_class: Any) -> Any:
    """A tiny HF processor, of either kind."""
    more = [f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)]
    tokenizer = tokenizer_with(
        *more, "<global-img>", "<fake_token_around_image>",
        image_token="<image>", video_token="<video>",
    )  # fmt: skip
    images = hf.SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    return processor_class(images, tokenizer, video_class(**SETTINGS), image_seq_len=4)


def text_of(hf_processor: Any) -> str:
    """What a video becomes."""
    info = GenericProcessingInfo(context_for(hf_processor))
    return info.process_item("video", clip(), {})[1]


def digest(words: Iterable[str]) -> str:
    """Of many words."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def main() -> None:
    """Writes the file."""
    num2words = import_module("num2words").num2words

    classes = {NAME: hf.SmolVLMVideoProcessor}
    goldens = {
        "tensors": {
            name: {key: describe(value) for key, value in case.run(classes).items()}
            for name, case in CASES.items()
        },
        "settings": {
            name: settings_of(classes[NAME].from_dict(dict(CASES[name].settings)))
            for name in ("defaults", "sampling", "sampling-and-size")
        },
        "text": text_of(processor_of(hf.SmolVLMProcessor, hf.SmolVLMVideoProcessor)),
        "words": digest(map(num2words, range(1000))),
    }
    GOLDENS.write_text(json.dumps(goldens, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
