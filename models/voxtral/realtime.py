"""Voxtral Realtime: a causal tower, and a decoder that writes while it hears.

A row for each 80 ms of audio is added to the embedding of the token that is there, in the answer as
in the prompt: silence, and as many tokens as the text is late. The answer ends with the audio.
mistral_common lays audio out so; its settings are in the checkpoint's tekken.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.runtime import encoding
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, flatten_embeddings
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
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
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["StreamLayout", "VoxtralRealtime"]

MOST_SILENCE = 1 << 12
"""Tokens before the audio, or of delay, that a checkpoint may want."""
BUFFER_TOKENS = 10
"""Silence behind the audio, beside the delay: room for the last word. Source: mistral_common."""
LONGEST_S = 1800
"""Of the longest audio for which memory is laid out."""
DUMMY_S = 60
"""Of audio that the tower's memory is measured with."""
FRAMES_AT_ONCE = 3000
"""Mel frames that the tower hears together; what it keeps of those before them is a window."""


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """A feature extractor, and how audio lies in a stream of tokens, one every `token_samples`.

    `num_left`: tokens of silence before the audio; `num_delay`: by which the text is late.
    """

    feature_extractor: Any
    num_left: int
    num_delay: int
    token_samples: int

    @classmethod
    def read(cls, settings: Any, feature_extractor: Any) -> StreamLayout:
        """Read what a tekken.json says of audio. Raises ValueError."""
        if not isinstance(settings, Mapping) or settings.get("transcription_format") != "streaming":
            raise ValueError("it does not describe audio that is streamed")
        encoding = settings["audio_encoding_config"]
        told = {"sampling_rate": settings["sampling_rate"], **encoding}
        for name, ours in (
            ("sampling_rate", feature_extractor.sampling_rate),
            ("hop_length", feature_extractor.hop_length),
            ("window_size", feature_extractor.win_length),
            ("num_mel_bins", feature_extractor.feature_size),
        ):
            if told[name] != ours:
                theirs = f"{name} is {told[name]!r:.40}"
                raise ValueError(f"{theirs}, and {ours!r:.40} in the feature extractor's settings")
        rate = feature_extractor.sampling_rate
        token_samples = int(rate // settings["frame_rate"])
        delay = settings["transcription_delay_ms"] * rate / 1000 / token_samples
        num_left = settings["streaming_n_left_pad_tokens"]
        if delay != int(delay) or int(delay) not in range(1, MOST_SILENCE):
            raise ValueError("transcription_delay_ms is no number of tokens, or too many")
        if num_left not in range(MOST_SILENCE):
            raise ValueError("streaming_n_left_pad_tokens is no number of tokens, or too many")
        found = cls(feature_extractor, num_left, int(delay), token_samples)
        rows = found.count_rows(1) * token_samples // feature_extractor.hop_length
        if found.features(torch.zeros(1)).shape != (feature_extractor.feature_size, rows):
            raise ValueError("the feature extractor makes other frames of a sample")
        return found

    @property
    def num_prompt(self) -> int:
        """Tokens of a prompt, the first of which begins the text."""
        return 1 + self.num_left + self.num_delay

    def count_rows(self, num_samples: int) -> int:
        """Rows of so many samples, with the silence around them."""
        after = self.num_delay + 1 + BUFFER_TOKENS
        return self.num_left - (-num_samples // self.token_samples) + after

    def features(self, samples: Any) -> Tensor:
        """Mel frames [mel bins, frames] of samples [n] with the silence around them."""
        given = torch.as_tensor(samples)
        rows = self.count_rows(len(given)) - self.num_left
        after = rows * self.token_samples - len(given)
        padded = pad(given, (self.num_left * self.token_samples, after))
        rate = self.feature_extractor.sampling_rate
        outputs = self.feature_extractor(padded.numpy(), sampling_rate=rate, return_tensors="pt")
        mel: Tensor = outputs["input_features"][0]
        return mel


class VoxtralRealtimeInfo(MistralAudioInfo):
    """One audio item, and the prompt that is the same for each."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        self.stream: StreamLayout = self.get_hf_processor()
        config = self.get_hf_config()
        frames = self.stream.token_samples / self.stream.feature_extractor.hop_length
        if frames != config.audio_length_per_tok:
            raise ModelLoadError(
                f"the tekken.json of {self.model_id!r} has a token for {frames:g} frames of audio, "
                f"its config for {config.audio_length_per_tok} (audio_length_per_tok)"
            )
        if self.stream.num_delay != config.default_num_delay_tokens:
            raise ModelLoadError(
                f"the tekken.json of {self.model_id!r} delays the text by {self.stream.num_delay} "
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
        if self.stream.num_prompt >= longest or self.get_allowed_mm_limits()["audio"] == 0:
            raise ModelLoadError(
                f"the model takes nothing but audio, behind {self.stream.num_prompt} tokens of "
                f"silence: limit_mm_per_prompt allows none, or they are all of its {longest} "
                "positions"
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
    """Silence that the tower hears in two pieces: more takes no more memory, but for its rows."""

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


@MULTIMODAL_REGISTRY.register_processor(
    VoxtralRealtimeProcessor, info=VoxtralRealtimeInfo, dummy_inputs=VoxtralRealtimeDummyInputs
)
class VoxtralRealtime(TransformersModel):
    """One audio item, of any length: a row of it is added to each token, the answer's too."""

    def patch(self) -> None:
        """See the base class. The tower is causal, and an encoder like others."""
        super().patch()
        for layer in self.model.model.audio_tower.layers:
            layer.self_attn.is_of_encoder = True

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows [n, rows, hidden] of n audio items of one length.

        `input_features` [n, mel bins, frames]; or `audio_embeds`, which pass through.
        """
        features = kwargs.get("input_features")
        if features is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(features, Tensor)
        inner = self.model.model
        step = FRAMES_AT_ONCE - FRAMES_AT_ONCE % self.hf_config.audio_length_per_tok
        pieces = torch.split(features, step, dim=-1)
        cache = DynamicCache(config=inner.audio_tower.config) if len(pieces) > 1 else None
        rows, padding = [], None
        for piece in pieces:
            found = inner.get_audio_features(
                encoding.place(piece, self.dtype, self.device),
                past_key_values=cache,
                padding_cache=padding,
                use_cache=cache is not None,
            )
            rows.append(found.pooler_output)
            padding = found.padding_cache  # what convolutions see of the piece before
        return torch.cat(rows, dim=1)

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """See the base class. Rows are added to what their tokens embed to."""
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        if is_multimodal is None or rows is None:
            return embeds
        added = flatten_embeddings(rows).to(embeds)
        mask = is_multimodal.to(input_ids.device)[:, None]
        return embeds + torch.zeros_like(embeds).masked_scatter_(mask, added)

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """See the base class. Each layer is told by how much the text is late."""
        delay = embeds.new_full((1,), float(self.hf_config.default_num_delay_tokens))
        told = self.model.model.time_embedding(delay)[None]
        return self.run_decoder(decoder, embeds, positions, t_cond=told)

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class. transformers takes as much audio as there are tokens."""
        num_frames = len(prompt.token_ids) * self.hf_config.audio_length_per_tok
        features = [item.features["input_features"][:, :num_frames] for item in prompt.items]
        if not features:
            return run_whole(self.model, prompt, rows)
        bare = WholePrompt(token_ids=prompt.token_ids)
        given = {
            "input_features": torch.stack(features),
            "num_delay_tokens": torch.tensor(self.hf_config.default_num_delay_tokens),
        }
        return run_whole(self.model, bare, rows, **given)
