"""HF processors where torchvision is missing: videos of the families that can do without it.

transformers' video processors need torchvision, and an HF processor that has one is not made
without it. Here such a processor is made with one of video_processors.py, where that gives the same
tensors, and else with None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioengine.errors import InvalidRequestError
from aioengine.processors.mm_kwargs import merge_for_hf

__all__ = ["lacks_video", "lenient", "load_processor", "merge_image_options"]

_COMPARED = ((5, 19), (5, 24))
"""The first and last minor version of transformers that video_processors.py was compared with;
others may have other defaults."""


def load_processor(source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any) -> Any:
    """The HF processor of a folder or hub id; what it lacks for videos without torchvision is None.

    `options`: revision and the like; `kwargs` override its saved settings. Raises what transformers
    raises.
    """
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    try:
        return AutoProcessor.from_pretrained(source, **options, **kwargs)
    # Where settings name no class, it is a ValueError, or transformers asks itself without end.
    except (ImportError, ValueError, RecursionError):
        if is_torchvision_available():
            raise
        found = _class_without_torchvision(source, hf_config, options)
        if found is None:
            raise
        return _load_without_torchvision(found, source, hf_config, options, kwargs)


def lacks_video(hf_processor: Any) -> bool:
    """Return whether the processor is for videos too, but has no video part here."""
    parts = _video_parts(type(hf_processor))
    return any(getattr(hf_processor, part, None) is None for part in parts)


def merge_image_options(hf_processor: Any, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options for an HF processor's image processor, from wherever a caller has put them.

    Without the image processor's own settings. Raises InvalidRequestError for what transformers
    does not take.
    """
    # transformers raises anything for options of other types than it declares.
    try:
        options: dict[str, Any] = merge_for_hf(hf_processor, mm_kwargs)["images_kwargs"]
    except Exception as error:
        raise InvalidRequestError(
            f"the HF processor does not take these mm_processor_kwargs: {type(error).__name__}",
            parameter="mm_processor_kwargs",
        ) from None
    return options


def _class_without_torchvision(source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
    """The HF processor's class, as it is saved or by the model type, if it can do without.

    That is one with a part for videos, which may be missing, or Pixtral's, which is ours.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    settings, _ = transformers.ProcessorMixin.get_processor_dict(source, **options)
    known = PROCESSOR_MAPPING_NAMES.get(getattr(hf_config, "model_type", None))
    name = str(settings.get("processor_class") or known)
    if name == "PixtralProcessor":
        from aioengine.processors.hf.pixtral import PixtralProcessor

        return PixtralProcessor
    found = getattr(transformers, name, None)
    return found if found is not None and _video_parts(found) else None


def _video_parts(processor_class: Any) -> list[str]:
    parts: list[str] = getattr(processor_class, "get_attributes", list)()
    return [part for part in parts if part.startswith("video_processor")]


def _load_without_torchvision(
    processor_class: Any,
    source: str,
    hf_config: Any,
    options: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> Any:
    from transformers import AutoFeatureExtractor, AutoTokenizer

    # By its full path: without torchvision, transformers 5.17 exports another that only raises.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    loaders = {
        "image_processor": AutoImageProcessor,
        "feature_extractor": AutoFeatureExtractor,
        "tokenizer": AutoTokenizer,
    }
    parts = [
        _load_video_part(source, hf_config, options)
        if part.startswith("video_processor")
        else loaders[part].from_pretrained(source, **options)
        for part in processor_class.get_attributes()
    ]
    settings, rest = processor_class.get_processor_dict(source, **options)
    return lenient(processor_class).from_args_and_dict(parts, {**settings, **kwargs}, **rest)


def _load_video_part(source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
    """A video processor with the settings that HF's own would have; None where there is no equal.

    Which class that is, transformers finds in three places, and so it is done here.
    """
    import transformers

    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    if not _COMPARED[0] <= release <= _COMPARED[1]:
        return None
    from aioengine.processors.hf import video_processors

    try:
        settings, _ = video_processors.FrameProcessor.get_video_processor_dict(source, **options)
    except OSError:  # there are none, not even of an image processor
        return None
    name = settings.get("video_processor_type")
    if name is None:
        images = settings.pop("image_processor_type", None) or ""
        name = images.replace("ImageProcessor", "VideoProcessor")
    if not hasattr(transformers, name):
        name = video_processors.MODEL_TYPES.get(hf_config.model_type)
    has_own_code = "AutoVideoProcessor" in settings.get("auto_map", ())
    found = None if has_own_code else video_processors.VIDEO_PROCESSORS.get(name)
    return None if found is None else found.from_dict(settings)


def lenient(processor_class: Any) -> Any:
    """The same class, by name too, but content with whatever video part it is given.

    transformers' own check asks for classes that are not there without torchvision.
    """

    def check(self: Any, argument_name: str, argument: Any) -> Any:
        if argument_name.startswith("video_processor"):
            return None
        return processor_class.check_argument_for_proper_class(self, argument_name, argument)

    return type(
        processor_class.__name__,
        (processor_class,),
        {"check_argument_for_proper_class": check, "__module__": processor_class.__module__},
    )
