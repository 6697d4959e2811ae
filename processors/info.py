"""Knowledge of a family about its HF processor, and the loading of it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from aioengine.errors import MediaError, ModelLoadError, UnsupportedModalityError
from aioengine.processors.checkpoint_errors import check_tekken, explain
from aioengine.processors.hf.substitutes import lacks_video, load_processor
from aioengine.processors.items import AudioClip, Counts, ImageSize, VideoClip, VideoHeader

__all__ = [
    "BaseDummyInputsBuilder",
    "BaseProcessingInfo",
    "ImageDummyInputsBuilder",
    "ImageInfo",
    "OneImageInfo",
    "ProcessingContext",
    "ProcessorInputs",
    "load_context",
]


class ProcessingContext:
    """One worker's own tokenizer and HF processor, with what they were made from.

    A fast tokenizer must not be used by two threads at once, so each worker takes a `clone()`.
    `processor_factory` takes keyword arguments that override the processor's saved ones.
    """

    def __init__(
        self,
        model: str,
        *,
        hf_config: Any,
        tokenizer_factory: Callable[[], Any],
        processor_factory: Callable[..., Any],
        limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        generation_config: Any = None,
    ) -> None:
        self.model = model
        self.hf_config = hf_config
        self.limit_mm_per_prompt = {
            modality: dict(limit) if isinstance(limit, Mapping) else {"count": limit}
            for modality, limit in (limit_mm_per_prompt or {}).items()
        }
        self.mm_processor_kwargs = dict(mm_processor_kwargs or {})
        self.generation_config = generation_config
        self.max_model_len: int | None = None
        """Of the engine, as soon as it is known."""
        self._tokenizer_factory = tokenizer_factory
        self._processor_factory = processor_factory
        self._tokenizer: Any = None
        self._hf_processor: Any = None

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of this worker: its HF processor's where that is loaded, else loaded now."""
        if self._tokenizer is None:
            # A large vocabulary takes a second to load: not twice.
            self._tokenizer = _tokenizer_in(self._hf_processor)
        if self._tokenizer is None:
            self._tokenizer = self._load("tokenizer", self._tokenizer_factory)
        return self._tokenizer

    @property
    def hf_processor(self) -> Any:
        """HF processor of this worker, loaded on first use."""
        if self._hf_processor is None:
            self._hf_processor = self._load("processor", self._processor_factory)
        return self._hf_processor

    def make_hf_processor(self, **kwargs: Any) -> Any:
        """Another HF processor, with some of its saved settings overridden."""
        # What is said of them may hold what a request asked for.
        return self._load("processor", lambda: self._processor_factory(**kwargs), tells=not kwargs)

    def bound_sizes(self, modality: str, **sizes: int) -> dict[str, int]:
        """Lower a dummy's sizes to those that `limit_mm_per_prompt` has for the modality."""
        limits = self.limit_mm_per_prompt.get(modality, {})
        return {name: min(size, limits.get(name, size)) for name, size in sizes.items()}

    def bounds_size(self, modality: str) -> bool:
        """Tell whether `limit_mm_per_prompt` has a size for the modality's items."""
        return bool(self.limit_mm_per_prompt.get(modality, {}).keys() - {"count"})

    def clone(self) -> ProcessingContext:
        """The same for another worker thread, with a tokenizer and an HF processor of its own."""
        other = copy.copy(self)
        # In one go, as one may hold the other; half as long as to load them again.
        other._tokenizer, other._hf_processor = copy.deepcopy((self._tokenizer, self._hf_processor))
        return other

    def _load(self, what: str, factory: Callable[[], Any], *, tells: bool = True) -> Any:
        try:
            return factory()
        except ModelLoadError:
            raise
        # transformers raises OSError, ValueError, ImportError, KeyError and others for bad folders.
        except Exception as error:
            reason = explain(what, self.model, self.hf_config, error if tells else None)
            raise ModelLoadError(reason) from error


def _tokenizer_in(hf_processor: Any) -> Any:
    """The one that a processor holds; for a text model AutoProcessor gives a tokenizer itself."""
    is_tokenizer = hasattr(hf_processor, "convert_ids_to_tokens")
    return hf_processor if is_tokenizer else getattr(hf_processor, "tokenizer", None)


def load_context(
    model: str | PathLike[str],
    *,
    hf_config: Any,
    info: type[BaseProcessingInfo] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> ProcessingContext:
    """The context of a local folder or hub id. Reads files; loads the HF processor at once.

    `info`: the family's, which may have ways of its own to load tokenizer and HF processor. Raises
    ModelLoadError.
    """
    family = BaseProcessingInfo if info is None else info
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    source = str(model)
    check_tekken(source, revision)
    context = ProcessingContext(
        source,
        hf_config=hf_config,
        tokenizer_factory=partial(family.load_tokenizer, source, hf_config, options),
        processor_factory=partial(family.load_hf_processor, source, hf_config, options),
        limit_mm_per_prompt=limit_mm_per_prompt,
        mm_processor_kwargs=mm_processor_kwargs,
        generation_config=_generation_config(source, hf_config, revision),
    )
    assert context.hf_processor is not None
    return context


def _generation_config(source: str, hf_config: Any, revision: str | None) -> Any:
    """Load it as it is saved, or what of it the model's config holds."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source, revision=revision)
    except OSError:
        return None if hf_config is None else GenerationConfig.from_model_config(hf_config)


class BaseProcessingInfo(ABC):
    """Facts about a family's processing for layout and admission."""

    placeholders_are_text: ClassVar[bool] = False
    """Whether what stands for an item is ordinary text, of which the tokenizer has no token."""

    def __init__(self, ctx: ProcessingContext) -> None:
        self.ctx = ctx

    @classmethod
    def load_tokenizer(cls, source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
        """A tokenizer of the folder or hub id; `options`: `revision` and `trust_remote_code`.

        To be overridden by families whose folders transformers cannot read without code of the
        checkpoint's. May raise anything; called for an engine, and in each worker process.
        """
        from transformers import AutoTokenizer

        is_own = not type(hf_config).__module__.startswith("transformers")
        # It would look for a config of its own, and for code where it finds none.
        known = {"config": hf_config} if is_own and hf_config is not None else {}
        return AutoTokenizer.from_pretrained(source, **known, **options)

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """An HF processor, or what is called like one; `kwargs` override its saved settings.

        Its `tokenizer` attribute becomes the worker's tokenizer. It is copied for each worker
        thread. As `load_tokenizer` otherwise.
        """
        return load_processor(source, hf_config, options, **kwargs)

    @property
    def model_id(self) -> str:
        """The folder or hub id that the model came from."""
        return self.ctx.model

    def get_hf_config(self) -> Any:
        """The model's HF configuration."""
        return self.ctx.hf_config

    def get_hf_processor(self, **kwargs: Any) -> Any:
        """Return this worker's HF processor; with arguments, a new one that has these settings."""
        return self.ctx.make_hf_processor(**kwargs) if kwargs else self.ctx.hf_processor

    def get_image_processor(self, **kwargs: Any) -> Any:
        """The HF image processor in it."""
        return self.get_hf_processor(**kwargs).image_processor

    def get_tokenizer(self) -> Any:
        """Return this worker's tokenizer."""
        return self.ctx.tokenizer

    def get_sample_rate(self) -> int:
        """The rate in Hz at which the HF feature extractor takes audio."""
        hf_processor = self.get_hf_processor()
        extractor = getattr(hf_processor, "feature_extractor", None) or hf_processor
        return int(extractor.sampling_rate)

    def get_hidden_size(self) -> int:
        """The width of the rows that the encoder gives to the decoder."""
        return int(self.get_hf_config().get_text_config().hidden_size)

    @abstractmethod
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Modality -> items that one prompt may have (None: any number). Others are unsupported."""

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Counts) -> Counts | None:
        """Modality -> placeholder tokens of the largest item; None: to be found by a trial."""
        return None

    def get_allowed_mm_limits(self) -> dict[str, int | None]:
        """The supported limits, lowered by `limit_mm_per_prompt`."""
        allowed: dict[str, int | None] = {}
        for modality, supported in self.get_supported_mm_limits().items():
            limit = self.ctx.limit_mm_per_prompt.get(modality, {}).get("count")
            known = [number for number in (supported, limit) if number is not None]
            allowed[modality] = min(known, default=None)
        return allowed

    def validate_num_items(self, counts: Counts) -> None:
        """Raises UnsupportedModalityError for media that the model or the engine does not take.

        And MediaError for videos that it would take if torchvision were there.
        """
        supported = self.get_supported_mm_limits()
        allowed = self.get_allowed_mm_limits()
        for modality, count in counts.items():
            refused = partial(UnsupportedModalityError, parameter=f"{modality}s", value=count)
            plural = "audio items" if modality == "audio" else f"{modality}s"
            if count and modality not in supported:
                if modality == "video" and lacks_video(self.get_hf_processor()):
                    raise MediaError(
                        "the model's videos need torchvision; install it, or give the frames as "
                        "images",
                        parameter="videos",
                    )
                known = ", ".join(sorted(supported))
                takes = f", only {known}" if supported else ": it is for text only"
                raise refused(f"the model takes no {plural}{takes}")
            limit = allowed.get(modality)
            if limit is None or count <= limit:
                continue
            most = supported[modality]
            raises_it = most is None or count <= most
            name = f"limit_mm_per_prompt[{modality!r}]"
            way_out = f"; raise {name}" if raises_it else ""
            takes = f"at most {limit}" if limit else "no"
            noun = plural.removesuffix("s") if limit == 1 else plural
            raise refused(f"one prompt may have {takes} {noun}, not {count}{way_out}")


@dataclass(frozen=True, kw_only=True)
class ProcessorInputs:
    """A prompt text for the HF processor with the media that belong to it, by modality."""

    prompt_text: str
    mm_data: Mapping[str, Any] = field(default_factory=dict)


class ImageInfo(BaseProcessingInfo):
    """Any number of images, each of as many rows as its size says."""

    @abstractmethod
    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Encoder rows of an image of this size, with the engine's own options."""

    def get_image_size_with_most_features(self) -> ImageSize:
        """Size of an image that becomes the most rows; here the tower's own input size."""
        side = int(self.get_hf_config().vision_config.image_size)
        return ImageSize(width=side, height=side)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Counts) -> Counts:
        width, height = self.get_image_size_with_most_features()
        return {"image": self.get_num_image_tokens(image_width=width, image_height=height)}


class OneImageInfo(ImageInfo):
    """One image in a prompt."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}


class BaseDummyInputsBuilder(ABC):
    """Inputs without a request: to call the HF processor on media alone, and to measure memory."""

    def __init__(self, info: BaseProcessingInfo) -> None:
        self.info = info

    @abstractmethod
    def get_dummy_processor_inputs(self, seq_len: int, mm_counts: Counts) -> ProcessorInputs:
        """A prompt with that many items of each modality, each as large as they get."""

    def get_dummy_text(self, mm_counts: Counts) -> str:
        """The text that the HF processor wants beside that many items.

        Worth overriding: this default makes the dummy media too.
        """
        return self.get_dummy_processor_inputs(0, mm_counts).prompt_text

    def get_hf_config(self) -> Any:
        """The model's HF configuration."""
        return self.info.get_hf_config()

    # One dummy, many times: nothing writes to it. None is larger than `limit_mm_per_prompt` says.

    def _get_dummy_images(self, *, width: int, height: int, num_images: int) -> list[Image.Image]:
        """Make white images of `width` x `height` pixels."""
        size = self.info.ctx.bound_sizes("image", width=width, height=height)
        return [Image.new("RGB", (size["width"], size["height"]), (255, 255, 255))] * num_images

    def _get_dummy_audios(self, *, length: int, num_audios: int) -> list[AudioClip]:
        """Make silence of `length` samples at the rate that the model takes."""
        size = self.info.ctx.bound_sizes("audio", length=length)
        samples = np.zeros(size["length"], np.float32)
        return [AudioClip(samples, self.info.get_sample_rate())] * num_audios

    def _get_dummy_videos(
        self, *, width: int, height: int, num_frames: int, num_videos: int
    ) -> list[VideoClip]:
        """Make black videos of `num_frames` frames of `width` x `height` pixels, at 2 fps."""
        asked = {"num_frames": num_frames, "height": height, "width": width}
        count, *size = self.info.ctx.bound_sizes("video", **asked).values()
        header = VideoHeader(ImageSize(*reversed(size)), tuple(range(count)), count, fps=2.0)
        return [VideoClip(np.zeros((count, *size, 3), np.uint8), header)] * num_videos


class ImageDummyInputsBuilder(BaseDummyInputsBuilder):
    """White images of the most rows, beside no text."""

    info: ImageInfo

    def get_dummy_text(self, mm_counts: Counts) -> str:
        return ""

    def get_dummy_processor_inputs(self, seq_len: int, mm_counts: Counts) -> ProcessorInputs:
        width, height = self.info.get_image_size_with_most_features()
        count = mm_counts.get("image", 0)
        images = self._get_dummy_images(width=width, height=height, num_images=count)
        text = self.get_dummy_text(mm_counts)
        return ProcessorInputs(prompt_text=text, mm_data={"image": images})
