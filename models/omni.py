"""Qwen-Omni's thinkers: images, videos and audio in one prompt, answered in text.

Xu et al., "Qwen2.5-Omni Technical Report" and "Qwen3-Omni Technical Report" (2025). Positions have
three axes, as in Qwen2-VL; an audio's rows take them as text does, and a video's frames lie as far
apart as seconds do. The talker, which would speak the answer, is left out of a whole checkpoint;
and a video's own sound woven into its frames (`use_audio_in_video`) is not built.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.audio import count_audio_rows
from aioengine.models.mrope import DeepStackModel, MRopeModel, row_size
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, PromptMedia
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import CONTRACTS, GenericProcessingInfo
from aioengine.processors.info import ProcessingContext
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "OmniInfo",
    "OmniMultiModalProcessor",
    "OmniThinker",
    "Qwen3OmniInfo",
    "Qwen3OmniThinker",
]

_NEARLY = 1e-3
"""What float32 makes of a whole number of positions."""
# Both are the same; transformers knows the former by the latter.
WOVEN = ("use_audio_in_video", "load_audio_from_video")


class OmniInfo(GenericProcessingInfo):
    """Videos too, which the HF processor takes in a way of its own."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        if _is_woven(ctx.mm_processor_kwargs):
            raise ModelLoadError(f"mm_processor_kwargs: {WOVEN[0]} is not supported")
        if self.get_hf_processor().video_processor is not None:
            self.contracts |= {each.modality: each for each in CONTRACTS}

    def process_item(
        self, modality: str, item: Any, mm_kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        if modality == "video":
            return self._process_video(item, mm_kwargs)
        outputs, text = super().process_item(modality, item, mm_kwargs)
        if modality == "audio":
            # HF pads to five minutes of silence, which the model cuts off again.
            length = int(outputs["feature_attention_mask"].sum())
            outputs = {
                **outputs,
                "input_features": outputs["input_features"][..., :length],
                "feature_attention_mask": outputs["feature_attention_mask"][..., :length],
            }
        return outputs, text

    def _process_video(
        self, item: Any, mm_kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        processor = self.get_hf_processor()
        merged = processor._merge_kwargs(
            processor.valid_processor_kwargs,
            tokenizer_init_kwargs=self.get_tokenizer().init_kwargs,
            **copy.deepcopy(dict(mm_kwargs)),
            return_tensors="pt",
        )
        contents, known = self.unwrap("video", [item])
        header = item.header
        if merged["videos_kwargs"].get("fps") is None and header.fps:
            # HF takes it that two frames were chosen of each second, if nobody says otherwise.
            known["fps"] = self.round_rate(
                header.fps * header.num_frames / header.num_source_frames
            )
        merged["videos_kwargs"] = {**merged["videos_kwargs"], **known}
        merged["load_audio_from_video"] = False
        outputs, (text,) = processor._process_videos(contents, **merged)
        return outputs, str(text)

    def round_rate(self, frames_per_second: float) -> float:
        """The rate of a video's chosen frames that its processor is told."""
        return frames_per_second


class Qwen3OmniInfo(OmniInfo):
    """Rows that are given are as wide as the encoder's; a video's steps in time are whole."""

    def get_hidden_size(self) -> int:
        return row_size(self._thinker_config(), super().get_hidden_size())

    def round_rate(self, frames_per_second: float) -> float:
        """The nearest rate at which steps in time are whole numbers of positions."""
        step = self.get_part("video").temporal_patch_size
        step *= int(self._thinker_config().position_id_per_seconds)
        return float(step / max(1, round(step / frames_per_second)))

    def _thinker_config(self) -> Any:
        config = self.get_hf_config()
        return getattr(config, "thinker_config", config)


class OmniMultiModalProcessor(GenericMultiModalProcessor):
    """Processing as the HF processor has it, without sound woven into videos."""

    def merged_kwargs(self, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class. Raises InvalidRequestError for `use_audio_in_video`."""
        if _is_woven(mm_kwargs):
            raise InvalidRequestError(
                f"mm_processor_kwargs: {WOVEN[0]} is not supported; give the sound as an audio",
                parameter="mm_processor_kwargs",
            )
        return _without_woven(super().merged_kwargs(mm_kwargs))


@MULTIMODAL_REGISTRY.register_processor(OmniMultiModalProcessor, info=OmniInfo)
class OmniThinker(MRopeModel):
    """The thinker, which sees, hears and writes, of its own checkpoint or of a whole model's."""

    thinker: ClassVar[str] = "Qwen2_5OmniThinkerForConditionalGeneration"
    """transformers' class."""

    @classmethod
    def load_module(cls, path: str | os.PathLike[str], *, hf_config: Any, **options: Any) -> Any:
        return super().load_module(path, hf_config=cls._thinker_config(hf_config), **options)

    @classmethod
    def probe(cls, hf_config: Any) -> tuple[LayerSpec, ...]:
        return super().probe(cls._thinker_config(hf_config))

    @classmethod
    def _thinker_config(cls, hf_config: Any) -> Any:
        """The thinker's own config, which a whole model's holds."""
        inner = getattr(hf_config, "thinker_config", None)
        if inner is None:
            return hf_config
        found = copy.deepcopy(inner)
        found.architectures = [cls.thinker]
        return found

    def count_audio_rows(self, num_frames: int) -> int:
        """The tower's rows of so many mel frames."""
        return count_audio_rows(num_frames)

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Do as the base class; audio is `input_features` [n, mel bins, frames] with
        `feature_attention_mask` [n, frames], 1 where there is sound."""
        rows = super().embed_multimodal(**kwargs)
        mask = kwargs.get("feature_attention_mask")
        if not isinstance(mask, Tensor) or kwargs.get("input_features") is None:
            return rows
        # The tower gives those of all audio as one.
        sizes = [self.count_audio_rows(length) for length in mask.sum(-1).tolist()]
        return list(torch.split(torch.cat(list(rows)), sizes))

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int]:
        """Do as the base class, which leaves it to transformers' `get_rope_index`.

        That one finds media by the tokens around them, which a prompt need not have; with them, the
        positions are the same.
        """
        parts: list[Tensor] = []
        done = following = 0
        for item in sorted(items, key=lambda item: item.span.offset):
            if item.modality == "audio":
                continue
            start = following + item.span.offset - done
            parts += [_text_positions(following, start), self._grid_positions(item) + start]
            done, following = item.span.end, int(parts[-1].max()) + 1
        end = following + len(token_ids) - done
        parts.append(_text_positions(following, end))
        return torch.cat(parts, dim=1), end - len(token_ids)

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class. Positions are given, as transformers wants marks around media."""
        positions, _ = self.positions(prompt.token_ids, prompt.items)
        return run_whole(self.model, prompt, rows, position_ids=positions[:, None])

    def _grid_positions(self, item: PromptMedia) -> Tensor:
        """Places [3, rows] in time, height and width, counted from the item's first."""
        grids = self._grids_of(item)
        times, height, width = grids[f"{item.modality}_grid_thw"][0].tolist()
        steps = self._steps(times, self._positions_per_grid(item), item.modality)
        merge = int(self.hf_config.vision_config.spatial_merge_size)
        places = torch.meshgrid(
            steps, torch.arange(height // merge), torch.arange(width // merge), indexing="ij"
        )
        return torch.stack(places).flatten(1)

    def _steps(self, times: int, per_grid: Tensor, modality: str) -> Tensor:
        """The positions in time of so many steps, from 0 on."""
        return (torch.arange(times) * per_grid).long()

    def _positions_per_grid(self, item: PromptMedia) -> Tensor:
        per_second = int(self.hf_config.position_id_per_seconds)
        if item.modality == "image":
            return torch.tensor(float(per_second), dtype=torch.float32)
        seconds = item.features.get("video_second_per_grid")
        if seconds is None:
            raise InvalidRequestError(
                "video embeddings need video_second_per_grid, the seconds from one step in time to "
                "the next: Embeddings(rows, video_grid_thw=[[t, h, w]], "
                "video_second_per_grid=[1.0])",
                parameter="videos",
            )
        return seconds.reshape(-1)[0].float() * per_second


@MULTIMODAL_REGISTRY.register_processor(OmniMultiModalProcessor, info=Qwen3OmniInfo)
class Qwen3OmniThinker(OmniThinker, DeepStackModel):
    """A thinker whose decoder's first layers are given rows of images and videos too.

    transformers makes other rows of a clip that stands beside a longer one, as spectra and
    convolutions read on into what pads it; here each has those that it has alone.
    """

    thinker = "Qwen3OmniMoeThinkerForConditionalGeneration"

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Do as the base class; audio adds nothing to the first layers."""
        rows = super().embed_multimodal(**kwargs)
        return [pad(each, (0, self.row_size - each.shape[-1])) for each in rows]

    def count_audio_rows(self, num_frames: int) -> int:
        """Three convolutions of stride 2 over windows that stand for themselves."""
        window = 2 * int(self.hf_config.audio_config.n_window)
        whole, rest = divmod(num_frames, window)
        return whole * _halve_thrice(window) + _halve_thrice(rest)

    def _steps(self, times: int, per_grid: Tensor, modality: str) -> Tensor:
        # transformers does not round them, and positions here are whole.
        steps = torch.arange(times) * per_grid
        whole = steps.round()
        if bool((steps - whole).abs().max() > _NEARLY):
            raise InvalidRequestError(
                f"the frames of a video are {float(per_grid):g} positions apart, which have to be "
                "whole; give another rate, fps in mm_processor_kwargs, or none",
                parameter=f"{modality}s",
            )
        return whole.long()


def _halve_thrice(count: int) -> int:
    for _ in range(3):
        count = -(-count // 2)
    return count


def _text_positions(start: int, end: int) -> Tensor:
    return torch.arange(start, end).expand(3, -1)


def _is_woven(options: Mapping[str, Any]) -> bool:
    scopes = (options, options.get("videos_kwargs") or {})
    return any(isinstance(scope, Mapping) and scope.get(n) for scope in scopes for n in WOVEN)


def _without_woven(options: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in options.items() if name not in WOVEN}
    scope = kept.get("videos_kwargs")
    if isinstance(scope, Mapping):
        kept["videos_kwargs"] = {name: each for name, each in scope.items() if name not in WOVEN}
    return kept
