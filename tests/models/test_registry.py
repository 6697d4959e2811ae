"""Architectures to classes, and the package's lazy names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import aioengine.models
from aioengine.errors import ModelLoadError
from aioengine.models import registry
from aioengine.models.adapter import TransformersModel
from aioengine.models.registry import known_architectures, register_model, resolve
from aioengine.models.text import TextModel


@pytest.fixture(autouse=True)
def own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))


class Mine(TransformersModel):
    pass


def test_a_shipped_family_is_imported_on_demand() -> None:
    assert resolve(["LlamaForCausalLM"]) is TextModel
    assert resolve(["LlavaForConditionalGeneration"]).__name__ == "Llava"


def test_the_first_known_architecture_wins() -> None:
    register_model("Mine", "MineToo")(Mine)
    assert resolve(["Unheard", "MineToo", "LlamaForCausalLM"]) is Mine
    assert {"Mine", "MineToo", "LlamaForCausalLM"} <= set(known_architectures())


def test_an_application_overrides_a_shipped_family() -> None:
    register_model("LlamaForCausalLM")(Mine)
    assert resolve(["LlamaForCausalLM"]) is Mine


@pytest.mark.parametrize("architectures", [["Unheard"], [], None])
def test_unknown_architectures_list_the_known(architectures: list[str] | None) -> None:
    with pytest.raises(ModelLoadError, match="LlavaForConditionalGeneration"):
        resolve(architectures)


def test_every_exported_name_exists() -> None:
    for name in aioengine.models.__all__:
        assert getattr(aioengine.models, name) is not None
    assert set(aioengine.models.__all__) <= set(dir(aioengine.models))
    with pytest.raises(AttributeError):
        aioengine.models.NoSuchName  # noqa: B018


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, aioengine.models, aioengine.models.registry, aioengine.kernels\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
