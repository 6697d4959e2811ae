"""What is public is written down, resolves, and is the same for people and for type checkers."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import aioengine
from tests.architecture.source import ROOT, files, module_name, tree

FIXED = {
    "AsyncEngine",
    "CompletionOutput",
    "Delta",
    "Embeddings",
    "EngineConfig",
    "EngineStatistics",
    "FinishReason",
    "Prompt",
    "RequestOutput",
    "Message",
    "ToolCall",
    "ToolCallDelta",
    "SamplingParams",
    "TokenStream",
    "errors",
}
"""Names that do not go away."""

ADDED = {
    "BlockingStream",
    "EmbeddingOutput",
    "Engine",
    "EngineState",
    "LoadProgress",
    "Logprob",
    "ScoreOutput",
    "StructuredOutputs",
    "MediaConfig",
    "demo_model",
    "demo_images",
    "__version__",
}
"""Names that came later; docs/getting_started.md lists them."""

EXTENSION_POINTS = {
    "processors": {
        "MULTIMODAL_REGISTRY",
        "AudioProcessorItems",
        "BaseDummyInputsBuilder",
        "BaseMultiModalProcessor",
        "BaseProcessingInfo",
        "EmbeddingItems",
        "EncDecMultiModalProcessor",
        "ImageProcessorItems",
        "ImageSize",
        "MultiModalDataItems",
        "MultiModalFieldConfig",
        "MultiModalKwargs",
        "MultiModalKwargsItem",
        "PlaceholderRange",
        "ProcessorInputs",
        "PromptIndexTargets",
        "PromptInsertion",
        "PromptReplacement",
        "PromptUpdate",
        "PromptUpdateDetails",
        "VideoProcessorItems",
    },
    "models": {
        "Attention",
        "AttentionType",
        "DefinedModel",
        "MultiModalEmbeddings",
        "NestedTensors",
        "SupportsEncoderDecoder",
        "SupportsMultiModal",
        "TransformersModel",
        "merge_multimodal_embeddings",
        "register_model",
    },
}


def test_all_is_the_agreed_list() -> None:
    assert set(aioengine.__all__) == FIXED | ADDED
    assert len(aioengine.__all__) == len(FIXED | ADDED)
    assert dir(aioengine) == sorted(aioengine.__all__)


def test_additions_are_documented() -> None:
    page = (ROOT / "docs" / "getting_started.md").read_text()
    for name in ADDED:
        assert f"`{name}" in page, name


@pytest.mark.parametrize("package", ["aioengine", *(f"aioengine.{p}" for p in EXTENSION_POINTS)])
def test_type_checkers_see_the_same_names(package: str) -> None:
    """The lazy table of a package and its imports under TYPE_CHECKING name the same things."""
    module = import_module(package)
    name = package.rpartition(".")[2]
    source = tree(ROOT / name / "__init__.py")
    shown = set()
    for node in source.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                shown |= {alias.asname for alias in statement.names}
    assert shown == set(module.__all__) - {"__version__", "demo_model", "demo_images"}


@pytest.mark.parametrize("package", EXTENSION_POINTS)
def test_extension_points(package: str) -> None:
    module = import_module(f"aioengine.{package}")
    assert EXTENSION_POINTS[package] <= set(module.__all__)


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_every_public_name_resolves(path: Path) -> None:
    if path.stem == "__main__":
        return
    if path.parent.name == "triton":
        pytest.importorskip("triton")
    module = import_module(module_name(path))
    names = getattr(module, "__all__", ())
    assert len(set(names)) == len(names)
    for public in names:
        assert hasattr(module, public), public


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = aioengine.Motor


def test_the_package_is_typed() -> None:
    assert (ROOT / "aioengine" / "py.typed").exists()
