"""An out-of-tree family that takes images, clips and videos, over a tiny LLaVA.

Audio clips and videos become rows in its processor already (so no further encoder is needed), by a
custom processor with the call signature of HF's: a row for each 160 samples, two for each frame.
Imports nothing of the tests, so that a worker process can import it from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aioengine.models import register_model
from aioengine.models.llava import Llava, LlavaMultiModalProcessor, LlavaProcessingInfo
from aioengine.models.runtime.image_tokens import ImageTokenDummyInputsBuilder
from aioengine.processors import (
    MULTIMODAL_REGISTRY,
    AudioProcessorItems,
    EmbeddingItems,
    MultiModalDataItems,
    MultiModalFieldConfig,
    MultiModalKwargs,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
    VideoProcessorItems,
)

SAMPLE_RATE = 1600
SAMPLES_PER_ROW = 160
ROWS_PER_FRAME = 2
PLACES = {"audio": "[sound]", "video": "[film]"}


def audio_rows(samples: np.ndarray[Any, Any], hidden: int) -> torch.Tensor:
    """Rows [len(samples) // 160, hidden] of a clip."""
    count = len(samples) // SAMPLES_PER_ROW
    parts = torch.from_numpy(samples[: count * SAMPLES_PER_ROW].astype(np.float32))
    return parts.reshape(count, SAMPLES_PER_ROW)[:, :hidden] * 3


def video_rows(frames: np.ndarray[Any, Any], hidden: int) -> torch.Tensor:
    """Rows [2 * frames, hidden] of a video: the first pixels of each frame's two halves."""
    height = frames.shape[1]
    halves = [frame[start : start + 1] for frame in frames for start in (0, height // 2)]
    flat = torch.stack([torch.from_numpy(half.reshape(-1)[:hidden].copy()) for half in halves])
    return flat.float() / 64 - 2


class MediaFamilyInfo(LlavaProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "audio": None, "video": 1}

    def get_sample_rate(self) -> int:
        return SAMPLE_RATE

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {**super().get_mm_max_tokens_per_item(seq_len, mm_counts), "audio": 40, "video": 64}


class MediaFamilyDummyInputs(ImageTokenDummyInputsBuilder):
    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        images = super().get_dummy_processor_inputs(seq_len, mm_counts)
        sounds = self._get_dummy_audios(
            length=40 * SAMPLES_PER_ROW, num_audios=mm_counts.get("audio", 0)
        )
        films = self._get_dummy_videos(
            width=48, height=32, num_frames=32, num_videos=mm_counts.get("video", 0)
        )
        mm_data = {**images.mm_data, "audio": sounds, "video": films}
        return ProcessorInputs(prompt_text=images.prompt_text, mm_data=mm_data)

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        others = "".join(PLACES[m] * count for m, count in mm_counts.items() if m in PLACES)
        return super().get_dummy_text(mm_counts) + others


class MediaFamilyProcessor(LlavaMultiModalProcessor):
    info: MediaFamilyInfo

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        hidden, data = self.info.get_hidden_size(), dict(mm_data)
        sounds: Any = data.pop("audio", [])
        films: Any = data.pop("videos", [])
        outputs = dict(super()._call_hf_processor(prompt, data, mm_kwargs)) if data else {}
        if sounds:
            outputs["audio_embeds"] = [audio_rows(sound, hidden) for sound in sounds]
        if films:
            outputs["video_embeds"] = [video_rows(film, hidden) for film in films]
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            "audio_embeds": MultiModalFieldConfig.batched("audio"),
            "video_embeds": MultiModalFieldConfig.batched("video"),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        token_id = self.info.get_tokenizer().convert_tokens_to_ids("a")

        def sound(item_idx: int) -> list[int]:
            items = mm_items.get_items("audio", (AudioProcessorItems, EmbeddingItems))
            if isinstance(items, EmbeddingItems):
                return [token_id] * items.get_feature_size(item_idx)
            return [token_id] * (items.get_audio_length(item_idx) // SAMPLES_PER_ROW)

        def film(item_idx: int) -> list[int]:
            items = mm_items.get_items("video", (VideoProcessorItems, EmbeddingItems))
            if isinstance(items, EmbeddingItems):
                return [token_id] * items.get_feature_size(item_idx)
            return [token_id] * (items.get_num_frames(item_idx) * ROWS_PER_FRAME)

        return [
            *super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs),
            PromptReplacement(modality="audio", target=PLACES["audio"], replacement=sound),
            PromptReplacement(modality="video", target=PLACES["video"], replacement=film),
        ]


@register_model("SoundAndFilmForTests")
@MULTIMODAL_REGISTRY.register_processor(
    MediaFamilyProcessor, info=MediaFamilyInfo, dummy_inputs=MediaFamilyDummyInputs
)
class MediaFamily(Llava):
    """Runs as LLaVA does; rows that were given are passed through."""
