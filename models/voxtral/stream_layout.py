"""Audio in a stream of tokens: silence before it and after it, and text that is late by a delay.

mistral_common lays audio out so; its settings are in a checkpoint's tekken.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["StreamLayout"]

MOST_SILENCE = 1 << 12
"""Tokens before the audio, or of delay, that a checkpoint may want."""
BUFFER_TOKENS = 10
"""Silence behind the audio, beside the delay: room for the last word. Source: mistral_common."""


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
