"""aioengine: an asyncio-native inference engine for multimodal models.

Importing this package imports neither torch nor transformers; the names below load on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aioengine.types import lazy_exports

if TYPE_CHECKING:
    from aioengine import errors as errors
    from aioengine.config import EngineConfig as EngineConfig
    from aioengine.config import MediaConfig as MediaConfig
    from aioengine.engine.async_engine import AsyncEngine as AsyncEngine
    from aioengine.engine.blocking import BlockingStream as BlockingStream
    from aioengine.engine.blocking import Engine as Engine
    from aioengine.sampling_params import SamplingParams as SamplingParams
    from aioengine.sampling_params import StructuredOutputs as StructuredOutputs
    from aioengine.streams.tokens import TokenStream as TokenStream
    from aioengine.types import CompletionOutput as CompletionOutput
    from aioengine.types import Delta as Delta
    from aioengine.types import EmbeddingOutput as EmbeddingOutput
    from aioengine.types import Embeddings as Embeddings
    from aioengine.types import EngineState as EngineState
    from aioengine.types import EngineStatistics as EngineStatistics
    from aioengine.types import FinishReason as FinishReason
    from aioengine.types import LoadProgress as LoadProgress
    from aioengine.types import Logprob as Logprob
    from aioengine.types import Message as Message
    from aioengine.types import Prompt as Prompt
    from aioengine.types import RequestOutput as RequestOutput
    from aioengine.types import ScoreOutput as ScoreOutput
    from aioengine.types import ToolCall as ToolCall
    from aioengine.types import ToolCallDelta as ToolCallDelta

__version__ = "0.1.0"

ASSETS = Path(__file__).parent / "assets"


def demo_model() -> Path:
    """The folder of the demo model, a small LLaVA trained on rendered shapes and digits.

    It describes such images and answers questions about them; it knows nothing of photographs.
    """
    return ASSETS / "demo_llava"


def demo_images() -> list[Path]:
    """Eight image files that the demo model can describe."""
    return sorted(path for path in (ASSETS / "images").iterdir() if path.suffix != ".md")


_LAZY, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "aioengine.config": "EngineConfig MediaConfig",
        "aioengine.engine.async_engine": "AsyncEngine",
        "aioengine.engine.blocking": "BlockingStream Engine",
        "aioengine.errors": "errors",
        "aioengine.sampling_params": "SamplingParams StructuredOutputs",
        "aioengine.streams.tokens": "TokenStream",
        "aioengine.types": (
            "CompletionOutput Delta EmbeddingOutput Embeddings EngineState EngineStatistics "
            "FinishReason LoadProgress Logprob Message Prompt RequestOutput ScoreOutput ToolCall "
            "ToolCallDelta"
        ),
    },
)

__all__ = ["__version__", "demo_model", "demo_images", *_LAZY]
