"""Registry of the class that runs each architecture.

A checkpoint's `architectures` are looked up by name; the first that is known wins. Families that
ship with the engine are written down here and imported when one is asked for; an application adds
its own with `register_model`, which also overrides a shipped one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from aioengine.errors import ModelLoadError

if TYPE_CHECKING:
    from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["known_architectures", "register_model", "resolve"]

Model = TypeVar("Model", bound="type[TransformersModel]")

_FAMILIES = {
    "audio.Qwen2Audio": "Qwen2AudioForConditionalGeneration",
    "bidirectional.Gemma3": "Gemma3ForConditionalGeneration",
    "bidirectional.PaliGemma": "PaliGemmaForConditionalGeneration",
    "blip2.Blip2": "Blip2ForConditionalGeneration",
    "chameleon.Chameleon": "ChameleonForConditionalGeneration",
    "deepseek_vl2.modeling.DeepseekVL2": "DeepseekVLV2ForCausalLM",
    "encdec.bart.Bart": (
        "BartForConditionalGeneration BartModel MBartForConditionalGeneration MBartModel"
    ),
    "encdec.florence2.Florence2": "Florence2ForConditionalGeneration",
    "encdec.t5.T5": "T5ForConditionalGeneration T5Model",
    "encdec.whisper.Moonshine": "MoonshineForConditionalGeneration",
    "encdec.whisper.Whisper": "WhisperForConditionalGeneration",
    "fuyu.Fuyu": "FuyuForCausalLM",
    "generic.GenericModel": (
        "AriaForConditionalGeneration DeepseekVLForConditionalGeneration "
        "Idefics3ForConditionalGeneration InternVLForConditionalGeneration "
        "LlavaNextForConditionalGeneration LlavaOnevisionForConditionalGeneration "
        "Mistral3ForConditionalGeneration"
    ),
    "internvl_chat.InternVLChat": "InternVLChatModel",
    "llava.Llava": "LlavaForConditionalGeneration",
    "molmo.molmo.Molmo": "MolmoForCausalLM",
    "molmo.molmo2.Molmo2": "Molmo2ForConditionalGeneration",
    "mrope.DeepStackModel": "Qwen3VLForConditionalGeneration",
    "mrope.MRopeModel": (
        "Glm4vForConditionalGeneration Qwen2VLForConditionalGeneration "
        "Qwen2_5_VLForConditionalGeneration"
    ),
    "omni.OmniThinker": (
        "Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel "
        "Qwen2_5OmniThinkerForConditionalGeneration"
    ),
    "per_layer.Gemma3n": "Gemma3nForConditionalGeneration",
    "per_layer.Gemma4": "Gemma4ForConditionalGeneration",
    "per_layer.PerLayerText": "Gemma3nForCausalLM Gemma4ForCausalLM",
    "qwen_vl.modeling.QwenVL": "QWenLMHeadModel",
    "smolvlm.SmolVLM": "SmolVLMForConditionalGeneration",
    "text.GptOss": "GptOssForCausalLM",
    "text.TextModel": (
        "GPT2LMHeadModel Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM LlamaForCausalLM "
        "MistralForCausalLM OPTForCausalLM Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM "
        "Qwen3ForCausalLM"
    ),
    "voxtral.Voxtral": "VoxtralForConditionalGeneration",
}
"""Class of a family, by its path in `aioengine.models` -> the architectures that it runs."""
_SHIPPED = {name: place for place, names in _FAMILIES.items() for name in names.split()}

_CLASSES: dict[str, type[TransformersModel]] = {}


def register_model(*architectures: str) -> Callable[[Model], Model]:
    """Class decorator: this class runs checkpoints of these `architectures`.

    Raises TypeError for a class that the engine could not run.
    """
    assert architectures, "name at least one architecture"

    def register(model_class: Model) -> Model:
        _check(model_class, architectures)
        for name in architectures:
            _CLASSES[name] = model_class
        return model_class

    return register


def _check(model_class: Any, architectures: Sequence[str]) -> None:
    # Not at the top: whoever only asks which architectures there are needs no torch.
    from aioengine.models.runtime.transformers_model import TransformersModel

    if isinstance(model_class, type) and issubclass(model_class, TransformersModel):
        return
    name = getattr(model_class, "__qualname__", type(model_class).__name__)
    bases = ", ".join(each.__name__ for each in getattr(model_class, "__bases__", ())) or "nothing"
    raise TypeError(
        f"{name}, which is to run {', '.join(architectures)}, inherits {bases}, and the engine "
        "cannot run it: let it inherit aioengine.models.TransformersModel, where transformers has "
        "the module, or aioengine.models.DefinedModel, with your nn.Module as its `definition`"
    )


def known_architectures() -> tuple[str, ...]:
    """Every name that `resolve` knows, sorted."""
    return tuple(sorted({*_SHIPPED, *_CLASSES}))


def resolve(architectures: Sequence[str] | None) -> type[TransformersModel]:
    """The class for a config's `architectures`: the first known entry's.

    Raises ModelLoadError where none is known.
    """
    for name in architectures or ():
        if name in _CLASSES:
            return _CLASSES[name]
        if name in _SHIPPED:
            module, _, kind = f"aioengine.models.{_SHIPPED[name]}".rpartition(".")
            found: type[TransformersModel] = getattr(import_module(module), kind)
            return found
    given = ", ".join(architectures or ()) or "none"
    raise ModelLoadError(
        f"no model class for architectures: {given}. Known: {', '.join(known_architectures())}. "
        "Others can be added with aioengine.models.register_model."
    )
