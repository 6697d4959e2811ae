"""Qwen2-Audio: a tower that hears windows of 30 seconds, a projector, and Qwen2 for a decoder.

Chu et al., "Qwen2-Audio Technical Report" (2024). A shorter item is padded with silence, which
no other part of it attends to; of a longer one the model hears the first window, as the HF
processor cuts it. How many rows it becomes follows from its number of samples, so that a prompt is
laid out before an audio item is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError
from aioengine.kernels.transfer import to_device
from aioengine.models.runtime.interfaces import MultiModalEmbeddings
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import AudioProcessorItems, MultiModalDataItems
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdate
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Qwen2Audio", "Qwen2AudioInfo", "Qwen2AudioMultiModalProcessor", "count_audio_rows"]


def count_audio_rows(num_frames: int) -> int:
    """Encoder rows of so many mel frames: a convolution of stride 2, then a mean of each pair."""
    return ((num_frames - 1) // 2 + 1) // 2


class Qwen2AudioInfo(GenericProcessingInfo):
    """Token counts by the number of samples."""

    def get_num_audio_tokens(self, *, num_samples: int) -> int:
        """Encoder rows of an audio item; 0 if it is shorter than three mel frames."""
        extractor = self.get_part("audio")
        num_heard = min(num_samples, int(extractor.n_samples))
        return count_audio_rows(-(-num_heard // int(extractor.hop_length)))

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        window = int(self.get_part("audio").n_samples)
        return {"audio": self.get_num_audio_tokens(num_samples=window)}

    def get_window_frames(self) -> int:
        """The mel frames that the tower takes, no more and no fewer."""
        # Its second convolution has a stride of 2.
        return 2 * int(self.get_hf_config().audio_config.max_source_positions)


class Qwen2AudioMultiModalProcessor(GenericMultiModalProcessor):
    """`<|AUDIO|>` becomes as many of itself as the audio has rows."""

    layout_needs_hf_outputs = False

    info: Qwen2AudioInfo

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs)
        num_frames, window = outputs["input_features"].shape[-1], self.info.get_window_frames()
        if num_frames != window:
            raise InvalidRequestError(
                f"the processor makes audio of {num_frames} mel frames, and the model takes "
                f"{window} only; leave the lengths in mm_processor_kwargs as they are",
                parameter="mm_processor_kwargs",
            )
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        config = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))
        # The host counts it, to know how many rows to keep.
        config["feature_attention_mask"] = MultiModalFieldConfig.flat_from_sizes(
            "audio", [1], keep_on_cpu=True
        )
        return config

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        audio = mm_items.get("audio")
        is_laid_out = isinstance(audio, EmbeddingItems) or out_mm_kwargs.get_items("audio")
        if audio is None or is_laid_out:
            return super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        audio = mm_items.get_items("audio", AudioProcessorItems)
        lengths = [audio.get_audio_length(index) for index in range(len(audio))]
        sizes = [self.info.get_num_audio_tokens(num_samples=length) for length in lengths]
        target = self.info.encode(self.info.get_placeholder("audio"))
        return [
            PromptReplacement(
                modality="audio",
                target=target,
                replacement=lambda item_idx: target * sizes[item_idx],
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2AudioMultiModalProcessor, info=Qwen2AudioInfo, dummy_inputs=GenericDummyInputsBuilder
)
class Qwen2Audio(TransformersModel):
    """Audio in any number; of each the model hears the first 30 seconds."""

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows [rows, hidden] of each audio item.

        `input_features` [n, mel bins, frames], padded to the tower's window, with
        `feature_attention_mask` [n, frames], 1 where there is sound; or `audio_embeds`.
        """
        features, mask = kwargs.get("input_features"), kwargs.get("feature_attention_mask")
        if features is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(features, Tensor) and isinstance(mask, Tensor)
        inner: Any = self.model.model
        num_places, num_rows = inner.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
        hidden = inner.audio_tower(
            to_device(features, self.device).to(self.dtype),
            attention_mask=self._key_mask(num_places, features.shape[-1] // 2),
        ).last_hidden_state
        rows: Tensor = inner.multi_modal_projector(hidden)
        return [item[:size] for item, size in zip(rows, num_rows.tolist(), strict=True)]

    def _key_mask(self, num_places: Tensor, length: int) -> Tensor:
        """Added to attention scores [n, heads, length, length]: nobody attends to the padding."""
        is_padding = torch.arange(length) >= num_places[:, None].cpu()
        lowest = torch.finfo(self.dtype).min
        bias = torch.zeros(is_padding.shape, dtype=self.dtype).masked_fill(is_padding, lowest)
        return to_device(bias[:, None, None], self.device)
