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

# Architecture -> the module whose import registers it.
_SHIPPED = {
    "AriaForConditionalGeneration": "aioengine.models.generic",
    "BartForConditionalGeneration": "aioengine.models.encdec.bart",
    "BartModel": "aioengine.models.encdec.bart",
    "Blip2ForConditionalGeneration": "aioengine.models.blip2",
    "ChameleonForConditionalGeneration": "aioengine.models.chameleon",
    "DeepseekVLForConditionalGeneration": "aioengine.models.generic",
    "DeepseekVLV2ForCausalLM": "aioengine.models.deepseek_vl2.modeling",
    "Florence2ForConditionalGeneration": "aioengine.models.encdec.florence2",
    "FuyuForCausalLM": "aioengine.models.fuyu",
    "GPT2LMHeadModel": "aioengine.models.text",
    "Gemma2ForCausalLM": "aioengine.models.text",
    "Gemma3ForCausalLM": "aioengine.models.text",
    "Gemma3ForConditionalGeneration": "aioengine.models.bidirectional",
    "Gemma3nForCausalLM": "aioengine.models.per_layer",
    "Gemma3nForConditionalGeneration": "aioengine.models.per_layer",
    "Gemma4ForCausalLM": "aioengine.models.per_layer",
    "Gemma4ForConditionalGeneration": "aioengine.models.per_layer",
    "GemmaForCausalLM": "aioengine.models.text",
    "Glm4vForConditionalGeneration": "aioengine.models.mrope",
    "GptOssForCausalLM": "aioengine.models.text",
    "Idefics3ForConditionalGeneration": "aioengine.models.generic",
    "InternVLChatModel": "aioengine.models.internvl_chat",
    "InternVLForConditionalGeneration": "aioengine.models.generic",
    "LlamaForCausalLM": "aioengine.models.text",
    "LlavaForConditionalGeneration": "aioengine.models.llava",
    "LlavaNextForConditionalGeneration": "aioengine.models.generic",
    "LlavaOnevisionForConditionalGeneration": "aioengine.models.generic",
    "MBartForConditionalGeneration": "aioengine.models.encdec.bart",
    "MBartModel": "aioengine.models.encdec.bart",
    "Mistral3ForConditionalGeneration": "aioengine.models.generic",
    "MistralForCausalLM": "aioengine.models.text",
    "Molmo2ForConditionalGeneration": "aioengine.models.molmo.molmo2",
    "MolmoForCausalLM": "aioengine.models.molmo.molmo",
    "MoonshineForConditionalGeneration": "aioengine.models.encdec.whisper",
    "OPTForCausalLM": "aioengine.models.text",
    "PaliGemmaForConditionalGeneration": "aioengine.models.bidirectional",
    "Phi3ForCausalLM": "aioengine.models.text",
    "PhiForCausalLM": "aioengine.models.text",
    "QWenLMHeadModel": "aioengine.models.qwen_vl.modeling",
    "Qwen2AudioForConditionalGeneration": "aioengine.models.audio",
    "Qwen2ForCausalLM": "aioengine.models.text",
    "Qwen2VLForConditionalGeneration": "aioengine.models.mrope",
    "Qwen2_5OmniForConditionalGeneration": "aioengine.models.omni",
    "Qwen2_5OmniModel": "aioengine.models.omni",
    "Qwen2_5OmniThinkerForConditionalGeneration": "aioengine.models.omni",
    "Qwen2_5_VLForConditionalGeneration": "aioengine.models.mrope",
    "Qwen3ForCausalLM": "aioengine.models.text",
    "Qwen3VLForConditionalGeneration": "aioengine.models.mrope",
    "SmolVLMForConditionalGeneration": "aioengine.models.smolvlm",
    "T5ForConditionalGeneration": "aioengine.models.encdec.t5",
    "T5Model": "aioengine.models.encdec.t5",
    "VoxtralForConditionalGeneration": "aioengine.models.voxtral",
    "WhisperForConditionalGeneration": "aioengine.models.encdec.whisper",
}

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
        if name not in _CLASSES and name in _SHIPPED:
            import_module(_SHIPPED[name])
        if name in _CLASSES:
            return _CLASSES[name]
    given = ", ".join(architectures or ()) or "none"
    raise ModelLoadError(
        f"no model class for architectures: {given}. Known: {', '.join(known_architectures())}. "
        "Others can be added with aioengine.models.register_model."
    )
