"""HF processors where torchvision is missing: everything but videos.

transformers' video processors need torchvision, and an HF processor that has one is not made
without it. Here such a processor is made with None in the place of its video processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["lacks_video", "load_processor"]


def load_processor(source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any) -> Any:
    """The HF processor of a folder or hub id, without its video part if that cannot be made.

    `options`: revision and the like; `kwargs` override its saved settings. Raises what transformers
    raises.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(source, **options, **kwargs)
    except ImportError as error:
        found = _class_of(hf_config) if "torchvision" in str(error).lower() else None
        if found is None or not _video_parts(found):
            raise
        return _load_without_video(found, source, options, kwargs)


def lacks_video(hf_processor: Any) -> bool:
    """Whether the processor is for videos too, but has no video part here."""
    parts = _video_parts(type(hf_processor))
    return any(getattr(hf_processor, part, None) is None for part in parts)


def _class_of(hf_config: Any) -> Any:
    """The HF processor class of a model type; None where transformers knows none."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(getattr(hf_config, "model_type", None))
    return None if name is None else getattr(transformers, str(name), None)


def _video_parts(processor_class: Any) -> list[str]:
    parts: list[str] = getattr(processor_class, "get_attributes", list)()
    return [part for part in parts if part.startswith("video_processor")]


def _load_without_video(
    processor_class: Any, source: str, options: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> Any:
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    loaders = {
        "image_processor": AutoImageProcessor,
        "feature_extractor": AutoFeatureExtractor,
        "tokenizer": AutoTokenizer,
    }
    parts = [
        None
        if part.startswith("video_processor")
        else loaders[part].from_pretrained(source, **options)
        for part in processor_class.get_attributes()
    ]
    settings, rest = processor_class.get_processor_dict(source, **options)
    lenient = _lenient(processor_class)
    return lenient.from_args_and_dict(parts, {**settings, **kwargs}, **rest)


def _lenient(processor_class: Any) -> Any:
    """The same class, by name too, but content with None for a part."""

    def check(self: Any, argument_name: str, argument: Any) -> Any:
        if argument is None:
            return None
        return processor_class.check_argument_for_proper_class(self, argument_name, argument)

    return type(
        processor_class.__name__,
        (processor_class,),
        {"check_argument_for_proper_class": check, "__module__": processor_class.__module__},
    )
