"""Prompts and features of Voxtral Realtime: one audio item makes the whole prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.voxtral.stream_layout import StreamLayout
from aioengine.models.voxtral.voxtral import MistralAudioInfo, MistralAudioProcessor
from aioengine.processors.checkpoint_errors import read_settings, shown
from aioengine.processors.embeddings import repeat_token
from aioengine.processors.hf.files import find_file
from aioengine.processors.info import BaseDummyInputsBuilder, ProcessingContext, ProcessorInputs
from aioengine.processors.inputs import MultiModalKwargs, MultiModalKwargsItem
from aioengine.processors.items import AudioProcessorItems, MultiModalDataItems
from aioengine.processors.processor import Layout, TextOrTokens
from aioengine.processors.prompt.updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

__all__ = [
    "VoxtralRealtimeDummyInputs",
    "VoxtralRealtimeInfo",
    "VoxtralRealtimeProcessor",
]


LONGEST_S = 1800
"""Of the longest audio for which memory is laid out."""
DUMMY_S = 60
"""Of audio that the tower's memory is measured with."""


class VoxtralRealtimeInfo(MistralAudioInfo):
    """One audio item, and the prompt that is the same for each."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        self.stream: StreamLayout = self.get_hf_processor()
        config = self.get_hf_config()
        name = shown(self.model_id)
        frames = self.stream.token_samples / self.stream.feature_extractor.hop_length
        if frames != config.audio_length_per_tok:
            raise ModelLoadError(
                f"the tekken.json of {name!r} has a token for {frames:g} frames of audio, "
                f"its config for {config.audio_length_per_tok} (audio_length_per_tok)"
            )
        if self.stream.num_delay != config.default_num_delay_tokens:
            raise ModelLoadError(
                f"the tekken.json of {name!r} delays the text by {self.stream.num_delay} "
                f"tokens, its config by {config.default_num_delay_tokens}; give "
                "transcription_delay_ms and default_num_delay_tokens the same delay"
            )
        windows = [
            part.sliding_window
            for part in (config.audio_config, config.text_config)
            if part.sliding_window is not None
        ]
        if any(window < 2 for window in windows):
            raise ModelLoadError(f"a sliding_window of {min(windows)} sees nothing")
        longest = int(config.text_config.max_position_embeddings)
        if self.stream.num_prompt >= longest:
            raise ModelLoadError(
                f"the tekken.json of {name!r} begins with {self.stream.num_prompt} tokens of "
                f"silence, which are all of its {longest} positions"
            )
        if self.get_allowed_mm_limits()["audio"] == 0:
            raise ModelLoadError(
                "the model takes nothing but audio, and limit_mm_per_prompt allows none; leave "
                "'audio' out of it"
            )
        silence = [self.find_token("[STREAMING_PAD]")] * (self.stream.num_prompt - 1)
        self.prompt = [self.find_token("<s>"), *silence]

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """A `StreamLayout`; transformers' own needs mistral_common."""
        from transformers import AutoFeatureExtractor

        extractor = AutoFeatureExtractor.from_pretrained(source, **options)
        path = find_file(source, "tekken.json", options.get("revision"))
        if path is None:
            message = f"{shown(source)!r} has no tekken.json, which says how audio is streamed"
            raise ModelLoadError(message)
        try:
            return StreamLayout.read(read_settings(path, source)["audio"], extractor)
        except ModelLoadError:
            raise
        # Whatever settings make of arithmetic, and of the feature extractor.
        except Exception as error:
            raise ModelLoadError(
                f"what tekken.json and the feature extractor of {shown(source)!r} say of audio is "
                f"of no use: {type(error).__name__}: {error!s:.200}"
            ) from error

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": 1}

    def get_num_audio_tokens(self, *, num_samples: int) -> int:
        """Encoder rows of an audio item: of the prompt, and of all that may be written."""
        return self.stream.count_rows(num_samples)

    def get_audio_window(self) -> tuple[int, int]:
        """See `SupportsTranscription`: what the engine has room for, in half an hour."""
        rate, most = self.get_sample_rate(), LONGEST_S * self.get_sample_rate()
        if self.ctx.max_model_len is not None:
            room = self.ctx.max_model_len - self.stream.count_rows(0)
            most = min(most, max(1, room) * self.stream.token_samples)
        return most, rate

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the rows of half an hour of audio, or of what the engine holds."""
        longest = seq_len or int(self.get_hf_config().text_config.max_position_embeddings)
        longest_samples = LONGEST_S * self.get_sample_rate()
        least, most = map(self.stream.count_rows, (1, longest_samples))
        return {"audio": max(least, min(most, longest))}


class VoxtralRealtimeDummyInputs(BaseDummyInputsBuilder):
    """Silence that the tower hears in pieces: more of them take no more memory, but for rows."""

    info: VoxtralRealtimeInfo

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        seconds = LONGEST_S if self.info.ctx.bounds_size("audio") else DUMMY_S
        clips = self._get_dummy_audios(
            length=seconds * self.info.get_sample_rate(), num_audios=mm_counts.get("audio", 0)
        )
        return ProcessorInputs(prompt_text="", mm_data={"audio": clips})


class VoxtralRealtimeProcessor(MistralAudioProcessor):
    """One audio item makes the whole prompt. A processor that `SupportsTranscription`."""

    info: VoxtralRealtimeInfo

    def layout(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]] | None = None,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """See the base class. Raises InvalidRequestError for text, and without audio."""
        if items.get_all_counts().get("audio"):
            found = super().layout(prompt, items, mm_kwargs, outputs, literals)
            if found.token_ids == self.info.prompt:
                return found
        raise InvalidRequestError(
            "the model reads no text, it writes down what it hears: give an empty prompt and one "
            "audio item",
            parameter="prompt",
        )

    def create_transcription_prompt(self, language: str | None, context: str) -> list[int]:
        """See `SupportsTranscription`. The model is told nothing."""
        for parameter, given in (("language", language), ("prompt", context)):
            if given:
                raise InvalidRequestError(
                    f"the model takes no {parameter}: it hears which language is spoken, and is "
                    "told nothing else; leave it out",
                    parameter=parameter,
                )
        return self.info.prompt[:1]

    def get_audio_window(self) -> tuple[int, int]:
        """See `SupportsTranscription`."""
        return self.info.get_audio_window()

    def _mel(self, samples: Any) -> Tensor:
        return self.info.stream.features(samples)

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        prompt = self.info.prompt

        def count(item_idx: int) -> int:
            audio = mm_items.get_items("audio", AudioProcessorItems)
            return self.info.get_num_audio_tokens(num_samples=audio.get_audio_length(item_idx))

        rows = repeat_token(mm_items, "audio", prompt[-1], count)

        def get_content(item_idx: int) -> PromptUpdateDetails:
            num_answer_rows = len(rows(item_idx)) - len(prompt)
            if num_answer_rows < 1:
                name = f"audios[{item_idx}]"
                message = f"{name} has no row for an answer behind the prompt's {len(prompt)}"
                raise MediaError(message, parameter=name)
            return PromptUpdateDetails(full=prompt, num_answer_rows=num_answer_rows)

        start = PromptIndexTargets.start()
        return [
            PromptReplacement(modality="audio", target=prompt[:1], replacement=get_content),
            PromptInsertion(modality="audio", target=start, insertion=get_content),
        ]
