"""Helpers for models that write down speech: a prompt's tokens, windows of long audio."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from aioengine.errors import InvalidRequestError

__all__ = ["SupportsTranscription", "cut_windows", "language_code", "whisper_prompt"]

FRAME_S = 0.02
"""Loudness is looked at in pieces so long."""


@runtime_checkable
class SupportsTranscription(Protocol):
    """A processor of a model that writes down speech, in windows as long as it hears."""

    def create_transcription_prompt(self, language: str | None, context: str) -> list[int]:
        """Build what the decoder begins with. `language`: its code or English name; None: the
        model's own. `context`: what was said before. Raises InvalidRequestError where it cannot
        know."""

    def get_audio_window(self) -> tuple[int, int]:
        """The longest audio that the model hears: samples, and their rate in Hz."""


def whisper_prompt(
    language: str | None = None, task: str = "transcribe", *, timestamps: bool = False
) -> str:
    """The text of a decoder prompt for Whisper: `generate(whisper_prompt("de"), audios=[...])`.

    `language`: its code or English name, "de" or "german"; None for a model of one language, whose
    prompt names neither language nor task. `task`: "transcribe", or "translate" into English.
    `timestamps`: whether the text is to have them. Radford et al., "Robust Speech Recognition via
    Large-Scale Weak Supervision" (2022), section 2.3. Raises InvalidRequestError.
    """
    if task not in ("transcribe", "translate"):
        raise InvalidRequestError("task must be transcribe or translate", parameter="task")
    if language is None and task == "translate":
        raise InvalidRequestError("a translation needs the language spoken", parameter="language")
    spoken = "" if language is None else f"<|{language_code(language)}|><|{task}|>"
    return f"<|startoftranscript|>{spoken}" + ("" if timestamps else "<|notimestamps|>")


def language_code(language: str) -> str:
    """The code of a language that Whisper knows, of its code or its English name.

    Raises InvalidRequestError.
    """
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = language.lower()
    code = TO_LANGUAGE_CODE.get(name, name)
    if code not in TO_LANGUAGE_CODE.values():
        raise InvalidRequestError(
            f"language {language!r:.40} is none of Whisper's; give its code, such as de, or its "
            "English name",
            parameter="language",
            value=language,
        )
    return str(code)


def cut_windows(
    samples: np.ndarray[Any, np.dtype[Any]],
    sample_rate: int,
    *,
    window_s: float = 30.0,
    search_s: float = 3.0,
) -> list[tuple[np.ndarray[Any, np.dtype[Any]], int]]:
    """An audio item [n] as windows of `window_s` at most, each `(samples, sample_rate)`.

    A window ends where it is quietest in its last `search_s`, so that words are left whole. The
    windows are views, and joined they are the audio. Raises InvalidRequestError.
    """
    if samples.ndim != 1:
        raise InvalidRequestError("samples must be [n], of one channel", parameter="samples")
    if not (0 <= search_s < window_s < float("inf") and window_s * sample_rate >= 1):
        raise InvalidRequestError(
            "search_s must be less than window_s, and a window hold a sample", parameter="window_s"
        )
    length, search = int(window_s * sample_rate), int(search_s * sample_rate)
    frame = max(1, int(FRAME_S * sample_rate))
    windows = []
    start = 0
    while len(samples) - start > length:
        end = start + length
        if search > frame:
            tail = samples[end - search : end].astype(np.float64)
            pieces = tail[: len(tail) // frame * frame].reshape(-1, frame)
            quietest = int(np.square(pieces).sum(axis=1).argmin())
            end = end - search + quietest * frame + frame // 2
        windows.append((samples[start:end], sample_rate))
        start = end
    windows.append((samples[start:], sample_rate))
    return windows
