"""DeepSeek-VL2's config, and how its prompts are processed.

Wu et al., "DeepSeek-VL2: Mixture-of-Experts Vision-Language Models for Advanced Multimodal
Understanding" (2024). Tokenizer and images: processors/hf/deepseek_vl2.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.runtime.image_tokens import ImageTokenProcessor
from aioengine.processors.hf.deepseek_vl2 import (
    DeepseekVL2Processor,
    load_deepseek_settings,
    load_deepseek_tokenizer,
)
from aioengine.processors.info import ImageInfo, ProcessingContext
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import ImageSize, MultiModalDataItems
from aioengine.processors.processor import TextOrTokens
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdate

__all__ = [
    "DeepseekLanguageConfig",
    "DeepseekVL2Config",
    "DeepseekVL2MultiModalProcessor",
    "DeepseekVL2ProcessingInfo",
]

_MOST_CROPPED = 2
"""Images of a prompt that are still seen in many tiles each."""


class DeepseekLanguageConfig(PreTrainedConfig):  # type: ignore[misc]
    """The decoder's settings: `use_mla` False in the smallest model, True in the others."""

    model_type = "deepseek_v2"

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 30
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    routed_scaling_factor: float | int = 1.0
    kv_lora_rank: int | None = 512
    q_lora_rank: int | None = 1536
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float | int = 1e-6
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    tie_word_embeddings: bool = False
    rope_theta: float | int = 10000.0
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    use_mla: bool = True


class DeepseekVL2Config(PreTrainedConfig):  # type: ignore[misc]
    """The published settings under their names."""

    model_type = "deepseek_vl_v2"

    vision_config: dict[str, Any] | None = None
    projector_config: dict[str, Any] | None = None
    language_config: dict[str, Any] | PreTrainedConfig | None = None
    tile_tag: str = "2D"
    global_view_pos: str = "head"
    candidate_resolutions: list[list[int]] | tuple[Any, ...] = ((384, 384),)

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.language_config, DeepseekLanguageConfig):
            self.language_config = DeepseekLanguageConfig.from_dict(self.language_config or {})
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        """The decoder's."""
        return self.language_config


class DeepseekVL2ProcessingInfo(ImageInfo):
    """Rows of an image by its size. Raises ModelLoadError for options it has not."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        unknown = sorted(ctx.mm_processor_kwargs.keys() - {"cropping"})
        if unknown:
            raise ModelLoadError(f"mm_processor_kwargs has more than cropping: {unknown}")
        processor = self.get_hf_processor()
        side, config = processor.image_size, self.get_hf_config()
        if side != (config.vision_config or {}).get("image_size", 384) or any(
            edge % side for pair in processor.candidate_resolutions for edge in pair
        ):
            raise ModelLoadError(
                f"the processor's tiles of {side} pixels do not fit its candidate_resolutions, or "
                "are not what the tower takes"
            )

    @classmethod
    def load_tokenizer(cls, source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
        revision = options["revision"]
        image_token = load_deepseek_settings(source, revision).get("image_token", "<image>")
        return load_deepseek_tokenizer(source, revision, image_token)

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        settings = {
            "candidate_resolutions": hf_config.candidate_resolutions,
            "patch_size": (hf_config.vision_config or {}).get("patch_size", 16),
            "downsample_ratio": (hf_config.projector_config or {}).get("downsample_ratio", 2),
            **load_deepseek_settings(source, options["revision"]),
            **kwargs,
        }
        return DeepseekVL2Processor(cls.load_tokenizer(source, hf_config, options), **settings)

    def get_num_image_tokens(
        self, *, image_width: int, image_height: int, cropping: bool = True
    ) -> int:
        """Rows of an image: of its two views, of each one's line ends, and of what parts them."""
        processor = self.get_hf_processor()
        side: int = processor.tile_side
        num_columns, num_rows = processor.count_tiles(
            (image_width, image_height), cropping=cropping
        )
        num_close: int = num_rows * side * (num_columns * side + 1)
        return side * (side + 1) + 1 + num_close

    def get_image_size_with_most_features(self) -> ImageSize:
        """An image of the candidate resolution that becomes most rows."""
        candidates = self.get_hf_processor().candidate_resolutions
        width, height = max(
            candidates,
            key=lambda size: self.get_num_image_tokens(image_width=size[0], image_height=size[1]),
        )
        return ImageSize(width, height)


class DeepseekVL2MultiModalProcessor(ImageTokenProcessor):
    """A placeholder becomes as many of itself as the image has rows."""

    info: DeepseekVL2ProcessingInfo

    @property
    def image_token_id(self) -> int:
        return int(self.info.get_hf_processor().image_token_id)

    def options_for(
        self,
        mm_kwargs: Mapping[str, Any],
        mm_counts: Mapping[str, int],
        prompt: TextOrTokens = "",
    ) -> Mapping[str, Any]:
        """Beside more than two images, none is cropped, unless the options say otherwise."""
        if "cropping" in self.merged_kwargs(mm_kwargs):
            return mm_kwargs
        crops = mm_counts.get("image", 0) <= _MOST_CROPPED
        return mm_kwargs if crops else {**mm_kwargs, "cropping": False}

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        # The text has no part in it.
        cropping = self._cropping(mm_kwargs)
        outputs: Mapping[str, Any] = self.info.get_hf_processor()(**mm_data, cropping=cropping)
        return outputs

    def _cropping(self, mm_kwargs: Mapping[str, object]) -> bool:
        """Raises InvalidRequestError for other options, and other values."""
        cropping = mm_kwargs.get("cropping", True)
        if not isinstance(cropping, bool) or mm_kwargs.keys() - {"cropping"}:
            raise InvalidRequestError(
                "the model's processor takes no mm_processor_kwargs but cropping, which is True or "
                "False",
                parameter="mm_processor_kwargs",
            )
        return cropping

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        sizes = 1 + hf_inputs["images_spatial_crop"].prod(-1)
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
            "images_spatial_crop": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        cropping = self._cropping(hf_processor_mm_kwargs)
        tokens = self.repeat_image_token(mm_items, cropping=cropping)
        target = [self.image_token_id]
        return [PromptReplacement(modality="image", target=target, replacement=tokens)]
