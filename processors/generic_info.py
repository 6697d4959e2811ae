"""Interface of an HF processor that reports its replacements.

`generic.py` makes items and prompts of it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from aioengine.errors import ModelLoadError
from aioengine.processors.info import (
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    ProcessingContext,
    ProcessorInputs,
)
from aioengine.processors.items import Counts, ImageSize, VideoHeader, noise_item
from aioengine.processors.mm_kwargs import merge_for_hf

__all__ = [
    "CONTRACTS",
    "Contract",
    "GenericDummyInputsBuilder",
    "GenericProcessingInfo",
    "notes_of",
]


@dataclass(frozen=True)
class Contract:
    """Way in which HF processors take a modality: `_process_images(images, **images_kwargs)`,
    say."""

    modality: str
    keyword: str
    part: str

    @property
    def scope(self) -> str:
        return f"{self.keyword}_kwargs"

    @property
    def process(self) -> str:
        return f"_process_{self.keyword}"

    @property
    def ids_name(self) -> str:
        """The item's replacement as token ids: int64 [num_tokens]."""
        return f"_{self.modality}_replacement_ids"

    @property
    def text_name(self) -> str:
        """The item's replacement as UTF-8: uint8 [num_bytes]."""
        return f"_{self.modality}_replacement_text"

    def is_met_by(self, hf_processor: Any) -> bool:
        """Return whether the HF processor takes the modality and reports its replacements."""
        from transformers.processing_utils import ProcessorMixin

        if not isinstance(hf_processor, ProcessorMixin):
            return False
        has_token = isinstance(getattr(hf_processor, f"{self.modality}_token", None), str)
        if not has_token or getattr(hf_processor, self.part, None) is None:
            return False
        own, methods = type(hf_processor), (self.process, f"replace_{self.modality}_token")
        if all(getattr(own, name) is getattr(ProcessorMixin, name) for name in methods):
            return False
        # What the method takes beside items and options would come from another modality.
        known = own.valid_processor_kwargs.__annotations__
        options = {*known, *known[self.scope].__annotations__} - {each.scope for each in CONTRACTS}
        return options.issuperset(self.extra_parameters(hf_processor))

    def is_expanded_by(self, hf_processor: Any) -> bool:
        """Return whether the HF processor may expand the modality's placeholders by itself.

        Then it says nothing of an item, and what its whole call makes of one is looked at.
        """
        from transformers.processing_utils import ProcessorMixin

        own = type(hf_processor)
        return (
            self.keyword in _EXPANDED
            and isinstance(hf_processor, ProcessorMixin)
            and own.__call__ is not ProcessorMixin.__call__
            and isinstance(getattr(hf_processor, f"{self.modality}_token", None), str)
            and getattr(hf_processor, self.part, None) is not None
        )

    def extra_parameters(self, hf_processor: Any) -> list[str]:
        """List what the method takes by name, beside the items and whatever options there are."""
        _, *others = inspect.signature(getattr(hf_processor, self.process)).parameters.values()
        return [each.name for each in others if each.kind is not inspect.Parameter.VAR_KEYWORD]


_EXPANDED = ("images",)
"""Keywords of media that are looked for in what an HF processor's whole call gives."""

CONTRACTS = (
    Contract("image", "images", "image_processor"),
    Contract("video", "videos", "video_processor"),
    Contract("audio", "audio", "_audio_processor"),
)


class GenericProcessingInfo(BaseProcessingInfo):
    """Abilities of the HF processor, and how it is asked.

    `contracts`: modality -> how it is processed; `reports`: whether the HF processor says what an
    item becomes, or has to be given a whole prompt. Raises ModelLoadError where it can do neither.
    """

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        processor = self.get_hf_processor()
        self.contracts = {each.modality: each for each in CONTRACTS if each.is_met_by(processor)}
        self.reports = bool(self.contracts)
        if not self.reports:
            whole = (each for each in CONTRACTS if each.is_expanded_by(processor))
            self.contracts = {each.modality: each for each in whole}
        if not self.contracts:
            raise self.no_report()

    def no_report(self) -> ModelLoadError:
        """The refusal of an HF processor that does not say what its media become."""
        return ModelLoadError(
            f"{self.describe_processor()} does not report what its media become in the text "
            "(`_process_images` with `replace_image_token`, or the same for videos or audio). "
            "Such a model needs a file of its own in models/, with a BaseMultiModalProcessor "
            "whose `_get_prompt_updates` says it"
        )

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """The modalities that have a placeholder and a processor that could be loaded.

        So there are videos only where the HF video processor can be loaded, or has an equal in
        hf.video_processors. One item of a kind where the HF processor refuses two in a prompt; else
        any number. And one image where HF's padding of a batch changes what one becomes.
        """
        notes = notes_of(self.ctx)
        found = {modality: notes.get(("limit", modality)) for modality in self.contracts}
        if "image" in found and getattr(self.get_hf_config(), "vq_config", None) is not None:
            # The codes at an image's edge depend on what lies beyond it.
            if ("pads", "image") not in notes:
                notes["pads", "image"] = _pads_to_others(self.get_part("image"))
            found["image"] = 1 if notes["pads", "image"] else found["image"]
        return found

    def get_placeholder(self, modality: str) -> str:
        """Return what stands in a prompt for one item; some name it apart from its rows' token."""
        processor = self.get_hf_processor()
        own = getattr(processor, f"{modality}_placeholder_token", None)
        return own if isinstance(own, str) else str(getattr(processor, f"{modality}_token"))

    def get_part(self, modality: str) -> Any:
        """The HF image processor, video processor or feature extractor."""
        return getattr(self.get_hf_processor(), self.contracts[modality].part)

    def get_sample_rate(self) -> int:
        """The rate in Hz at which the HF feature extractor takes audio."""
        return int(self.get_part("audio").sampling_rate)

    def describe_processor(self) -> str:
        """The HF processor, for messages."""
        return f"{type(self.get_hf_processor()).__name__}, the processor of {self.model_id!r},"

    def process_item(
        self, modality: str, item: Any, mm_kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """HF's outputs for one decoded item, and the text that its placeholder becomes.

        Raises whatever the HF processor raises.
        """
        contract, processor = self.contracts[modality], self.get_hf_processor()
        contents, known = self.unwrap(modality, [item])
        if not self.reports:
            return self._process_beside_text(modality, contents, mm_kwargs)
        merged = merge_for_hf(processor, mm_kwargs, return_tensors="pt")
        extra = {n: merged[n] for n in contract.extra_parameters(processor) if n in merged}
        method = getattr(processor, contract.process)
        outputs, (text,) = method(contents, **{**merged[contract.scope], **known, **extra})
        return outputs, str(text)

    def _process_beside_text(
        self, modality: str, contents: Sequence[Any], mm_kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """HF's outputs for one item in a short prompt, and what lies there from its first encoder
        row to its last."""
        processor, keyword = self.get_hf_processor(), self.contracts[modality].keyword
        outputs = processor(
            text=f"a {self.get_placeholder(modality)} b",
            **{keyword: contents},
            **copy.deepcopy(dict(mm_kwargs)),
            return_tensors="pt",
        )
        token_ids = outputs["input_ids"][0].tolist()
        owners = (self.get_hf_config(), processor)
        named = {each for owner in owners for each in _placeholder_ids(owner, modality)}
        places = [index for index, each in enumerate(token_ids) if each in named]
        core = token_ids[places[0] : places[-1] + 1]
        text = self.get_tokenizer().decode(core, clean_up_tokenization_spaces=False)
        if self.encode(text) != core:
            raise ValueError("what an item becomes is no text")
        by_token = outputs["input_ids"].shape
        return {n: v for n, v in outputs.items() if getattr(v, "shape", None) != by_token}, text

    def unwrap(self, modality: str, items: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Decoded items as HF processors take them, and the options that say what they are."""
        if modality == "audio":
            asks = inspect.signature(type(self.get_part(modality)).__call__).parameters
            rates = {"sampling_rate": items[0].sample_rate} if "sampling_rate" in asks else {}
            return [clip.samples for clip in items], rates
        if modality == "video":
            metadata = [_video_metadata(clip.header) for clip in items]
            # The frames were chosen when the video was decoded; their times are written of the
            # metadata, for which some HF processors do not ask by themselves. Frames of one or
            # three rows would be taken for channels.
            options = {
                "video_metadata": metadata, "do_sample_frames": False, "return_metadata": True,
                "input_data_format": "channels_last",
            }  # fmt: skip
            return [clip.frames for clip in items], options
        return list(items), {}

    def number(
        self, modality: str, texts: Sequence[str], mm_kwargs: Mapping[str, Any]
    ) -> list[str]:
        """Replacements of a prompt's items, with their numbers where the HF processor counts them.

        Such a one has `_prepend_local_ids`, and `use_image_id` says whether it is used.
        """
        processor, place = self.get_hf_processor(), self.get_placeholder(modality)
        prepend = getattr(processor, "_prepend_local_ids", None)
        if prepend is None or not texts:
            return list(texts)
        merged = merge_for_hf(processor, mm_kwargs)
        asked = merged["images_kwargs"].get("use_image_id", merged.get("use_image_id"))
        counts = processor.default_use_image_id if asked is None else asked
        return list(prepend([place * len(texts)], list(texts), place) if counts else texts)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, nothing added."""
        return list(self.get_tokenizer().encode(text, add_special_tokens=False))

    def get_embed_token_id(self, modality: str, token_ids: Sequence[int]) -> int:
        """The token of a replacement at which encoder rows stand.

        The one that the config names, else the HF processor, if it occurs; else the most frequent.
        """
        counts = Counter(token_ids)
        for owner in (self.get_hf_config(), self.get_hf_processor()):
            found = [each for each in _placeholder_ids(owner, modality) if each in counts]
            if found:
                return max(found, key=counts.__getitem__)
        return counts.most_common(1)[0][0]

    def count_rows(self, modality: str, token_ids: Sequence[int]) -> int:
        """The tokens of a replacement that take encoder rows."""
        return token_ids.count(self.get_embed_token_id(modality, token_ids))

    def get_largest_item(self, modality: str) -> tuple[Any, int]:
        """Choose of a few blank dummies the one with the most encoder rows, and how many those are.

        Found by processing them, once for a context and its clones. A trial and not a bound:
        images of the sizes that the HF processor's settings name (edges, pixels, tiles, grids),
        audio as long as the feature extractor takes it (30 s if it does not say), a video of
        32 frames. Raises ModelLoadError where none can be processed.
        """
        notes = notes_of(self.ctx)
        if ("largest", modality) not in notes:
            trials = list(self._try_dummies(modality))
            if not trials:
                sizes = self.ctx.limit_mm_per_prompt.get(modality)
                way_out = f"; raise the sizes in limit_mm_per_prompt[{modality!r}]" if sizes else ""
                raise ModelLoadError(
                    f"{self.describe_processor()} takes no blank {modality}{way_out}"
                )
            notes["largest", modality] = max(trials, key=lambda trial: trial[1])
        item, num_rows = notes["largest", modality]
        return item, num_rows

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Counts) -> Counts:
        """Encoder rows of the largest dummies; see `get_largest_item`."""
        known = [modality for modality in mm_counts if modality in self.contracts]
        return {modality: self.get_largest_item(modality)[1] for modality in known}

    def _try_dummies(self, modality: str) -> Iterator[tuple[Any, int]]:
        options = self.ctx.mm_processor_kwargs
        settings = {**options, **options.get(self.contracts[modality].scope, {})}
        for dummy in self._dummies(modality, settings):
            # A size that an HF processor refuses, with whatever exception, is no candidate.
            with suppress(Exception):
                token_ids = self.encode(self.process_item(modality, dummy, options)[1])
                yield dummy, self.count_rows(modality, token_ids)

    def _dummies(self, modality: str, settings: Mapping[str, Any]) -> Iterator[Any]:
        part, builder = self.get_part(modality), GenericDummyInputsBuilder(self)
        if modality == "audio":
            rate = self.get_sample_rate()
            length = getattr(part, "n_samples", None) or 30 * rate
            yield from builder._get_dummy_audios(length=length, num_audios=1)
            return
        sizes = _image_sizes(part, settings)
        if modality == "video":
            width, height = (min(side, 768) for side in sizes[0])
            yield from builder._get_dummy_videos(
                width=width, height=height, num_frames=32, num_videos=1
            )
            return
        bounded = (self.ctx.bound_sizes("image", **size._asdict()) for size in sizes)
        sizes = list(dict.fromkeys(ImageSize(**size) for size in bounded))
        # HF's own count ranks many sizes at once; with markers in some families, and not in all.
        # Not with options, which older versions would take over as everyone's defaults.
        with suppress(Exception):
            count = self.get_hf_processor()._get_num_multimodal_tokens
            shapes = [(size.height, size.width) for size in sizes]
            ranks = [] if settings else count(image_sizes=shapes)["num_image_tokens"]
            if len(set(ranks)) > 1:
                sizes = [sizes[max(range(len(sizes)), key=ranks.__getitem__)]]
        for width, height in sizes[:_NUM_TRIALS]:
            yield from builder._get_dummy_images(width=width, height=height, num_images=1)


class GenericDummyInputsBuilder(BaseDummyInputsBuilder):
    """The placeholders, and the largest dummies that `GenericProcessingInfo` found."""

    info: GenericProcessingInfo

    def get_dummy_text(self, mm_counts: Counts) -> str:
        """Each item's placeholder, and nothing else."""
        return "".join(self.info.get_placeholder(name) * mm_counts[name] for name in mm_counts)

    def get_dummy_processor_inputs(self, seq_len: int, mm_counts: Counts) -> ProcessorInputs:
        """`mm_data` has one decoded dummy of each modality, as often as it is asked for."""
        mm_data = {
            modality: [self.info.get_largest_item(modality)[0]] * count
            for modality, count in mm_counts.items()
        }
        return ProcessorInputs(prompt_text=self.get_dummy_text(mm_counts), mm_data=mm_data)

    def get_small_item(self, modality: str) -> Any:
        """A small decoded item."""
        rate = self.info.get_sample_rate() if modality == "audio" else 0
        return noise_item(modality, sample_rate=rate)


def _pads_to_others(image_processor: Any) -> bool:
    """Return whether an image is made as large as another that is processed with it."""
    wide, tall = (Image.new("RGB", size) for size in ((96, 64), (64, 96)))
    alone, both = (
        image_processor(images, return_tensors="np")["pixel_values"]
        for images in ([wide], [wide, tall])
    )
    return bool(np.shape(alone[0]) != np.shape(both[0]))


def notes_of(ctx: ProcessingContext) -> dict[tuple[str, object], Any]:
    """Return what was found out about a context's HF processor, for its later clones too."""
    notes: dict[tuple[str, object], Any] = vars(ctx).setdefault("_generic_notes", {})
    return notes


def _placeholder_ids(owner: Any, modality: str) -> Iterator[int]:
    """The ids that a config or an HF processor names; videos may use the images'."""
    for name in (modality, "image") if modality == "video" else (modality,):
        for ending in ("token_id", "token_index", "token_ids"):
            value = getattr(owner, f"{name}_{ending}", None)
            values = value if isinstance(value, list | tuple) else [value]
            yield from (each for each in values if isinstance(each, int))


def _video_metadata(header: VideoHeader) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=header.num_source_frames,
        fps=header.fps,
        width=header.size.width,
        height=header.size.height,
        duration=header.num_source_frames / header.fps if header.fps else None,
        frames_indices=list(header.indices),
    )


_NUM_TRIALS = 5
_LARGEST_SIDE = 4096
_EDGES = ("size", "crop_size", "max_image_size", "tile_size", "max_pixels")
_TILES = ("max_patches", "max_tiles", "max_image_tiles", "max_slice_nums")
_GRIDS = ("image_grid_pinpoints", "split_resolutions")


def _image_sizes(part: Any, settings: Mapping[str, Any]) -> list[ImageSize]:
    """Sizes at which an HF image processor may make the most of an image, the likeliest first."""

    def values(names: Sequence[str]) -> list[Any]:
        return [settings.get(name, getattr(part, name, None)) for name in names]

    sides = []
    for value in values(_EDGES):
        edges = [value] if isinstance(value, int) else [*dict(value or {}).values()]
        edges = [edge for edge in edges if edge]
        # Numbers larger than any side count pixels, whatever they are called.
        counts_pixels = max(edges, default=0) > _LARGEST_SIDE
        sides += [math.isqrt(edge) if counts_pixels else edge for edge in edges]
    side = max(sides, default=448)
    shapes = [(1.0, 1.0)]
    for tiles in values(_TILES):
        if isinstance(tiles, int) and 1 < tiles <= 64:
            columns = next(n for n in range(math.isqrt(tiles), 0, -1) if tiles % n == 0)
            shapes += [(columns, tiles // columns), (tiles // columns, columns), (1, tiles)]
    shapes += [(1, 4), (4, 1), (0.87, 0.87), (0.7, 0.7)]
    # Where a number of pixels is the limit, what is lost to rounding depends on the shape.
    shapes += [(scale * n / 16, scale * 16 / n) for scale in (1, 0.87, 0.7) for n in range(8, 16)]
    grids = sorted((size for grid in values(_GRIDS) for size in grid or ()), key=math.prod)
    sizes = [(width, height) for height, width in grids[:-3:-1]]
    sizes += [(side * across, side * down) for across, down in shapes]
    shrinks = [min(1.0, _LARGEST_SIDE / max(size)) for size in sizes]
    return [
        ImageSize(*(max(1, int(edge * shrink)) for edge in size))
        for size, shrink in dict.fromkeys(zip(sizes, shrinks, strict=True))
    ]
