"""Bugs in a family from outside: who is told what, and what no log and no message may hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from aioengine.errors import EngineError, MediaError, ModelLoadError, trace_of, typed
from aioengine.execution.memory_profiler import apply_dummy, largest_items
from aioengine.processors import (
    BaseMultiModalProcessor,
    ImageProcessorItems,
    MultiModalDataItems,
    MultiModalFieldConfig,
    ProcessorInputs,
)
from aioengine.processors.processor import logger
from tests.processors.conftest import context_of
from tests.processors.test_guide import GuideDummyInputs, GuideInfo, GuideProcessor

SECRET = "what is in the picture"


class FailingCall(GuideProcessor):
    """As HF's own processors do, it puts what it was given into the text."""

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        raise AttributeError(f"no pixel_values in {SECRET}: {mm_data}")


class WrongFields(GuideProcessor):
    """Cuts one image's pixels into two."""

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"pixel_values": MultiModalFieldConfig.flat_from_sizes("image", [1, 1])}


class FailingDummies(GuideDummyInputs):
    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        return self.no_such_method()  # type: ignore[attr-defined,no-any-return]


def make(
    folder: Path,
    processor: type[BaseMultiModalProcessor],
    dummies: type[GuideDummyInputs] = GuideDummyInputs,
) -> BaseMultiModalProcessor:
    info = GuideInfo(context_of(folder))
    return processor(info, dummies(info))


def images(count: int = 1) -> MultiModalDataItems:
    return MultiModalDataItems({"image": ImageProcessorItems([Image.new("RGB", (40, 30))] * count)})


def lines_of(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.getMessage() for record in caplog.records if record.name == logger.name]


@pytest.mark.parametrize(
    ("processor", "kind", "place"),
    [
        (FailingCall, AttributeError, "_call_hf_processor"),
        (WrongFields, ValueError, "in split"),
    ],
)
def test_a_bug_is_logged_by_its_place(
    llava_folder: Path,
    caplog: pytest.LogCaptureFixture,
    processor: type[BaseMultiModalProcessor],
    kind: type[Exception],
    place: str,
) -> None:
    made = make(llava_folder, processor)
    for _ in range(2):
        with pytest.raises(MediaError, match=kind.__name__) as caught:
            made.process(images(), {})
        assert caught.value.__cause__ is None and SECRET not in str(caught.value)
    whole, again = lines_of(caplog)
    assert processor.__name__ in whole and whole.endswith(kind.__name__) and place in whole
    assert "again" in again and len(again.splitlines()) == 1
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert "PIL" not in caplog.text and SECRET not in caplog.text


@pytest.mark.parametrize(
    ("processor", "kind"), [(FailingCall, AttributeError), (WrongFields, ValueError)]
)
def test_a_bug_shows_itself_on_the_engines_own_dummy(
    llava_folder: Path, processor: type[BaseMultiModalProcessor], kind: type[Exception]
) -> None:
    made = make(llava_folder, processor)
    for find in (lambda: apply_dummy(made, "image", 0), lambda: largest_items(made, 0)):
        with pytest.raises(ModelLoadError, match=processor.__name__) as caught:
            find()
        assert type(caught.value.__cause__) is kind
        assert caught.value.__cause__.__traceback__ is not None
        assert str(caught.value.__cause__)[:40] in str(caught.value)
    with pytest.raises(MediaError) as refused:  # of a request's images nothing is told again
        made.process(images(), {})
    assert refused.value.__cause__ is None


def test_dummies_that_cannot_be_made_are_no_fault_of_the_media(llava_folder: Path) -> None:
    made = make(llava_folder, GuideProcessor, FailingDummies)
    with pytest.raises(EngineError, match=r"FailingDummies .*AttributeError") as caught:
        made.process(images(), {})
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(ModelLoadError, match="no_such_method") as refused:
        apply_dummy(made, "image", 0)
    assert isinstance(refused.value.__cause__, AttributeError)


def test_what_a_request_meets_elsewhere_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        assert isinstance(typed(error), EngineError)
        assert trace_of(error).endswith("KeyError")
    (line,) = caplog.messages
    assert "test_what_a_request_meets_elsewhere" in line and SECRET not in line
