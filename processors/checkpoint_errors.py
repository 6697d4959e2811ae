"""Diagnosis of a checkpoint's folder, in words: which file or token, and the way out.

transformers' own errors name a class or a whole path, and seldom the file; what they say is kept
where nothing better is known, without the folders on the way to it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioengine.errors import ModelLoadError
from aioengine.processors.hf.files import find_file

if TYPE_CHECKING:
    from aioengine.processors.info import BaseProcessingInfo

__all__ = [
    "check_placeholders",
    "check_tekken",
    "explain",
    "read_settings",
    "shown",
    "without_folders",
]

_MAX_CHARACTERS = 300
MOST_SPECIAL_TOKENS = 1 << 16
_VOCABULARIES = (
    "tokenizer.json", "*.model", "vocab.*", "tekken*.json", "*.tiktoken", "*tokenizer*.bin",
)  # fmt: skip
_MEDIA_SETTINGS = ("preprocessor_config.json", "video_preprocessor_config.json")
_MEDIA_PARTS = ("image_processor", "feature_extractor", "video_processor", "audio_processor")


def shown(source: str | os.PathLike[str]) -> str:
    """A checkpoint for a message: a hub id as it is, of a folder its own name only."""
    text = os.fspath(source)
    is_path = os.path.isabs(text) or os.path.exists(text) or isinstance(source, os.PathLike)
    return (Path(text).name or Path(text).resolve().name) if is_path else text


def without_folders(error: BaseException, source: str | os.PathLike[str]) -> str:
    """The first line of what an error says, and a second that it announces, with names of files and
    without their folders."""
    first, *more = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = f"{first} {more[0]}" if more and first.endswith(":") else first
    for path in {os.path.realpath(source), os.path.abspath(source), os.fspath(source)}:
        if os.path.isabs(path):
            text = text.replace(path, shown(path))
    # Other absolute paths: those of a cache, say. What follows a letter or a colon is no such.
    text = re.sub(r"(?<![\w.:/~-])/(?:[^\s'\"<>|:/]+/)+", "", text)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def read_settings(file: Path, source: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint's JSON file that holds an object. Raises ModelLoadError for any other."""
    name = f"{file.name} of {shown(source)!r}"
    try:
        settings = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{name} could not be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ModelLoadError(f"{name} is not valid JSON{where}: fetch the file again") from error
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{name} holds no JSON object: fetch the file again")
    return settings


def explain(what: str, source: str, hf_config: Any, error: Exception | None) -> str:
    """Explain why "tokenizer" or "processor" of a folder or hub id could not be loaded. Never
    raises.

    `error` is what transformers raised; None if what it says must not be shown.
    """
    folder, begin = Path(source), f"the {what} of {shown(source)!r} could not be loaded"
    if folder.is_dir():
        for fault in _faults(what, folder, hf_config):
            return f"{begin}: {fault}"
    if error is None:
        return begin
    said = without_folders(error, source)
    return f"{begin}: {type(error).__name__}{f': {said}' if said else ''}"


def _faults(what: str, folder: Path, hf_config: Any) -> Iterator[str]:
    """List what can be seen of the files without loading them, the likeliest first."""
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        yield (
            "the folder has no tokenizer files (tokenizer.json, or a vocabulary of an older kind); "
            "copy them from where its weights are from"
        )
    vocabulary = folder / "tokenizer.json"
    if vocabulary.is_file():
        try:
            if "model" not in read_settings(vocabulary, folder):
                yield "tokenizer.json holds no tokenizer; fetch the file again"
        except ModelLoadError as fault:
            yield str(fault)
    if what == "processor" and _has_processor(hf_config) and not _has_media_settings(folder):
        yield (
            "the folder has no preprocessor_config.json, and no processor_config.json that says "
            "how media are processed; copy it from where its weights are from"
        )


def _has_processor(hf_config: Any) -> bool:
    """Return whether transformers has a processor class, and not a mere tokenizer, for such
    models."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return getattr(hf_config, "model_type", None) in PROCESSOR_MAPPING_NAMES


def _has_media_settings(folder: Path) -> bool:
    if any((folder / name).is_file() for name in _MEDIA_SETTINGS):
        return True
    try:
        settings = read_settings(folder / "processor_config.json", folder)
    except ModelLoadError:
        return False
    return any(part in settings for part in _MEDIA_PARTS)


def check_tekken(source: str, revision: str | None) -> None:
    """Raise ModelLoadError for a tekken.json whose number of special tokens cannot be: transformers
    makes a name for each."""
    path = find_file(source, "tekken.json", revision)
    if path is None:
        return
    settings = read_settings(path, source)
    config, named = settings.get("config"), settings.get("special_tokens") or []
    most = config.get("default_num_special_tokens") if isinstance(config, dict) else None
    known = len(named) if isinstance(named, list) else 0
    if type(most) is not int or not known <= most <= MOST_SPECIAL_TOKENS:
        raise ModelLoadError(
            f"tekken.json of {shown(source)!r} names {known} special tokens and says that there "
            f"are {most!r:.40} (default_num_special_tokens): fetch the file again"
        )


def check_placeholders(info: BaseProcessingInfo) -> None:
    """Raises ModelLoadError if the tokenizer lacks what stands for an item of the model's media.

    That is the token that the HF processor names, and the id that the model's config names. Without
    this check every prompt with media would fail, each for itself.
    """
    for modality in info.get_supported_mm_limits():
        tokenizer = info.get_tokenizer()
        token = getattr(info.get_hf_processor(), f"{modality}_token", None)
        is_token = isinstance(token, str) and not info.placeholders_are_text
        if is_token and not _knows(tokenizer, str(token)):
            raise _lacks(info, f"token {token!r}", modality)
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            token_id = getattr(info.get_hf_config(), name, None)
            if isinstance(token_id, int) and not _has_id(tokenizer, token_id):
                raise _lacks(info, f"token with the id {token_id} (the config's {name})", modality)


def _lacks(info: BaseProcessingInfo, token: str, modality: str) -> ModelLoadError:
    return ModelLoadError(
        f"the tokenizer of {shown(info.model_id)!r} has no {token}, which stands for each "
        f"{modality} in a prompt: copy tokenizer.json and tokenizer_config.json from where the "
        "weights are from, or add the token"
    )


def _knows(tokenizer: Any, token: str) -> bool:
    token_id = tokenizer.convert_tokens_to_ids(token)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return token_id is not None and (token_id != unknown or token == tokenizer.unk_token)


def _has_id(tokenizer: Any, token_id: int) -> bool:
    try:
        return tokenizer.convert_ids_to_tokens(token_id) is not None
    except (IndexError, OverflowError, ValueError):
        return False
