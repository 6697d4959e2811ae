"""Every documented public path, written down by hand and imported as users write it."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.architecture.test_exports import ADDED, EXTENSION_POINTS, FIXED

PUBLIC = {
    "aioengine": FIXED | ADDED,
    "aioengine.asgi": {"ResponseStore", "openai_app", "service_app"},
    "aioengine.config": {"EngineConfig", "MediaConfig"},
    "aioengine.errors": {
        "AioEngineError",
        "EngineClosedError",
        "EngineDeadError",
        "EngineError",
        "InvalidRequestError",
        "MediaError",
        "MediaUnavailableError",
        "ModelLoadError",
        "OverloadedError",
        "PlaceholderMismatchError",
        "PromptTooLongError",
        "RequestAbortedError",
        "UnsupportedModalityError",
        "WrongLoopError",
    },
    "aioengine.instruments": {"STAGES", "RequestEvent", "StageSpan", "TraceRecorder"},
    "aioengine.metrics": {"Metrics"},
    "aioengine.models": EXTENSION_POINTS["models"],
    "aioengine.processors": EXTENSION_POINTS["processors"],
    "aioengine.ray_serve": {"AffinityRouter", "application"},
    "aioengine.tracing": {"RequestTracer", "trace_requests"},
    "aioengine.types": {
        "CompletionOutput",
        "Delta",
        "Embeddings",
        "EngineState",
        "EngineStatistics",
        "FinishReason",
        "LoadProgress",
        "Logprob",
        "Prompt",
        "RequestOutput",
        "StageStatistics",
        "Timings",
        "TokenLogprobs",
        "Usage",
    },
}


@pytest.mark.parametrize("path", PUBLIC)
def test_a_public_path_stays(path: str) -> None:
    module = import_module(path)
    assert {name for name in PUBLIC[path] if not hasattr(module, name)} == set()
