"""Facts about the model that is served, as its pages show them: what it takes, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module, metadata
from typing import Any

from aioengine.config import EngineConfig, MediaConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.processors.speech import SupportsTranscription
from aioengine.sampling_params import SamplingParams

__all__ = ["model_facts", "version"]

NAMES = frozenset(
    {*("dtype", "device", "processor_workers", "attention_backend", "model_impl")}
    | {*("quantization", "kv_cache_dtype", "mm_encoder_tp_mode")}
)
"""Options whose text is a name that the engine knows: of others it may be a path or a host."""


def model_facts(engine: AsyncEngine) -> dict[str, Any]:
    """Facts about a running engine, as JSON's objects. Raises EngineError where it does not run.

    `answers`: "chat", "completion" where the model has no chat template, or "transcription" where
    it only writes down speech. `media`: modality -> items that one prompt may have, None for any
    number; `max_bytes`: of one item.
    """
    statistics, media = engine.statistics(), engine.processor.info.get_allowed_mm_limits()
    return {
        "answers": _answers(engine.processor),
        "media": media,
        "max_bytes": {modality: engine.config.media.max_bytes(modality) for modality in media},
        "sampling": SamplingParams.recommended(engine.processor.info.ctx.generation_config),
        "device": statistics.device,
        "dtype": statistics.dtype,
        "version": version(),
        "options": _changed(engine.config, EngineConfig())
        | _changed(engine.config.media, MediaConfig(), "media."),
    }


def version() -> str | None:
    """The installed version; None for a source tree."""
    try:
        return metadata.version("aioengine")
    except metadata.PackageNotFoundError:
        return None


def _answers(processor: Any) -> str:
    # Not at the top of the file: it needs torch, which is there once the engine runs.
    if import_module("aioengine.processors.chat.renderer").takes_messages(processor):
        return "chat"
    return "transcription" if isinstance(processor, SupportsTranscription) else "completion"


def _changed(config: Any, default: Any, prefix: str = "") -> dict[str, Any]:
    """The options that are not the default ones; "set" for what may be somebody's own."""
    return {
        prefix + each.name: _shown(each.name, getattr(config, each.name))
        for each in fields(default)
        if each.name != "media" and getattr(config, each.name) != getattr(default, each.name)
    }


def _shown(name: str, value: Any) -> Any:
    if value is None or isinstance(value, int | float) or name in NAMES:
        return value
    is_limits = name == "limit_mm_per_prompt" and isinstance(value, Mapping)
    return {key: _shown(name, limit) for key, limit in value.items()} if is_limits else "set"
