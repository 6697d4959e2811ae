"""Whisper and Moonshine: an encoder that listens, and a decoder that writes down what was said.

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022): log-mel
features of 30 seconds, always 1,500 rows. Jeffries et al., "Moonshine: Speech Recognition for Live
Transcription and Voice Commands" (2024): convolutions over the samples themselves, as many rows as
the audio is long. A prompt is the decoder's; the encoder reads nothing but the audio.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.encdec.base import EncoderDecoderModel
from aioengine.processors.embeddings import repeat_token
from aioengine.processors.encdec import EncDecMultiModalProcessor, forced_tokens
from aioengine.processors.info import BaseDummyInputsBuilder, BaseProcessingInfo, ProcessorInputs
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import AudioProcessorItems, MultiModalDataItems
from aioengine.processors.processor import TextOrTokens
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdate
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.processors.speech import language_code

__all__ = [
    "Listener",
    "Moonshine",
    "MoonshineInfo",
    "SpeechDummyInputs",
    "SpeechInfo",
    "SpeechMultiModalProcessor",
    "Whisper",
    "WhisperInfo",
    "WhisperMultiModalProcessor",
    "count_moonshine_rows",
]

CONTEXT_CHARACTERS = 16
"""Of what was said before, for each token that there is room for: few tokens are longer."""
MOONSHINE_SECONDS = 64
"""Of the longest audio that Moonshine is given: twice what it was trained on."""


def count_moonshine_rows(num_samples: int) -> int:
    """Encoder rows of so many samples: three convolutions, without padding; 0 if too few."""
    for kernel, stride in ((127, 64), (7, 3), (3, 2)):
        num_samples = (num_samples - kernel) // stride + 1
    return max(0, num_samples)


class SpeechInfo(BaseProcessingInfo):
    """One audio item in a prompt."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": 1}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {"audio": self.get_num_audio_tokens(num_samples=self.get_max_samples())}

    @abstractmethod
    def get_num_audio_tokens(self, *, num_samples: int) -> int:
        """Encoder rows of an audio item."""

    @abstractmethod
    def get_max_samples(self) -> int:
        """Number of rows of the longest audio."""


class WhisperInfo(SpeechInfo):
    """Windows of one length."""

    def get_num_audio_tokens(self, *, num_samples: int) -> int:
        return int(self.get_hf_config().max_source_positions)

    def get_max_samples(self) -> int:
        return int(self.get_hf_processor().feature_extractor.n_samples)


class MoonshineInfo(SpeechInfo):
    """Audio as long as they are."""

    def get_num_audio_tokens(self, *, num_samples: int) -> int:
        return count_moonshine_rows(num_samples)

    def get_max_samples(self) -> int:
        return MOONSHINE_SECONDS * self.get_sample_rate()


class SpeechDummyInputs(BaseDummyInputsBuilder):
    """Silence."""

    info: SpeechInfo

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        length, count = self.info.get_max_samples(), mm_counts.get("audio", 0)
        clips = self._get_dummy_audios(length=length, num_audios=count)
        return ProcessorInputs(prompt_text="", mm_data={"audio": clips})


class SpeechMultiModalProcessor(EncDecMultiModalProcessor):
    """The encoder's prompt is one token, which becomes as many as the audio has rows."""

    prompt_half: ClassVar[Literal["encoder", "decoder"]] = "decoder"
    info: SpeechInfo

    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        if not mm_items.get_all_counts().get("audio"):
            raise InvalidRequestError(
                "the model transcribes what it hears; give it audio: audios=[...]",
                parameter="audios",
            )
        return [0]

    def create_decoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        return prompt if len(prompt) else self.default_decoder_prompt()

    def create_transcription_prompt(self, language: str | None, context: str) -> list[int]:
        """See `SupportsTranscription`. A model of one language, which reads nothing before."""
        if language is not None or context:
            raise InvalidRequestError(
                "the model takes neither a language nor a prompt",
                parameter="prompt" if language is None else "language",
            )
        return self.default_decoder_prompt()

    def get_audio_window(self) -> tuple[int, int]:
        """See `SupportsTranscription`."""
        return self.info.get_max_samples(), self.info.get_sample_rate()

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        audio, most = mm_data["audio"], self.info.get_max_samples()
        assert isinstance(audio, list)
        options = {name: value for name, value in mm_kwargs.items() if name != "truncation"}
        # The text has no part in it: HF's processor would make labels of it.
        outputs: Mapping[str, Any] = self.info.get_hf_processor().feature_extractor(
            [samples[:most] for samples in audio],
            sampling_rate=self.info.get_sample_rate(),
            return_tensors="pt",
            **options,
        )
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        names = ("input_features", "input_values")
        return {name: MultiModalFieldConfig.batched("audio") for name in names if name in hf_inputs}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        cuts = hf_processor_mm_kwargs.get("truncation", False)
        if not isinstance(cuts, bool):
            raise InvalidRequestError(
                "truncation must be True or False", parameter="mm_processor_kwargs"
            )

        def count(item_idx: int) -> int:
            length = mm_items.get_items("audio", AudioProcessorItems).get_audio_length(item_idx)
            return self._count_rows(length, cuts, f"audios[{item_idx}]")

        repeated = repeat_token(mm_items, "audio", 0, count)
        return [PromptReplacement(modality="audio", target=[0], replacement=repeated)]

    def _count_rows(self, length: int, cuts: bool, parameter: str) -> int:
        rate, most = self.info.get_sample_rate(), self.info.get_max_samples()
        if length > most and not cuts:
            raise MediaError(
                f"{parameter} lasts {length / rate:.1f} s, and the model hears {most // rate} s; "
                f"cut it into windows (aioengine.processors.cut_windows), or set truncation in "
                f"mm_processor_kwargs to have its beginning only",
                parameter=parameter,
                value=length / rate,
            )
        num_rows = self.info.get_num_audio_tokens(num_samples=min(length, most))
        if not num_rows:
            raise MediaError(
                f"{parameter} is too short: {length} samples make no row",
                parameter=parameter,
                value=length,
            )
        return num_rows


class WhisperMultiModalProcessor(SpeechMultiModalProcessor):
    """Whisper's features are cut and padded to a window; its prompt names language and task."""

    def default_decoder_prompt(self) -> list[int]:
        """The start token; for a model of many languages the config's language, else English, and
        the task; and, if the config does not want timestamps, the token that says so.

        As HF: where the config names neither language nor task, older ones force their tokens.
        Raises ModelLoadError for a language or task that the model does not have.
        """
        config, hf_config = self.info.ctx.generation_config, self.info.get_hf_config()
        token_ids = super().default_decoder_prompt()[:1]
        language, task = getattr(config, "language", None), getattr(config, "task", None)
        forced = forced_tokens(config, hf_config) if language is None and task is None else []
        languages = getattr(config, "lang_to_id", None) or {}
        tasks = getattr(config, "task_to_id", None) or {}
        if languages and not set(forced) & set(languages.values()):
            token_ids.append(_find_language(languages, language or "en"))
            forced = [each for each in forced if each in tasks.values()]
            if tasks and not forced:
                token_ids.append(_find(tasks, task or "transcribe", "task"))
        token_ids += forced
        silent = getattr(config, "no_timestamps_token_id", None)
        wants_times = getattr(config, "return_timestamps", False)
        if silent is not None and silent not in token_ids and not wants_times:
            token_ids.append(int(silent))
        return token_ids

    def create_transcription_prompt(self, language: str | None, context: str) -> list[int]:
        """See `SupportsTranscription`. The context is cut to what half of the decoder's length
        holds, from its end. Source: the published code of the paper."""
        config = self.info.ctx.generation_config
        token_ids = self.default_decoder_prompt()
        languages = getattr(config, "lang_to_id", None) or {}
        if language is not None:
            token = f"<|{language_code(language)}|>"
            if token not in languages and (languages or token != "<|en|>"):
                raise InvalidRequestError(
                    f"the model does not know the language {language!r:.40}", parameter="language"
                )
            known = set(languages.values())
            token_ids = [languages[token] if each in known else each for each in token_ids]
        if not context.strip():
            return token_ids
        tokenizer = self.info.get_tokenizer()
        most = int(self.info.get_hf_config().max_target_positions) // 2 - 1
        before = tokenizer.encode(
            " " + context.strip()[-CONTEXT_CHARACTERS * most :],
            add_special_tokens=False,
            split_special_tokens=True,
        )
        start = tokenizer.convert_tokens_to_ids("<|startofprev|>")
        return [start, *before[-most:], *token_ids]

    def has_start(self, token_ids: Sequence[int], start: int) -> bool:
        """Anywhere: what was said before (`<|startofprev|>`) stands before the start."""
        return start in token_ids


def _find_language(languages: Mapping[str, int], language: str) -> int:
    if language in languages:
        return int(languages[language])
    try:
        code = language_code(language)
    except InvalidRequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}") from error
    return _find(languages, f"<|{code}|>", "language")


def _find(token_ids: Mapping[str, int], name: str, what: str) -> int:
    if name not in token_ids:
        raise ModelLoadError(
            f"generation_config.json wants the {what} {name!r:.40}, which the model does not have; "
            f"it has {', '.join(sorted(token_ids)[:9])}"
        )
    return int(token_ids[name])


class Listener(EncoderDecoderModel):
    """An encoder of audio."""

    field: ClassVar[str]
    """The HF feature extractor's output that the encoder takes."""

    @property
    def max_position_embeddings(self) -> int:
        return int(self.hf_config.max_target_positions)

    def encode_prompt(self, **kwargs: Any) -> Tensor:
        """The encoder's output [n, rows, dim], of features [n, ...] or of rows that were given."""
        given: Tensor | None = kwargs.get("audio_embeds")
        if given is not None:
            return given
        found: Tensor = self.encoder()(kwargs[self.field]).last_hidden_state
        return found


@MULTIMODAL_REGISTRY.register_processor(
    WhisperMultiModalProcessor, info=WhisperInfo, dummy_inputs=SpeechDummyInputs
)
class Whisper(Listener):
    """Audio of 30 seconds at most; longer ones in windows, as the caller cuts them."""

    field = "input_features"

    @property
    def max_encoder_len(self) -> int:
        return int(self.hf_config.max_source_positions)


@MULTIMODAL_REGISTRY.register_processor(
    SpeechMultiModalProcessor, info=MoonshineInfo, dummy_inputs=SpeechDummyInputs
)
class Moonshine(Listener):
    """Audio of 64 seconds at most, which are encoded as long as they are."""

    field = "input_values"

    @property
    def max_position_embeddings(self) -> int:
        return int(self.hf_config.max_position_embeddings)

    @property
    def max_encoder_len(self) -> int:
        return count_moonshine_rows(MOONSHINE_SECONDS * 16_000)
