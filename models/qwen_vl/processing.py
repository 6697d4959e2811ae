"""Qwen-VL's config, and how its prompts are processed.

Bai et al., "Qwen-VL: A Versatile Vision-Language Model for Understanding, Localization, Text
Reading, and Beyond" (2023). Tokenizer and images: processors/hf/qwen_vl.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.runtime.image_tokens import ImageTokenProcessor
from aioengine.processors.hf.qwen_vl import IMAGE_TOKENS, QwenVLProcessor, load_qwen_tokenizer
from aioengine.processors.info import ImageDummyInputsBuilder, ImageInfo, ProcessingContext
from aioengine.processors.inputs import MultiModalKwargs
from aioengine.processors.items import ImageSize, MultiModalDataItems
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdate, PromptUpdateDetails
from aioengine.processors.text_only import TextOnlyInfo

__all__ = [
    "QwenConfig",
    "QwenProcessingInfo",
    "QwenVLDummyInputsBuilder",
    "QwenVLMultiModalProcessor",
    "QwenVLProcessingInfo",
]

_PLACEHOLDER = "<img></img>"


class QwenConfig(PreTrainedConfig):  # type: ignore[misc]
    """The published settings under their names; `visual` is missing in text models."""

    model_type = "qwen"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    kv_channels: int = 128
    layer_norm_epsilon: float = 1e-6
    max_position_embeddings: int = 8192
    seq_length: int = 2048
    rotary_pct: float = 1.0
    rotary_emb_base: int | float = 10000
    use_dynamic_ntk: bool = True
    use_logn_attn: bool = True
    no_bias: bool = True
    tie_word_embeddings: bool = False
    visual: dict[str, Any] | None = None


class QwenProcessingInfo(TextOnlyInfo):
    """The text model: a tokenizer and nothing else."""

    @classmethod
    def load_tokenizer(cls, source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
        return load_qwen_tokenizer(source, options["revision"], with_images=False)

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        return load_qwen_tokenizer(source, options["revision"], with_images=False)


class QwenVLProcessingInfo(ImageInfo):
    """Rows of an image, as many for each. Raises ModelLoadError for another model's tokenizer."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        start = self.get_hf_config().visual.get("image_start_id", -1)
        ids = self.get_tokenizer().convert_tokens_to_ids(list(IMAGE_TOKENS[-3:]))
        if ids != [start, start + 1, start + 2]:
            raise ModelLoadError(
                f"the tokenizer's ids of {', '.join(IMAGE_TOKENS[-3:])} are {ids}, but the "
                f"config's image_start_id is {start}"
            )

    @classmethod
    def load_tokenizer(cls, source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
        return load_qwen_tokenizer(source, options["revision"], with_images=True)

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        tokenizer = load_qwen_tokenizer(source, options["revision"], with_images=True)
        return QwenVLProcessor(tokenizer, int(hf_config.visual["image_size"]))

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Encoder rows of any image: one for each of the resampler's queries."""
        return int(self.get_hf_config().visual.get("n_queries", 256))

    def get_image_size_with_most_features(self) -> ImageSize:
        """The size that the HF processor makes of all."""
        side = int(self.get_hf_processor().image_size)
        return ImageSize(width=side, height=side)


class QwenVLDummyInputsBuilder(ImageDummyInputsBuilder):
    """White images between their tags."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return _PLACEHOLDER * mm_counts.get("image", 0)


class QwenVLMultiModalProcessor(ImageTokenProcessor):
    """`<img></img>` is filled with the image's rows."""

    info: QwenVLProcessingInfo

    @property
    def image_token_id(self) -> int:
        return int(self.info.get_hf_config().visual["image_start_id"]) + 2

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        # The text has no part in it.
        outputs: Mapping[str, Any] = self.info.get_hf_processor()(**mm_data)
        return outputs

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        if hf_processor_mm_kwargs:
            raise InvalidRequestError(
                "the model's processor takes no mm_processor_kwargs",
                parameter="mm_processor_kwargs",
            )
        start, end = self.image_token_id - 2, self.image_token_id - 1
        tokens = self.repeat_image_token(mm_items)

        def get_replacement(item_idx: int) -> PromptUpdateDetails:
            rows = tokens(item_idx)
            return PromptUpdateDetails(full=[start, *rows, end], features=rows)

        return [
            PromptReplacement(modality="image", target=[start, end], replacement=get_replacement)
        ]
