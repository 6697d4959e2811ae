"""Registry of the class that runs each architecture, and choice of one for those that have none.

A checkpoint's `architectures` are looked up by name; the first that is known wins. Families that
ship with the engine are written down here and imported when one is asked for; an application adds
its own with `register_model`, which also overrides a shipped one.

Any other architecture that transformers has runs by transformers' own module, if that generates
text: what it takes beside text decides the class around it. Whether this computes what the module
does is not known from a config; the trial at load finds it out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from aioengine.errors import ModelLoadError

if TYPE_CHECKING:
    from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["Choice", "choose", "find_class", "known_architectures", "register_model", "resolve"]

Model = TypeVar("Model", bound="type[TransformersModel]")

_FAMILIES = {
    "audio.Qwen2Audio": "Qwen2AudioForConditionalGeneration",
    "bidirectional.Gemma3": "Gemma3ForConditionalGeneration",
    "bidirectional.PaliGemma": "PaliGemmaForConditionalGeneration",
    "blip2.Blip2": "Blip2ForConditionalGeneration",
    "chameleon.Chameleon": "ChameleonForConditionalGeneration",
    "deepseek_vl2.modeling.DeepseekVL2": "DeepseekVLV2ForCausalLM",
    "encdec.florence2.Florence2": "Florence2ForConditionalGeneration",
    "encdec.text.TextToText": (
        "BartForConditionalGeneration BartModel MBartForConditionalGeneration MBartModel "
        "T5ForConditionalGeneration T5Model"
    ),
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
    "omni.Qwen3OmniThinker": (
        "Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration"
    ),
    "per_layer.Gemma3n": "Gemma3nForConditionalGeneration",
    "per_layer.Gemma4": "Gemma4ForConditionalGeneration",
    "per_layer.Gemma4Unified": "Gemma4UnifiedForConditionalGeneration",
    "per_layer.PerLayerText": "Gemma3nForCausalLM Gemma4ForCausalLM",
    "qwen_vl.modeling.QwenVL": "QWenLMHeadModel",
    "smolvlm.SmolVLM": "SmolVLMForConditionalGeneration",
    "text.GptOss": "GptOssForCausalLM",
    "text.TextModel": (
        "GPT2LMHeadModel Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM LlamaForCausalLM "
        "MistralForCausalLM OPTForCausalLM Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM "
        "Qwen3ForCausalLM"
    ),
    "voxtral.realtime.VoxtralRealtime": "VoxtralRealtimeForConditionalGeneration",
    "voxtral.voxtral.Voxtral": "VoxtralForConditionalGeneration",
}
"""Class of a family, by its path in `aioengine.models` -> the architectures that it runs."""
_IMAGE_INPUTS = ("pixel_values", "flattened_patches")
"""What classes call an image, where it is all that an encoder reads."""
_MEDIA_CONFIGS = ("vision_config", "audio_config", "codec_config")
_AUDIO_INPUTS = ("input_features", "input_values", "inputs")
_MEDIA_READERS = {
    "cross_attention_mask": "TiledMemoryModel",
    "image_attention_mask": "LastImageModel",
}
"""What classes call the mask of gated cross-attention to images -> the class of such models."""
_YOURS = "One of yours can be added with aioengine.models.register_model"
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
            return _imported(_SHIPPED[name])
    given = ", ".join(architectures or ()) or "none"
    raise ModelLoadError(
        f"no model class for architectures: {given}. Known: {', '.join(known_architectures())}. "
        + _YOURS
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """`model_class`, and whether an architecture's own class was chosen ("native") or one for all
    of its kind ("transformers")."""

    model_class: type[TransformersModel]
    model_impl: str


def choose(hf_config: Any, model_impl: str = "auto") -> Choice:
    """Choose the class for a config. Reads no weights.

    `model_impl`: "auto" takes the architecture's own class, if there is one; "native" nothing else;
    "transformers" never. Raises ModelLoadError, which says why nothing runs it.
    """
    names = hf_config.architectures or ()
    is_known = not set(names).isdisjoint(known_architectures())
    if model_impl == "native" or (is_known and model_impl == "auto"):
        return Choice(resolve(names).chosen_for(hf_config), "native")
    return Choice(_class_of_kind(hf_config), "transformers")


def find_class(hf_config: Any) -> Any:
    """transformers' own class for the config's first architecture that it has."""
    import transformers

    names = getattr(hf_config, "architectures", None) or ()
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    raise ModelLoadError(
        f"no model class for architectures: {', '.join(names) or 'none'}, and transformers "
        f"{transformers.__version__} has none either. {_YOURS}"
    )


def _class_of_kind(hf_config: Any) -> type[TransformersModel]:
    """The class for all whose config and transformers' class are like this one's."""
    hf_class = find_class(hf_config)
    siblings = vars(sys.modules[hf_class.__module__]).values()
    parts = [each for each in siblings if isinstance(each, type)]
    # Some classes leave encoding to the inner model, which has the same config.
    same = [each for each in parts if _config_class(each) is _config_class(hf_class)]
    encoders: dict[str, Any] = {}
    for name, each in product(("image", "video", "audio"), (hf_class, *same)):
        method = getattr(each, f"get_{name}_features", None)
        if method is not None:
            encoders.setdefault(name, method)
    # Phi-4's mask of one of these names is of an image's patches, which it calls otherwise.
    sees = getattr(hf_config, "vision_config", None) and _takes(hf_class.forward, "pixel_values")
    if sees and not encoders:
        for mask, reader in _MEDIA_READERS.items():
            if _takes(hf_class.forward, mask):
                return _imported(f"encdec.gated_cross.{reader}")
    obstacle = _find_obstacle(hf_config, hf_class, encoders)
    if obstacle is not None:
        raise _refused(hf_class, obstacle)
    if getattr(hf_config, "is_encoder_decoder", False):
        if _reads_an_image(hf_class):
            return _imported("encdec.image_to_text.ImageToText")
        hears = _reads_audio(hf_class)
        return _imported("encdec.speech.SpeechToText" if hears else "encdec.text.TextToText")
    if not encoders:
        has_media = any(getattr(hf_config, name, None) for name in _MEDIA_CONFIGS)
        if _is_encoder(hf_config) and _is_embedder(hf_config, hf_class):
            return _imported("text.encoders.EncoderModel")
        return _imported("generic.ForwardRowsModel" if has_media else "text.TextModel")
    if [*encoders] == ["image"] and _takes(encoders["image"], "qformer_input_ids"):
        return _imported("blip2.InstructBlip").chosen_for(hf_config)
    vision = getattr(hf_config, "vision_config", None)
    width = getattr(hf_config.get_text_config(decoder=True), "hidden_size", None)
    if getattr(vision, "vision_output_dim", width) != width:
        # What `get_image_features` gives is to be projected yet.
        return _imported("generic.ForwardRowsModel")
    if getattr(vision, "deepstack_visual_indexes", None):
        return _imported("mrope.DeepStackModel")
    if "moe_mm_token_type_ids" in signature(hf_class.forward).parameters:
        return _imported("mrope.ModalExpertsModel")
    if getattr(hf_config, "deepstack_layer_map", None):
        return _imported("generic.LayerRowsModel")
    if getattr(hf_config, "visual_indicator_token_ids", None):
        return _imported("generic.MarkedModel")
    if any(hasattr(each, "get_rope_index") for each in parts):
        return _imported("mrope.MRopeModel")
    return _imported("generic.GenericModel")


def _find_obstacle(hf_config: Any, hf_class: Any, encoders: Mapping[str, Any]) -> str | None:
    """Describe why no class for a kind runs this one, in words; None if nothing is known.

    `encoders`: transformers' method that encodes a modality, by its name.
    """
    from transformers import GenerationMixin

    generates = isinstance(hf_class, type) and issubclass(hf_class, GenerationMixin)
    if not generates and not _is_embedder(hf_config, hf_class):
        return "it neither generates text nor embeds it"
    modalities = getattr(hf_class, "output_modalities", None)
    if modalities and "text" not in modalities:
        return f"what it generates is {' and '.join(modalities)} and no text"
    if getattr(hf_config, "is_encoder_decoder", False):
        obstacle = _find_obstacle_between(hf_config, hf_class, encoders)
        if obstacle is not None or _reads_an_image(hf_class):
            return obstacle
    media = [name for name in _MEDIA_CONFIGS if getattr(hf_config, name, None)]
    if media and not encoders and not all(_names_a_place(hf_config, name) for name in media):
        return f"it has {' and '.join(media)}, but no get_image_features or the like"
    if getattr(hf_config, "has_lora_adapter", False):
        return "it has weights that are added where there is media, and only there (LoRA)"
    for name, method in encoders.items():
        taken = signature(method).parameters
        if "input_ids" in taken and taken["input_ids"].default is Parameter.empty:
            return f"what it makes of {name} depends on the prompt (get_{name}_features)"
    taken = signature(hf_class.forward).parameters
    if encoders and getattr(taken.get("sample"), "default", None):
        return "it adds noise to what it makes of media (sample=True)"
    if "num_delay_tokens" in taken:
        return "it hears while it writes: each token that it writes has a row of audio added to it"
    return None


def _is_embedder(hf_config: Any, hf_class: Any) -> bool:
    """Return whether a class gives hidden states of text, with the head of a classifier or none.

    Of those that read media it is the backbone of one that generates text.
    """
    import transformers as hf

    kinds = hf.MODEL_MAPPING, hf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if hf_class not in [kind.get(type(hf_config), None) for kind in kinds]:
        return False
    if getattr(hf_config, "is_encoder_decoder", False) or not _takes(hf_class.forward, "input_ids"):
        return False
    has_media = any(getattr(hf_config, name, None) for name in _MEDIA_CONFIGS)
    return not has_media or type(hf_config) in hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _is_encoder(hf_config: Any) -> bool:
    """Return whether tokens of text see those behind them."""
    import transformers as hf

    if getattr(hf_config, "is_decoder", False):
        return False
    is_masked = type(hf_config) in hf.MODEL_FOR_MASKED_LM_MAPPING
    return is_masked or bool(getattr(hf_config, "use_bidirectional_attention", False))


def _names_a_place(hf_config: Any, part: str) -> bool:
    """Return whether a config says which token encoder rows stand for."""
    kind = "image" if part == "vision_config" else "audio"
    names = f"{kind}_token_id", f"{kind}_token_index"
    owners = hf_config, getattr(hf_config, part)
    return any(getattr(each, name, None) is not None for each in owners for name in names)


def _find_obstacle_between(
    hf_config: Any, hf_class: Any, encoders: Mapping[str, Any]
) -> str | None:
    """Describe why no class for encoder-decoders runs this one; see `_find_obstacle`."""
    import transformers as hf

    if encoders:
        return f"its encoder reads {' and '.join(encoders)} beside text"
    if getattr(hf_config, "expert_capacity", None):
        return (
            "an expert drops tokens beyond its expert_capacity, so that an answer would depend on "
            "what else is in the batch"
        )
    if _reads_an_image(hf_class):
        return None
    if hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(hf_config), None) is hf_class:
        return None
    of_speech = hf.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.get(type(hf_config), None)
    if not _reads_audio(hf_class) or of_speech is not hf_class:
        return (
            "transformers does not have it among the encoder-decoders from text or audio to text "
            "(AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq), and one that reads or gives "
            "anything else needs a class of its own"
        )
    return None


def _reads_audio(hf_class: Any) -> bool:
    return getattr(hf_class, "main_input_name", "") in _AUDIO_INPUTS


def _reads_an_image(hf_class: Any) -> bool:
    return getattr(hf_class, "main_input_name", "") in _IMAGE_INPUTS


def _takes(method: Any, name: str) -> bool:
    return name in signature(method).parameters


def _config_class(part: type[Any]) -> Any:
    return getattr(part, "config_class", None)


def _imported(place: str) -> type[TransformersModel]:
    module, _, kind = f"aioengine.models.{place}".rpartition(".")
    found: type[TransformersModel] = getattr(import_module(module), kind)
    return found


def _refused(hf_class: Any, reason: str) -> ModelLoadError:
    name = getattr(hf_class, "__name__", hf_class)
    return ModelLoadError(
        f"no model class is registered for {name}, and transformers' own cannot be run as it is: "
        f"{reason}. {_YOURS}"
    )
