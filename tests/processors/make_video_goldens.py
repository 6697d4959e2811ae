"""What transformers' own video processors make of small random frames, and how to ask them again.

`python -m tests.processors.make_video_goldens`, where torchvision can be imported, writes
video_goldens.json: for every case the shape, dtype and SHA-256 of each tensor with a few of its
values, every class's settings, and the text that a video becomes. The file in the repository was
made with transformers 5.23.0, torchvision 0.28.0 and torch 2.13.0 on an x86 CPU with AVX2; with
5.24.0, 0.29.2 and 2.15.0 it comes out the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from aioengine.processors.generic import GenericProcessingInfo
from aioengine.processors.items import ImageSize, VideoClip, VideoHeader
from tests.processors.hf_processors import EDGE, PATCHES, SQUARE, context_for, tokenizer_with

GOLDENS = Path(__file__).with_name("video_goldens.json")
NUM_SAMPLES = 12
SMALL = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}
VOLUME = {"shortest_edge": 4 * 64 * 64, "longest_edge": 4 * 96 * 96}
RAW = {"do_rescale": False, "do_normalize": False}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A class, its saved settings, a call's options, and the videos' frames, heights and widths."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, int, int], ...] = ((3, 60, 83),)

    def videos(self) -> list[np.ndarray[Any, Any]]:
        """uint8 [num_frames, height, width, 3] each, the same every time."""
        random = np.random.default_rng(len(self.shapes) + sum(self.shapes[0]))
        return [random.integers(0, 256, (*shape, 3), np.uint8) for shape in self.shapes]

    def run(self, classes: Any) -> dict[str, torch.Tensor]:
        """The tensors of this case by the class of its name among `classes`."""
        processor = classes[self.name].from_dict(dict(self.settings))
        outputs = processor(
            self.videos(), do_sample_frames=False, return_tensors="pt", **self.options
        )
        return {name: value for name, value in outputs.items() if name != "video_metadata"}


def _patch_cases(name: str, settings: Mapping[str, Any], unit: int) -> dict[str, Case]:
    def case(*shapes: tuple[int, int, int], **options: Any) -> Case:
        shapes = shapes or ((3, 60, 83),)
        return Case(name=name, settings=settings, options=options, shapes=shapes)

    cases = {
        "odd": case((5, 61, 97)),
        "even": case((4, 120, 70)),
        "tall": case((2, 211, 33)),
        "wide": case((3, 31, 240)),
        "two": case((3, 60, 83), (2, 90, 40)),
        "as-they-are": case((3, unit * 2, unit * 4), do_resize=False),
        "raw": case(**RAW),
        "not-normalised": case(do_normalize=False),
        "not-rescaled": case(do_rescale=False),
        "bilinear": case(resample=2),
        "large": case((4, 190, 260), size={"shortest_edge": 100, "longest_edge": 1 << 22}),
        "enlarged": case((2, 40, 50), size={"shortest_edge": 40000, "longest_edge": 1 << 20}),
        "other-mean": case(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.125]),
        "deeper": case((5, 60, 83), temporal_patch_size=3),
        "unmerged": case(merge_size=1),
        "timed": case(fps=3.0),
        "defaults": Case(name=name, shapes=((3, 60, 83),)),
    }
    if name.startswith("Qwen2"):
        cases["one"] = case((1, 60, 83))
    if name.startswith("Qwen"):
        cases["capped"] = case((8, 190, 260), cap_pixels_per_frame=True)
        capped = {**settings, "cap_pixels_per_frame": True}
        for tokens in (4, 40):
            some = {**capped, "max_video_tokens": tokens}
            cases[f"capped-to-{tokens}"] = Case(name=name, settings=some, shapes=((8, 190, 260),))
        # Two units a side, which fit between the least pixels and what the cap leaves at least.
        size = {"shortest_edge": int(4 * unit * unit * 0.97), "longest_edge": 1 << 20}
        least = {**capped, "max_video_tokens": 1, "size": size}
        cases["capped-to-least"] = Case(name=name, settings=least, shapes=((8, 190, 190),))
    return cases


def _plain_cases(name: str, settings: Mapping[str, Any]) -> dict[str, Case]:
    def case(*shapes: tuple[int, int, int], **options: Any) -> Case:
        shapes = shapes or ((3, 60, 83),)
        return Case(name=name, settings=settings, options=options, shapes=shapes)

    return {
        "odd": case((3, 61, 97)),
        "tall": case((2, 211, 33)),
        "wide": case((1, 31, 240)),
        "two": case((2, 60, 83), (2, 90, 40)),
        "as-they-are": case((2, 50, 41), do_resize=False),
        "raw": case(**RAW),
        "not-normalised": case(do_normalize=False),
        "not-rescaled": case(do_rescale=False),
        "bilinear": case(resample=2),
        "shortest": case((2, 60, 83), size={"shortest_edge": 33}, do_center_crop=False),
        "between": case(
            (2, 60, 163), size={"shortest_edge": 33, "longest_edge": 71}, do_center_crop=False
        ),
        "cropped": case(do_center_crop=True, crop_size={"height": 17, "width": 20}),
        "cropped-wider": case(do_center_crop=True, crop_size={"height": 25, "width": 101}),
        "other-mean": case(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.125]),
        "defaults": Case(name=name, shapes=((1, 60, 83),)),
    }


def _gemma_cases(settings: Mapping[str, Any]) -> dict[str, Case]:
    kept = ("odd", "tall", "wide", "two", "raw", "not-normalised", "not-rescaled", "bilinear")
    plain = _plain_cases("Gemma4VideoProcessor", settings)
    more = {
        "as-they-are": {"shapes": ((2, 48, 40),), "options": {"do_resize": False}},
        "more-tokens": {"options": {"max_soft_tokens": 140}},
        "pooled-less": {"options": {"pooling_kernel_size": 1}},
        "other-mean": {"options": {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5] * 3}},
        "longer": {"shapes": ((3, 60, 83), (1, 60, 83), (2, 90, 40))},
    }
    found = {each: plain[each] for each in (*kept, "defaults")}
    return found | {
        name: Case(name="Gemma4VideoProcessor", settings=settings, **each)  # type: ignore[arg-type]
        for name, each in more.items()
    }


_SHORTEST = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
_FEW_PATCHES = {"patch_size": 4, "pooling_kernel_size": 2}
CASES: Mapping[str, Case] = {
    f"{name}/{case}": each
    for name, cases in {
        "Qwen2VLVideoProcessor": _patch_cases("Qwen2VLVideoProcessor", {"size": SMALL}, 28),
        "Qwen3VLVideoProcessor": _patch_cases("Qwen3VLVideoProcessor", {"size": VOLUME}, 32),
        "Glm4vVideoProcessor": _patch_cases("Glm4vVideoProcessor", {"size": VOLUME}, 28),
        "Glm46VVideoProcessor": _patch_cases("Glm46VVideoProcessor", {"size": VOLUME}, 28),
        "InternVLVideoProcessor": _plain_cases("InternVLVideoProcessor", {"size": SQUARE}),
        "LlavaOnevisionVideoProcessor": _plain_cases(
            "LlavaOnevisionVideoProcessor", {"size": {"height": 27, "width": 41}}
        ),
        "LlavaNextVideoVideoProcessor": _plain_cases("LlavaNextVideoVideoProcessor", _SHORTEST),
        "VideoLlavaVideoProcessor": _plain_cases("VideoLlavaVideoProcessor", _SHORTEST),
        "Gemma4VideoProcessor": _gemma_cases(_FEW_PATCHES),
    }.items()
    for case, each in cases.items()
}


@dataclass(frozen=True)
class Whole:
    """An HF processor with a video part: `make(video_processor)`; the part's class and settings;
    the token at which rows stand."""

    make: Callable[[Any], Any]
    part: str
    settings: Mapping[str, Any]
    embed: str = "<video>"

    def info(self, classes: Any) -> GenericProcessingInfo:
        """The generic processing info of an HF processor whose video part is among `classes`."""
        hf_processor = self.make(classes[self.part](**self.settings))
        return GenericProcessingInfo(context_for(hf_processor))


def _any_video(cls: type[Any]) -> type[Any]:
    """An HF processor's class that asks no video part for its class, which may not be there."""

    class AnyVideo(cls):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor":
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    return AnyVideo


def _qwen(kind: str) -> Callable[[Any], Any]:
    def make(video_processor: Any) -> Any:
        tokenizer = tokenizer_with(
            "<|vision_start|>",
            "<|vision_end|>",
            image_token="<|image_pad|>",
            video_token="<|video_pad|>",
        )
        images = hf.Qwen2VLImageProcessorPil(size=SMALL)
        return _any_video(getattr(hf, kind))(images, tokenizer, video_processor)

    return make


def _glm(kind: str) -> Callable[[Any], Any]:
    def make(video_processor: Any) -> Any:
        marks = [
            f"<|{side}_of_{what}|>" for side in ("begin", "end") for what in ("image", "video")
        ]
        tokenizer = tokenizer_with(*marks, image_token="<|image|>", video_token="<|video|>")
        images = getattr(hf, f"{kind}ImageProcessorPil")(size=VOLUME)
        return _any_video(getattr(hf, f"{kind}Processor"))(images, tokenizer, video_processor)

    return make


def _internvl(video_processor: Any) -> Any:
    tokenizer = tokenizer_with(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = hf.GotOcr2ImageProcessorPil(size=SQUARE, min_patches=1, max_patches=6)
    return _any_video(hf.InternVLProcessor)(images, tokenizer, video_processor, image_seq_length=4)


def _onevision(video_processor: Any) -> Any:
    tokenizer = tokenizer_with(image_token="<image>", video_token="<video>")
    images = hf.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=[[28, 56]])
    return _any_video(hf.LlavaOnevisionProcessor)(
        images, tokenizer, video_processor, num_image_tokens=4, **_STRATEGY
    )


def _next_video(video_processor: Any) -> Any:
    tokenizer = tokenizer_with(image_token="<image>", video_token="<video>")
    images = hf.LlavaNextImageProcessorPil(**EDGE, image_grid_pinpoints=[[28, 56]])
    return _any_video(hf.LlavaNextVideoProcessor)(
        video_processor, images, tokenizer, patch_size=7, **_STRATEGY
    )


def _video_llava(video_processor: Any) -> Any:
    tokenizer = tokenizer_with(image_token="<image>", video_token="<video>")
    images = hf.VideoLlavaImageProcessor(**EDGE)
    return _any_video(hf.VideoLlavaProcessor)(images, video_processor, tokenizer, **PATCHES)


def _gemma4(video_processor: Any) -> Any:
    tokenizer = tokenizer_with(
        image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>",
        audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>",
    )  # fmt: skip
    images = hf.Gemma4ImageProcessorPil(**_FEW_PATCHES)
    features = hf.Gemma4AudioFeatureExtractor(feature_size=16)
    return _any_video(hf.Gemma4Processor)(features, images, tokenizer, video_processor)


_STRATEGY = {"vision_feature_select_strategy": "full"}
_PAD = "<|video_pad|>"
_FRAME, _CLIP = {"size": SMALL}, {"size": VOLUME}
WHOLES: Mapping[str, Whole] = {
    "qwen2-vl": Whole(_qwen("Qwen2VLProcessor"), "Qwen2VLVideoProcessor", _FRAME, _PAD),
    "qwen2.5-vl": Whole(_qwen("Qwen2_5_VLProcessor"), "Qwen2VLVideoProcessor", _FRAME, _PAD),
    "qwen3-vl": Whole(_qwen("Qwen3VLProcessor"), "Qwen3VLVideoProcessor", _CLIP, _PAD),
    "glm-4v": Whole(_glm("Glm4v"), "Glm4vVideoProcessor", _CLIP, "<|image|>"),
    "glm-4.6v": Whole(_glm("Glm46V"), "Glm46VVideoProcessor", _CLIP, "<|image|>"),
    "internvl": Whole(_internvl, "InternVLVideoProcessor", {"size": SQUARE}, "<IMG_CONTEXT>"),
    "llava-onevision": Whole(_onevision, "LlavaOnevisionVideoProcessor", {"size": SQUARE}),
    "llava-next-video": Whole(_next_video, "LlavaNextVideoVideoProcessor", _SHORTEST),
    "video-llava": Whole(_video_llava, "VideoLlavaVideoProcessor", _SHORTEST),
    "gemma-4": Whole(_gemma4, "Gemma4VideoProcessor", _FEW_PATCHES, "<|video|>"),
}


def clip() -> VideoClip:
    """Five frames of a video of 90, at 20 frames a second."""
    frames = np.random.default_rng(7).integers(0, 256, (5, 60, 83, 3), np.uint8)
    return VideoClip(frames, VideoHeader(ImageSize(83, 60), (0, 20, 41, 60, 89), 90, fps=20.0))


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor in a few bytes."""
    flat = tensor.contiguous().flatten()
    places = torch.linspace(0, len(flat) - 1, NUM_SAMPLES).long()
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "sample": flat[places].tolist(),
        "sha256": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
    }


def settings_of(processor: Any) -> dict[str, Any]:
    """A processor's settings, as they are saved."""
    settings: dict[str, Any] = json.loads(processor.to_json_string())
    return settings


def main() -> None:
    """Writes the file."""
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    classes = {case.name: getattr(hf, case.name) for case in CASES.values()}
    types = {name: each["torchvision"] for name, each in VIDEO_PROCESSOR_MAPPING_NAMES.items()}
    goldens = {
        "tensors": {
            name: {key: describe(value) for key, value in case.run(classes).items()}
            for name, case in CASES.items()
        },
        "settings": {name: settings_of(each()) for name, each in classes.items()},
        "texts": {
            name: whole.info(classes).process_item("video", clip(), {})[1]
            for name, whole in WHOLES.items()
        },
        "model_types": {name: each for name, each in types.items() if each in classes},
    }
    GOLDENS.write_text(json.dumps(goldens, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
