"""Contexts, clones, the registry, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from aioengine import processors
from aioengine.errors import ModelLoadError, UnsupportedModalityError
from aioengine.models.llava import Llava, LlavaMultiModalProcessor
from aioengine.processors.items import (
    ImageHeader,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from aioengine.processors.registry import MULTIMODAL_REGISTRY, MultiModalRegistry
from aioengine.processors.text_only import TextOnlyProcessor
from tests.processors.conftest import context_of


def images(*pil_images: Any) -> MultiModalDataItems:
    return MultiModalDataItems({"image": ImageProcessorItems(pil_images)})


def test_clones_share_nothing_that_threads_must_not_share(llava_folder: Path) -> None:
    context = context_of(llava_folder, limit_mm_per_prompt={"image": 9})
    clone = context.clone()
    assert clone.tokenizer is not context.tokenizer
    assert clone.hf_processor is not context.hf_processor
    assert clone.hf_config is context.hf_config
    assert clone.limit_mm_per_prompt == {"image": {"count": 9}}


def test_a_loaded_processor_lends_its_tokenizer(llava_folder: Path) -> None:
    context = context_of(llava_folder)
    assert context.tokenizer is context.hf_processor.tokenizer


def test_workers_side_by_side(llava_folder: Path) -> None:
    context = context_of(llava_folder)
    image = Image.new("RGB", (50, 40), (9, 8, 7))
    workers = [MULTIMODAL_REGISTRY.create_processor(Llava, context.clone()) for _ in range(4)]

    def work(worker: Any) -> list[list[int]]:
        prompts = [f"{'word ' * number}<image>" for number in range(30)]
        return [worker.apply(prompt, images(image)).token_ids for prompt in prompts]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, workers))
    assert all(result == results[0] for result in results)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    from aioengine.processors.info import load_context

    with pytest.raises(ModelLoadError) as caught:
        load_context(tmp_path, hf_config=None)
    assert caught.value.__cause__ is not None


def test_registration(llava_folder: Path) -> None:
    class Derived(Llava):
        pass

    class Text:
        pass

    context = context_of(llava_folder)
    derived = MULTIMODAL_REGISTRY.create_processor(Derived, context)
    assert isinstance(derived, LlavaMultiModalProcessor)
    assert MULTIMODAL_REGISTRY.is_multimodal(Derived)
    text = MULTIMODAL_REGISTRY.create_processor(Text, context)
    assert isinstance(text, TextOnlyProcessor)
    assert not MULTIMODAL_REGISTRY.is_multimodal(Text)
    assert not MultiModalRegistry().is_multimodal(Llava)


def test_text_only(llava_folder: Path) -> None:
    context = context_of(llava_folder)
    processor = MULTIMODAL_REGISTRY.create_processor(object, context)
    result = processor.apply("a cat", MultiModalDataItems())
    assert result.token_ids == context.tokenizer("a cat")["input_ids"]
    assert result.placeholders == {} and result.items == {}
    with pytest.raises(UnsupportedModalityError, match="text only"):
        processor.layout("a cat", images(ImageHeader(ImageSize(3, 3), "RGB")), {})


def test_options_are_merged_scope_by_scope(llava_folder: Path) -> None:
    engine = {"a": 1, "images_kwargs": {"b": 2, "c": 3}}
    context = context_of(llava_folder, mm_processor_kwargs=engine)
    processor = MULTIMODAL_REGISTRY.create_processor(Llava, context)
    merged = processor.merged_kwargs({"a": 4, "images_kwargs": {"c": 5}, "d": 6})
    assert merged == {"a": 4, "images_kwargs": {"b": 2, "c": 5}, "d": 6}
    assert processor.merged_kwargs(merged) == merged
    assert engine == {"a": 1, "images_kwargs": {"b": 2, "c": 3}}


def test_every_exported_name_exists() -> None:
    for name in processors.__all__:
        assert getattr(processors, name) is not None
    assert set(processors.__all__) <= set(dir(processors))
    with pytest.raises(AttributeError):
        _ = processors.NoSuchName  # type: ignore[attr-defined]


def test_importing_is_light() -> None:
    code = (
        "import sys, aioengine.processors; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
