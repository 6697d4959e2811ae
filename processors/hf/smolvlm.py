"""SmolVLM's HF processor where torchvision or num2words is missing.

transformers' own wants both, for videos only. Here its images are as ever, and a video becomes
the same frames and the same text: tests/processors/make_smolvlm_goldens.py says how that is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import transformers
from torch.nn.functional import pad
from transformers.image_processing_utils import BatchFeature, get_size_dict
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    PILImageResampling,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.smolvlm import processing_smolvlm as texts
from transformers.processing_utils import ProcessorMixin, VideosKwargs
from transformers.utils import is_num2words_available, is_torchvision_available

from aioengine.processors.hf.substitutes import lenient
from aioengine.processors.hf.video_processors import FrameProcessor, Options, resize_frame
from aioengine.processors.media.pixels import Array

__all__ = ["SmolVLMProcessor", "SmolVLMVideoProcessor", "load_smolvlm_processor", "to_words"]

_COMPARED = ((5, 19), (5, 24))
"""The first and last minor version of transformers with which videos were compared."""

_IMAGE_IN_CHATS = "{% elif line['type'] == 'image' %}{{ '<image>' }}"
_VIDEO_IN_CHATS = "{% elif line['type'] == 'video' %}{{ '<video>' }}"
_LARGEST_SIDE = 4096
_UNKNOWN_FPS = 24
# fmt: off
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on


def load_smolvlm_processor(source: str, options: Mapping[str, Any], **kwargs: Any) -> Any:
    """The HF processor of a folder or hub id: transformers' own, or this one where that cannot be.

    `options`: revision and the like; `kwargs` override its saved settings. Its video part is None
    under a version of transformers whose own was not compared. Raises what transformers raises.
    """
    if is_torchvision_available() and is_num2words_available():
        own = transformers.AutoProcessor.from_pretrained(source, **options, **kwargs)
        return _with_videos_in_chats(own)
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    videos = None
    if _COMPARED[0] <= release <= _COMPARED[1]:
        found, _ = SmolVLMVideoProcessor.get_video_processor_dict(source, **options)
        videos = SmolVLMVideoProcessor.from_dict(found)
    parts = [
        AutoImageProcessor.from_pretrained(source, **options),
        transformers.AutoTokenizer.from_pretrained(source, **options),
        videos,
    ]
    settings, rest = SmolVLMProcessor.get_processor_dict(source, **options)
    processor = SmolVLMProcessor.from_args_and_dict(parts, {**settings, **kwargs}, **rest)
    return _with_videos_in_chats(processor)


def _with_videos_in_chats(processor: Any) -> Any:
    """Let a chat template that is like the published one take videos, which that forgets.

    transformers has a template with them, which it takes for conversations with a video.
    """
    template = processor.chat_template or processor.tokenizer.chat_template
    if isinstance(template, str) and _VIDEO_IN_CHATS not in template:
        media = _IMAGE_IN_CHATS + _VIDEO_IN_CHATS
        processor.chat_template = template.replace(_IMAGE_IN_CHATS, media)
    return processor


def to_words(number: int) -> str:
    """An English number from 0 to 999, as the package num2words writes it.

    Raises ValueError for others.
    """
    if not 0 <= number < 1000:
        raise ValueError(f"{number} has no word here")
    hundreds, rest = divmod(number, 100)
    if hundreds:
        return f"{_ONES[hundreds]} hundred" + (f" and {to_words(rest)}" if rest else "")
    if rest < 20:
        return _ONES[rest]
    tens, ones = divmod(rest, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


class _VideosKwargs(VideosKwargs, total=False):  # type: ignore[misc, call-arg]
    max_image_size: dict[str, int]


class SmolVLMVideoProcessor(FrameProcessor):
    """Frames resized to `size`'s longest edge, and then to a square, without being cut up.

    Gives `pixel_values`, float32 [num_videos, num_frames, 3, side, side], and, with `do_pad`,
    `pixel_attention_mask`, int64 without the 3: shorter videos are filled with zeros to the longest
    one's number of frames. Of frames that are not resized, all videos' must have one size.
    """

    resample = PILImageResampling.LANCZOS
    size: Any = {"longest_edge": 4 * 364}  # noqa: RUF012 - as transformers has it
    max_image_size: ClassVar = {"longest_edge": 364}
    image_mean, image_std = IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
    do_pad = True
    model_input_names = ("pixel_values", "pixel_attention_mask")
    valid_kwargs = _VideosKwargs

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        sampling = kwargs.get("video_sampling")
        if sampling is not None:
            size = kwargs.get("size", sampling["video_size"])
            self.video_sampling = {**sampling, "video_size": size}
            self.num_frames, self.fps = sampling["max_frames"], sampling["fps"]
            self.size = get_size_dict(size, default_to_square=self.default_to_square)

    def _preprocess(
        self, videos: Sequence[Array], *, return_tensors: Any = None, **options: Any
    ) -> Any:
        found = super()._preprocess(videos, **options)["pixel_values_videos"]
        data: dict[str, Any] = {"pixel_values": found}
        if options.get("do_pad"):
            most = max(map(len, found))
            found = [pad(each, [0] * 7 + [most - len(each)]) for each in found]
            masks = [torch.ones_like(each[:, 0], dtype=torch.int64) for each in found]
            data = {"pixel_values": found, "pixel_attention_mask": torch.stack(masks)}
        return BatchFeature(data, tensor_type=return_tensors)

    def _resize(self, num_frames: int, frame: torch.Tensor, options: Options) -> torch.Tensor:
        frame = super()._resize(num_frames, frame, options)
        side = self.max_image_size["longest_edge"]
        return resize_frame(frame, (side, side), options["resample"])

    def _target(self, num_frames: int, frame: torch.Tensor, options: Options) -> tuple[int, int]:
        size = options["size"]
        if not size.longest_edge:
            if size.height and size.width:
                return size.height, size.width
            raise ValueError("size has neither height and width nor longest_edge")
        height, width = frame.shape[-2:]
        edge, ratio = min(_LARGEST_SIDE, size.longest_edge), width / height
        # The shorter edge is made even.
        if width >= height:
            other = int(edge / ratio)
            return max(other + other % 2, 1), edge
        other = int(edge * ratio)
        return edge, max(other + other % 2, 1)


class SmolVLMProcessor(lenient(transformers.SmolVLMProcessor)):  # type: ignore[misc]
    """transformers' class of this name, made without asking for num2words."""

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        video_processor: Any,
        image_seq_len: int = 169,
        chat_template: Any = None,
        **kwargs: Any,
    ) -> None:
        self.fake_image_token = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        self.image_token = getattr(tokenizer, "image_token", "<image>")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.end_of_utterance_token = getattr(
            tokenizer, "end_of_utterance_token", "<end_of_utterance>"
        )
        self.global_image_token = getattr(tokenizer, "global_image_token", "<global-img>")
        self.video_token = getattr(tokenizer, "video_token", "<video>")
        self.image_seq_len = image_seq_len
        parts = (image_processor, tokenizer, video_processor)
        ProcessorMixin.__init__(self, *parts, chat_template=chat_template, **kwargs)

    def replace_video_token(self, video_inputs: Any, video_idx: int, **_: Any) -> str:
        """Build what stands in a prompt for one video: each frame behind its time."""
        metadata = video_inputs["video_metadata"][video_idx]
        if metadata.fps is None:
            metadata.fps = _UNKNOWN_FPS
        seconds = metadata.timestamps
        duration = seconds[-1] if metadata.duration is None else metadata.duration
        frame = texts.get_image_prompt_string(
            0,
            0,
            self.image_seq_len,
            fake_token_around_image=self.fake_image_token,
            image_token=self.image_token,
            global_image_token=self.global_image_token,
        )
        parts = [
            texts.DEFAULT_VIDEO_INTRO.format(
                frame_count=to_words(video_inputs["pixel_values"].shape[1]),
                video_duration=str(timedelta(seconds=int(duration))),
            )
        ]
        for second in seconds:
            time = f"{int(second // 60):02d}:{int(second % 60):02d}"
            parts += [texts.FRAME_TIMESTAMP_MESSAGE.format(timestamp=time), frame]
        return "".join([*parts, texts.DEFAULT_MEDIA_OUTTRO])
