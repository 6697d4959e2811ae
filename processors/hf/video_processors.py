"""HF video processors without torchvision, for frames that were taken already.

transformers makes its video processors of a mixin, torchvision's operations, and what a family does
with them. Here the mixin and the family's image processor are transformers' own, so that settings
and options are read, checked and overridden as ever; the three operations are torch's, frame by
frame. Every row of `VIDEO_PROCESSORS` gives the tensors of transformers' class of the same name,
bit for bit: tests/processors/make_video_goldens.py says how that is known.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch.nn.functional import interpolate, pad, pixel_unshuffle
from transformers import Glm4vImageProcessorPil, Glm46VImageProcessorPil, Qwen2VLImageProcessorPil
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_transforms import get_resize_output_image_size, get_size_with_aspect_ratio
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    ChannelDimension,
    PILImageResampling,
)
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl
from transformers.processing_utils import VideosKwargs
from transformers.video_utils import (
    infer_channel_dimension_format,
    make_batched_metadata,
    make_batched_videos,
)

from aioengine.processors.media.pixels import Array

try:
    from transformers.video_processing_utils import VideoProcessorMixin
except ImportError:  # before 5.19, under which nobody is given one of these classes
    from transformers.video_processing_utils import BaseVideoProcessor as VideoProcessorMixin

__all__ = ["MODEL_TYPES", "VIDEO_PROCESSORS", "FrameProcessor", "resize_frame"]

Options: TypeAlias = Mapping[str, Any]
"""A processor's settings, with what a caller asks for over them."""

_MODES = {
    PILImageResampling.BILINEAR: "bilinear",
    PILImageResampling.BICUBIC: "bicubic",
    # torchvision has it for tensors since 0.27; before, transformers takes the other one.
    PILImageResampling.LANCZOS: "lanczos" if torch.__version__ >= "2.12" else "bicubic",
}
_BYTEWISE = ("AVX2", "AVX512")
"""Where torchvision resizes bytes bilinearly without a detour through float32 (or on ARM)."""


class FrameProcessor(VideoProcessorMixin, PilBackend):  # type: ignore[misc]
    """Frames in, what HF's video processor of a family makes of them out.

    `videos`: arrays uint8 [num_frames, height, width, 3]. Gives `pixel_values_videos`, float32
    [num_videos, num_frames, 3, height, width]. Raises ValueError for what it would do otherwise
    than HF's: frames still to be taken, of another dtype, on a device, resized by another filter.
    """

    resample = PILImageResampling.BICUBIC
    image_mean, image_std = OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    do_sample_frames = False

    def _decode_and_sample_videos(
        self, videos: Any, video_metadata: Any, do_sample_frames: bool | None, **_: Any
    ) -> tuple[list[Any], list[Any]]:
        if do_sample_frames:
            raise ValueError("the frames are taken beforehand; say do_sample_frames=False")
        videos = make_batched_videos(videos)
        return videos, make_batched_metadata(videos, video_metadata=video_metadata)

    def _prepare_input_videos(
        self, videos: Sequence[Any], input_data_format: Any, device: Any, **_: Any
    ) -> list[Array]:
        """Views of the videos, channels last."""
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError("frames are processed on the CPU; leave out device")
        prepared = []
        for video in map(np.asarray, videos):
            order = input_data_format or infer_channel_dimension_format(video)
            if video.dtype != np.uint8:
                raise ValueError(f"frames are uint8, not {video.dtype}")
            prepared.append(np.moveaxis(video, 1, -1) if order == ChannelDimension.FIRST else video)
        return prepared

    def _preprocess(
        self, videos: Sequence[Array], *, return_tensors: Any = None, **options: Any
    ) -> Any:
        pixels = []
        for video in videos:
            frames = self._frames(video, options)
            for index, frame in enumerate(frames):
                if index == 0:
                    pixels.append(frame.new_empty(len(video), *frame.shape))
                pixels[-1][index] = frame
        return BatchFeature({"pixel_values_videos": pixels}, tensor_type=return_tensors)

    def _frames(self, video: Array, options: Options) -> Iterator[torch.Tensor]:
        """Each frame for itself, resized, cropped and normalised: [3, height, width]."""
        for each in video:
            # A copy in HWC order, as torch resizes that layout fastest.
            frame = torch.from_numpy(each.copy()).permute(2, 0, 1)
            if options["do_resize"]:
                frame = self._resize(len(video), frame, options)
            if options.get("do_center_crop"):
                frame = _cropped(frame, options["crop_size"].height, options["crop_size"].width)
            yield _scaled(frame, options)

    def _resize(self, num_frames: int, frame: torch.Tensor, options: Options) -> torch.Tensor:
        return resize_frame(frame, self._target(num_frames, frame, options), options["resample"])

    def _target(self, num_frames: int, frame: torch.Tensor, options: Options) -> tuple[int, int]:
        """The height and width to which a frame is resized."""
        size = options["size"]
        if size.shortest_edge and size.longest_edge:
            shape = frame.shape[-2:], size.shortest_edge, size.longest_edge
            return get_size_with_aspect_ratio(*shape)  # type: ignore[no-any-return]
        if size.shortest_edge:
            return get_resize_output_image_size(  # type: ignore[no-any-return]
                frame,
                size.shortest_edge,
                default_to_square=False,
                input_data_format=ChannelDimension.FIRST,
            )
        if size.height and size.width:
            return size.height, size.width
        raise ValueError("size has neither height and width nor shortest_edge")


class PatchProcessor(FrameProcessor):
    """Frames in, patches over `temporal_patch_size` frames out.

    Gives `pixel_values_videos`, float32 [num_patches, 3 * temporal_patch_size * patch_size ** 2],
    and `video_grid_thw`, int64 [num_videos, 3], in patches.
    """

    patch_size, temporal_patch_size, merge_size = 14, 2, 2
    cap_pixels_per_frame: bool | None = None
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def _preprocess(
        self, videos: Sequence[Array], *, return_tensors: Any = None, **options: Any
    ) -> Any:
        patches, grids = zip(*(self._patches(video, options) for video in videos), strict=True)
        # Joining copies, and a single video need not be.
        pixels = patches[0] if len(patches) == 1 else torch.cat(patches)
        data = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}
        return BatchFeature(data, tensor_type=return_tensors)

    def _patches(self, video: Array, options: Options) -> tuple[torch.Tensor, list[int]]:
        depth = options["temporal_patch_size"]
        sizes = options["patch_size"], options["merge_size"]
        grid = [-(-len(video) // depth)]
        for index, frame in enumerate(self._frames(video, options)):
            # The family's image processor would fill a patch with one frame: here it has depth 1.
            rows, *shape = self.patchify(frame.numpy(), *sizes, temporal_patch_size=1)
            rows = torch.from_numpy(rows).view(len(rows), 3, -1)
            if index == 0:
                grid += shape
                taken = frame.new_empty(*grid[:1], *rows.shape[:2], depth, rows.shape[2])
            taken[index // depth, :, :, index % depth] = rows
        # The last patch is filled with the last frame.
        taken[-1, :, :, index % depth + 1 :] = taken[-1, :, :, index % depth, None]
        return taken.flatten(0, 1).flatten(1), grid

    def _bounds(self, num_frames: int, options: Options) -> dict[str, int]:
        """The limits between which a frame (or all of them) is resized, and the unit of its edges.

        Raises ValueError where `size` does not have them.
        """
        size, factor = options["size"], options["patch_size"] * options["merge_size"]
        if not size.shortest_edge or not size.longest_edge:
            raise ValueError("size has not both of shortest_edge and longest_edge")
        most = size.longest_edge
        if options.get("cap_pixels_per_frame"):
            floor = int(size.shortest_edge * 1.05)
            most = self._capped(num_frames, most, floor, factor, options["temporal_patch_size"])
        return {"factor": factor, "min_pixels": size.shortest_edge, "max_pixels": most}

    def _capped(self, num_frames: int, most: int, floor: int, factor: int, depth: int) -> int:
        """`max_pixels` where `cap_pixels_per_frame` asks for less."""
        raise NotImplementedError


class _VolumeProcessor(PatchProcessor):
    """Limits are for the pixels of all frames together."""

    fps, do_sample_frames = 2, True

    def _target(self, num_frames: int, frame: torch.Tensor, options: Options) -> tuple[int, int]:
        return glm4v.smart_resize(  # type: ignore[no-any-return]
            num_frames,
            *frame.shape[-2:],
            temporal_factor=options["temporal_patch_size"],
            **self._bounds(num_frames, options),
        )


class _PatchKwargs(VideosKwargs, total=False):  # type: ignore[misc, call-arg]
    patch_size: int
    temporal_patch_size: int
    merge_size: int


class _GlmKwargs(_PatchKwargs, total=False):  # type: ignore[call-arg]
    max_image_size: dict[str, int]
    max_duration: int


class _Qwen3VLKwargs(_PatchKwargs, total=False):  # type: ignore[call-arg]
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int


class _Qwen2VLKwargs(_Qwen3VLKwargs, total=False):  # type: ignore[call-arg]
    min_pixels: int
    max_pixels: int


class _InternVLKwargs(VideosKwargs, total=False):  # type: ignore[misc, call-arg]
    initial_shift: bool | float | int


class Qwen2VLVideoProcessor(PatchProcessor, Qwen2VLImageProcessorPil):  # type: ignore[misc]
    """Qwen2-VL, Qwen2.5-VL and the Omni models: limits are for the pixels of one frame."""

    size: ClassVar = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    min_frames, max_frames = 4, 768
    max_video_tokens = 128000
    valid_kwargs = _Qwen2VLKwargs

    def _target(self, num_frames: int, frame: torch.Tensor, options: Options) -> tuple[int, int]:
        bounds = self._bounds(num_frames, options)
        return qwen2_vl.smart_resize(*frame.shape[-2:], **bounds)  # type: ignore[no-any-return]

    def _capped(self, num_frames: int, most: int, floor: int, factor: int, depth: int) -> int:
        pixels = int(self.max_video_tokens * factor * factor * 0.9)
        return max(min(most, pixels * depth // num_frames), floor)


class Qwen3VLVideoProcessor(_VolumeProcessor, Glm4vImageProcessorPil):  # type: ignore[misc]
    """Qwen3-VL and Qwen3.5, whose frames are cut as GLM-4V's."""

    size: ClassVar = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
    image_mean, image_std = IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
    patch_size = 16
    min_frames, max_frames = 4, 768
    max_video_tokens = 768
    valid_kwargs = _Qwen3VLKwargs

    def _capped(self, num_frames: int, most: int, floor: int, factor: int, depth: int) -> int:
        frame = self.max_video_tokens * factor * factor
        return int(max(min(frame, most // num_frames), floor) * num_frames)


class _GlmProcessor(_VolumeProcessor):
    """Settings that GLM's versions share."""

    size: ClassVar = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}
    max_image_size: ClassVar = {"longest_edge": 28 * 28 * 2 * 30000}
    num_frames, max_duration = 16, 300
    valid_kwargs = _GlmKwargs


class Glm4vVideoProcessor(_GlmProcessor, Glm4vImageProcessorPil):  # type: ignore[misc]
    """GLM-4.1V and GLM-4.5V."""


class Glm46VVideoProcessor(_GlmProcessor, Glm46VImageProcessorPil):  # type: ignore[misc]
    """GLM-4.6V."""


class InternVLVideoProcessor(FrameProcessor):
    """InternVL, as converted for transformers."""

    size: ClassVar = {"height": 384, "width": 384}
    initial_shift = True
    valid_kwargs = _InternVLKwargs


class LlavaOnevisionVideoProcessor(FrameProcessor):
    """LLaVA-OneVision."""

    size: ClassVar = {"height": 384, "width": 384}
    default_to_square = False


class LlavaNextVideoVideoProcessor(FrameProcessor):
    """LLaVA-NeXT-Video."""

    size: ClassVar = {"shortest_edge": 224}
    crop_size: ClassVar = {"height": 224, "width": 224}
    default_to_square = False
    do_center_crop = True


class VideoLlavaVideoProcessor(LlavaNextVideoVideoProcessor):
    """Video-LLaVA."""


class _Gemma4Kwargs(VideosKwargs, total=False):  # type: ignore[misc, call-arg]
    patch_size: int
    max_soft_tokens: int
    pooling_kernel_size: int


class Gemma4VideoProcessor(FrameProcessor):
    """Gemma 4: each frame as many patches as fit, and places without a patch up to the most.

    `pixel_values_videos`, float32 [num_frames of all videos, max_patches, 3 * patch_size ** 2],
    `video_position_ids`, int64 [as many, max_patches, 2], column and row (-1 where there is none),
    `num_frames_per_video` and `num_soft_tokens_per_video` (of a frame), int64 [num_videos].
    """

    image_mean, image_std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    size, num_frames, do_sample_frames = None, 32, True
    patch_size, max_soft_tokens, pooling_kernel_size = 16, 70, 3
    valid_kwargs = _Gemma4Kwargs
    model_input_names = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")

    def _validate_preprocess_kwargs(self, **kwargs: Any) -> None:
        super()._validate_preprocess_kwargs(**{**kwargs, "do_resize": False})  # without a `size`

    def _target(self, num_frames: int, frame: torch.Tensor, options: Options) -> tuple[int, int]:
        return gemma4.get_aspect_ratio_preserving_size(  # type: ignore[no-any-return]
            *frame.shape[-2:],
            options["patch_size"],
            options["max_soft_tokens"] * options["pooling_kernel_size"] ** 2,
            options["pooling_kernel_size"],
        )

    def _preprocess(
        self, videos: Sequence[Array], *, return_tensors: Any = None, **options: Any
    ) -> Any:
        if options["max_soft_tokens"] not in gemma4._SUPPORTED_SOFT_TOKENS:
            allowed = ", ".join(map(str, gemma4._SUPPORTED_SOFT_TOKENS))
            raise ValueError(f"max_soft_tokens is one of {allowed}")
        unit, area = options["patch_size"], options["pooling_kernel_size"] ** 2
        most = options["max_soft_tokens"] * area
        pixels, places, counts = [], [], []
        for video in videos:
            for frame in self._frames(video, options):
                down, across = (edge // unit for edge in frame.shape[-2:])
                rows = pixel_unshuffle(frame, unit).reshape(3, -1, down, across)
                rows = rows.permute(2, 3, 1, 0).reshape(-1, 3 * unit * unit)
                grid = torch.cartesian_prod(torch.arange(down), torch.arange(across)).flip(-1)
                free = most - len(rows)
                pixels.append(pad(rows, (0, 0, 0, free)))
                places.append(pad(grid, (0, 0, 0, free), value=-1))
            counts.append(len(rows) // area)
        data = {
            "pixel_values_videos": torch.stack(pixels),
            "video_position_ids": torch.stack(places),
            "num_frames_per_video": [len(video) for video in videos],
            "num_soft_tokens_per_video": counts,
        }
        return BatchFeature(data, tensor_type=return_tensors)


VIDEO_PROCESSORS: Mapping[str, type[FrameProcessor]] = {
    each.__name__: each
    for each in (
        Qwen2VLVideoProcessor,
        Qwen3VLVideoProcessor,
        Glm4vVideoProcessor,
        Glm46VVideoProcessor,
        InternVLVideoProcessor,
        LlavaOnevisionVideoProcessor,
        LlavaNextVideoVideoProcessor,
        VideoLlavaVideoProcessor,
        Gemma4VideoProcessor,
    )
}
"""The name of transformers' class -> what gives the same tensors."""

MODEL_TYPES: Mapping[str, str] = {
    model_type: name
    for name, model_types in {
        "Qwen2VLVideoProcessor": "qwen2_vl qwen2_5_vl qwen2_5_omni qwen3_omni_moe exaone4_5 "
        "hyperclovax_vision_v2",
        "Qwen3VLVideoProcessor": "qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp "
        "cosmos3_omni dots3_note lfm3_vl",
        "Glm4vVideoProcessor": "glm4v",
        "Glm46VVideoProcessor": "glm46v",
        "InternVLVideoProcessor": "internvl",
        "LlavaOnevisionVideoProcessor": "llava_onevision videoprism",
        "LlavaNextVideoVideoProcessor": "llava_next_video",
        "VideoLlavaVideoProcessor": "video_llava",
        "Gemma4VideoProcessor": "gemma4",
    }.items()
    for model_type in model_types.split()
}
"""The class that transformers takes for a model type whose settings name none. Its own list is
emptied where torchvision is missing."""


def resize_frame(frame: torch.Tensor, shape: tuple[int, int], resample: Any) -> torch.Tensor:
    """A frame, uint8 [3, height, width], at another size; as torchvision does it.

    `resample`: one of Pillow's filters, bilinear if None. Raises ValueError for those that
    torchvision has not.
    """
    if frame.shape[-2:] == shape:
        return frame
    mode = _MODES.get(PILImageResampling.BILINEAR if resample is None else resample)
    if mode is None:
        raise ValueError("resample: frames are resized bilinearly, bicubically or by Lanczos")
    bytewise = torch.backends.cpu.get_cpu_capability() in _BYTEWISE
    bytewise |= mode != "bilinear" or platform.machine() in ("aarch64", "arm64")
    taken = frame[None] if bytewise else frame[None].float()
    resized = interpolate(taken, shape, mode=mode, align_corners=False, antialias=True)[0]
    return resized if bytewise else resized.round_().to(torch.uint8)


def _cropped(frame: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The middle of a frame, with black around it where it is smaller than that."""
    down, across = max(height - frame.shape[1], 0), max(width - frame.shape[2], 0)
    frame = pad(frame, [across // 2, (across + 1) // 2, down // 2, (down + 1) // 2])
    top, left = (frame.shape[1] - height) // 2, (frame.shape[2] - width) // 2
    return frame[:, top : top + height, left : left + width]


def _scaled(frame: torch.Tensor, options: Options) -> torch.Tensor:
    """A frame rescaled and normalised, in one step as transformers' torch backend does it."""
    factor = options["rescale_factor"]
    if not options["do_normalize"]:
        return frame * factor if options["do_rescale"] else frame
    unit = 1.0 / factor if options["do_rescale"] else 1.0
    mean, std = (
        (torch.tensor(options[name], dtype=torch.float32) * unit).reshape(-1, 1, 1)
        for name in ("image_mean", "image_std")
    )
    return frame.float().sub_(mean).div_(std)
