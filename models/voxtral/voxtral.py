"""Voxtral: a Whisper tower over chunks of 30 seconds, four of its states to a row, and Llama.

Liu et al., "Voxtral" (2025). Audio is padded with silence to whole chunks, each of which the tower
hears on its own, and stands in the prompt as one `[BEGIN_AUDIO]` and an `[AUDIO]` for each
row, 375 in a chunk. transformers' processor takes media through mistral_common's chat requests
only; here the same tokens and features are made from a prompt like any other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.runtime import encoding
from aioengine.models.runtime.interfaces import MultiModalEmbeddings
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
from aioengine.processors.embeddings import repeat_token
from aioengine.processors.info import (
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    ProcessingContext,
    ProcessorInputs,
)
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import AudioProcessorItems, MultiModalDataItems
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdate, PromptUpdateDetails
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "MistralAudioInfo",
    "MistralAudioProcessor",
    "Voxtral",
    "VoxtralDummyInputsBuilder",
    "VoxtralInfo",
    "VoxtralMultiModalProcessor",
]

MOST_CHUNKS = 60
"""Of the longest audio for which memory is laid out: half an hour, as the authors name it."""
CHUNKS_AT_ONCE = 8
"""That go through the tower together, so that its memory does not grow with the audio."""
# What mistral_common writes for its seventh tokenizer version; the checkpoints bring no template.
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% set open, close = {'system': ('[SYSTEM_PROMPT]', '[/SYSTEM_PROMPT]'), "
    "'user': ('[INST]', '[/INST]'), 'assistant': ('', '</s>')}[message['role']] %}{{ open }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}[AUDIO]{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ close }}{% endfor %}"
)


class MistralAudioInfo(BaseProcessingInfo):
    """Facts of both kinds. Raises ModelLoadError for what their processors have no use for."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        if ctx.mm_processor_kwargs:
            raise ModelLoadError("the model's processor takes no mm_processor_kwargs")

    @classmethod
    def load_tokenizer(cls, source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
        """The same with mistral_common installed and without, whose own makes no special tokens."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, mistral_format=False, **options)

    def find_token(self, name: str) -> int:
        """The id of a special token. Raises ModelLoadError where the tokenizer has none."""
        tokenizer = self.get_tokenizer()
        found = tokenizer.convert_tokens_to_ids(name)
        if found is None or found == tokenizer.unk_token_id:
            raise ModelLoadError(f"the tokenizer of {self.model_id!r} knows no {name}")
        return int(found)


class VoxtralInfo(MistralAudioInfo):
    """Chunks and their rows."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        self.begin_token_id = self.find_token("[BEGIN_AUDIO]")
        self.audio_token_id = int(self.get_hf_config().audio_token_id)
        if not getattr(self.get_tokenizer(), "chat_template", None):
            self.get_tokenizer().chat_template = CHAT_TEMPLATE

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        from transformers import AutoFeatureExtractor, VoxtralProcessor

        extractor = AutoFeatureExtractor.from_pretrained(source, **options)
        return VoxtralProcessor(extractor, cls.load_tokenizer(source, hf_config, options))

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": None}

    def get_chunk_frames(self) -> int:
        """Mel frames that the tower hears at once: its second convolution has a stride of 2."""
        return 2 * int(self.get_hf_config().audio_config.max_source_positions)

    def get_chunk_samples(self) -> int:
        """Samples of a chunk, at the model's rate."""
        hop_length: int = self.get_hf_processor().feature_extractor.hop_length
        return self.get_chunk_frames() * hop_length

    def get_rows_per_chunk(self) -> int:
        """The projector takes as many states together as make its input's width."""
        config = self.get_hf_config().audio_config
        return int(config.max_source_positions * config.hidden_size // config.intermediate_size)

    def get_num_audio_tokens(self, *, num_samples: int) -> int:
        """Encoder rows of an audio item; its last chunk counts whole."""
        return -(-num_samples // self.get_chunk_samples()) * self.get_rows_per_chunk()

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the rows of half an hour of audio, or of what a prompt can hold."""
        rows = self.get_rows_per_chunk()
        longest = seq_len or int(self.get_hf_config().text_config.max_position_embeddings)
        return {"audio": rows * max(1, min(MOST_CHUNKS, longest // rows))}


class VoxtralDummyInputsBuilder(BaseDummyInputsBuilder):
    """A placeholder and silence of as many chunks as the tower takes together."""

    info: VoxtralInfo

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        token = self.info.get_tokenizer().convert_ids_to_tokens(self.info.audio_token_id)
        return str(token) * mm_counts.get("audio", 0)

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        # More chunks take no more memory; where a length is configured, all of its rows count.
        chunks = MOST_CHUNKS if self.info.ctx.bounds_size("audio") else CHUNKS_AT_ONCE
        clips = self._get_dummy_audios(
            length=self.info.get_chunk_samples() * chunks, num_audios=mm_counts.get("audio", 0)
        )
        return ProcessorInputs(prompt_text=self.get_dummy_text(mm_counts), mm_data={"audio": clips})


class MistralAudioProcessor(BaseMultiModalProcessor):
    """A processor without options: `input_features` for each audio item."""

    def merged_kwargs(self, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing. Raises InvalidRequestError for options, of which the model has none."""
        if mm_kwargs:
            raise InvalidRequestError(
                "the model's processor takes no mm_processor_kwargs",
                parameter="mm_processor_kwargs",
            )
        return {}

    @abstractmethod
    def _mel(self, samples: Any) -> Tensor:
        """Features, float32, of one audio item's samples [n] at the model's rate."""

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        audio: Any = mm_data["audio"]
        return {"input_features": [self._mel(samples) for samples in audio]}

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"input_features": MultiModalFieldConfig.batched("audio")}


class VoxtralMultiModalProcessor(MistralAudioProcessor):
    """`[AUDIO]`, with its `[BEGIN_AUDIO]` or without, becomes that and all of the item's."""

    info: VoxtralInfo

    def _mel(self, samples: Any) -> Tensor:
        """Mel frames [chunks, mel bins, frames]."""
        # In one go, as the loudest moment of all decides what is too quiet in any chunk.
        outputs = self.info.get_hf_processor().feature_extractor(
            samples,
            sampling_rate=self.info.get_sample_rate(),
            padding=True,
            truncation=False,
            pad_to_multiple_of=self.info.get_chunk_samples(),
            return_tensors="pt",
        )
        (mel,) = outputs["input_features"]
        chunks: Tensor = mel.reshape(len(mel), -1, self.info.get_chunk_frames()).transpose(0, 1)
        return chunks

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        audio, begin = self.info.audio_token_id, self.info.begin_token_id
        outputs = out_mm_kwargs.get_items("audio")

        def count(item_idx: int) -> int:
            if outputs:
                return len(outputs[item_idx]["input_features"]) * self.info.get_rows_per_chunk()
            length = mm_items.get_items("audio", AudioProcessorItems).get_audio_length(item_idx)
            return self.info.get_num_audio_tokens(num_samples=length)

        repeated = repeat_token(mm_items, "audio", audio, count)

        def get_replacement(item_idx: int) -> PromptUpdateDetails:
            features = repeated(item_idx)
            return PromptUpdateDetails(full=[begin, *features], features=features)

        return [
            PromptReplacement(modality="audio", target=target, replacement=get_replacement)
            for target in ([begin, audio], [audio])
        ]


@MULTIMODAL_REGISTRY.register_processor(
    VoxtralMultiModalProcessor, info=VoxtralInfo, dummy_inputs=VoxtralDummyInputsBuilder
)
class Voxtral(TransformersModel):
    """Audio of any length."""

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows [n, rows, hidden] of n audio items of equally many chunks.

        `input_features` [n, chunks, mel bins, frames]; or `audio_embeds`, which pass through.
        """
        features = kwargs.get("input_features")
        if features is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(features, Tensor)
        rows: list[Tensor] = []
        for chunks in torch.split(features.flatten(0, 1), CHUNKS_AT_ONCE):
            inputs = {"input_features": chunks}
            rows += encoding.encode_batch(self.model, inputs, self.dtype, self.device)
        return torch.cat(rows).reshape(len(features), -1, self.hidden_size)

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class. transformers takes the chunks of all audio as one batch."""
        if not prompt.items:
            return run_whole(self.model, prompt, rows)
        chunks = torch.cat([item.features["input_features"] for item in prompt.items])
        return run_whole(self.model, prompt, rows, input_features=chunks)
