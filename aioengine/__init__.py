"""aioengine: an asyncio-native inference engine for multimodal models.

Importing this package imports neither torch nor transformers; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine import errors as errors
    from aioengine.config import EngineConfig as EngineConfig
    from aioengine.config import MediaConfig as MediaConfig
    from aioengine.demo_assets import demo_model as demo_model
    from aioengine.demo_assets import demo_pictures as demo_pictures
    from aioengine.engine.async_engine import AsyncEngine as AsyncEngine
    from aioengine.sampling_params import SamplingParams as SamplingParams
    from aioengine.sampling_params import StructuredOutputs as StructuredOutputs
    from aioengine.streams.tokens import TokenStream as TokenStream
    from aioengine.types import CompletionOutput as CompletionOutput
    from aioengine.types import Delta as Delta
    from aioengine.types import Embeddings as Embeddings
    from aioengine.types import EngineState as EngineState
    from aioengine.types import EngineStatistics as EngineStatistics
    from aioengine.types import FinishReason as FinishReason
    from aioengine.types import LoadProgress as LoadProgress
    from aioengine.types import Logprob as Logprob
    from aioengine.types import Prompt as Prompt
    from aioengine.types import RequestOutput as RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "aioengine.engine.async_engine",
    "CompletionOutput": "aioengine.types",
    "Delta": "aioengine.types",
    "Embeddings": "aioengine.types",
    "EngineConfig": "aioengine.config",
    "EngineState": "aioengine.types",
    "EngineStatistics": "aioengine.types",
    "FinishReason": "aioengine.types",
    "LoadProgress": "aioengine.types",
    "Logprob": "aioengine.types",
    "MediaConfig": "aioengine.config",
    "Prompt": "aioengine.types",
    "RequestOutput": "aioengine.types",
    "SamplingParams": "aioengine.sampling_params",
    "StructuredOutputs": "aioengine.sampling_params",
    "TokenStream": "aioengine.streams.tokens",
    "demo_model": "aioengine.demo_assets",
    "demo_pictures": "aioengine.demo_assets",
}

__all__ = ["__version__", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("aioengine.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
