"""Architectures to classes, and the package's lazy names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import LlavaConfig, PreTrainedConfig

import aioengine.models
from aioengine.errors import ModelLoadError
from aioengine.models import SupportsEncoderDecoder, SupportsMultiModal
from aioengine.models.encdec.base import EncoderDecoderModel
from aioengine.models.runtime import registry
from aioengine.models.runtime.registry import choose, known_architectures, register_model, resolve
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.text import TextModel


@pytest.fixture(autouse=True)
def own_classes() -> Iterator[None]:
    """What a test registers goes with it."""
    before = dict(registry._CLASSES)
    yield
    registry._CLASSES.clear()
    registry._CLASSES.update(before)


class Mine(TransformersModel):
    pass


def test_a_shipped_family_is_imported_on_demand() -> None:
    assert resolve(["LlamaForCausalLM"]) is TextModel
    assert resolve(["LlavaForConditionalGeneration"]).__name__ == "Llava"


@pytest.mark.parametrize("place", registry._FAMILIES)
def test_every_shipped_family_is_where_the_table_says(place: str) -> None:
    for name in registry._FAMILIES[place].split():
        found = resolve([name])
        assert issubclass(found, TransformersModel)
        assert f"{found.__module__}.{found.__qualname__}" == f"aioengine.models.{place}"


def test_the_first_known_architecture_wins() -> None:
    register_model("Mine", "MineToo")(Mine)
    assert resolve(["Unheard", "MineToo", "LlamaForCausalLM"]) is Mine
    assert {"Mine", "MineToo", "LlamaForCausalLM"} <= set(known_architectures())


def test_an_application_overrides_a_shipped_family() -> None:
    register_model("LlamaForCausalLM")(Mine)
    assert resolve(["LlamaForCausalLM"]) is Mine


class AsTheGuideWritesIt(nn.Module, SupportsMultiModal):
    pass


@pytest.mark.parametrize(
    ("model", "bases"),
    [
        (AsTheGuideWritesIt, "Module, SupportsMultiModal"),
        (nn.Linear, "Module"),
        (object, "nothing"),
        (nn.Identity(), "nothing"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_at_once(model: Any, bases: str) -> None:
    with pytest.raises(TypeError, match=f"inherits {bases}, and") as caught:
        register_model("Unheard", "UnheardToo")(model)
    text = str(caught.value)
    assert "Unheard, UnheardToo" in text
    for name in ("aioengine.models.TransformersModel", "aioengine.models.DefinedModel"):
        assert name in text
    assert not {"Unheard", "UnheardToo"} & set(known_architectures())


def test_a_model_may_say_what_it_promises() -> None:
    """Behind the class that keeps the promise; before it, nothing would."""

    @register_model("Unheard")
    class Seeing(TransformersModel, SupportsMultiModal):
        pass

    class Blind(SupportsMultiModal, TransformersModel):
        pass

    assert resolve(["Unheard"]) is Seeing
    assert isinstance(Seeing.__new__(Seeing), SupportsMultiModal)
    with pytest.raises(TypeError, match="abstract"):
        Blind.__new__(Blind)


def test_who_has_cross_attention() -> None:
    model: Any = EncoderDecoderModel.__new__(EncoderDecoderModel)
    model.hf_config = PreTrainedConfig(max_position_embeddings=7)
    assert isinstance(model, SupportsEncoderDecoder)
    assert not isinstance(Mine.__new__(Mine), SupportsEncoderDecoder)


@pytest.mark.parametrize("architectures", [["Unheard"], [], None])
def test_unknown_architectures_list_the_known(architectures: list[str] | None) -> None:
    with pytest.raises(ModelLoadError, match="LlavaForConditionalGeneration"):
        resolve(architectures)


def config_of(name: str, **settings: Any) -> Any:
    return PreTrainedConfig(architectures=[name], **settings)


def test_an_architecture_that_nobody_named_is_chosen_by_its_kind() -> None:
    for name, found in [
        ("SmolLM3ForCausalLM", "TextModel"),
        ("AyaVisionForConditionalGeneration", "GenericModel"),
        ("Glm46VForConditionalGeneration", "MRopeModel"),
        # Its inner model encodes, and has the same config.
        ("DeepseekVLHybridForConditionalGeneration", "GenericModel"),
    ]:
        choice = choose(config_of(name))
        assert (choice.model_class.__name__, choice.model_impl) == (found, "transformers")
    vision = SimpleNamespace(deepstack_visual_indexes=[1])
    choice = choose(config_of("Qwen3VLMoeForConditionalGeneration", vision_config=vision))
    assert choice.model_class.__name__ == "DeepStackModel"


def test_what_may_be_chosen_is_the_hosts_to_say() -> None:
    llava = LlavaConfig(architectures=["LlavaForConditionalGeneration"])
    names = {impl: choose(llava, impl).model_class.__name__ for impl in ("auto", "native")}
    assert names == {"auto": "Llava", "native": "Llava"}
    assert choose(llava, "transformers").model_class.__name__ == "GenericModel"
    assert choose(llava, "native").model_impl == "native"
    with pytest.raises(ModelLoadError, match=r"SmolLM3ForCausalLM\. Known: "):
        choose(config_of("SmolLM3ForCausalLM"), "native")


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Unheard", {}, "for architectures: Unheard, and transformers .* has none either"),
        ("BertModel", {}, "it neither generates text nor embeds it"),
        (
            "Speech2TextForConditionalGeneration",
            {"is_encoder_decoder": True},
            "AutoModelForSeq2Seq",
        ),
        ("T5Gemma2ForConditionalGeneration", {"is_encoder_decoder": True}, "reads image beside"),
        ("KyutaiSpeechToTextForConditionalGeneration", {"codec_config": {"a": 1}}, "codec_config"),
        ("GraniteSpeechForConditionalGeneration", {"has_lora_adapter": True}, "LoRA"),
        ("MusicFlamingoForConditionalGeneration", {}, "audio depends on the prompt"),
        ("VibeVoiceAsrForConditionalGeneration", {}, "it adds noise"),
        ("VoxtralRealtimeForConditionalGeneration", {}, "it hears while it writes"),
        ("GitForCausalLM", {"vision_config": {"depth": 1}}, "it has vision_config, but no"),
        ("MolmoForCausalLM", {}, "and transformers .* has none either"),
    ],
)
def test_what_nothing_runs_is_refused_with_a_reason(
    name: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason) as caught:
        choose(config_of(name, **settings), "transformers")
    assert "register_model" in str(caught.value)


def test_every_exported_name_exists() -> None:
    for name in aioengine.models.__all__:
        assert getattr(aioengine.models, name) is not None
    assert set(aioengine.models.__all__) <= set(dir(aioengine.models))
    with pytest.raises(AttributeError):
        aioengine.models.NoSuchName  # noqa: B018


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, aioengine.models, aioengine.models.runtime.registry, aioengine.kernels\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
