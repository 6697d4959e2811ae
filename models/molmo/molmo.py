"""Molmo: a decoder of OLMo's or Qwen2's kind that looks at a small view of an image and its crops.

Deitke et al., "Molmo and PixMo: Open Weights and Open Data for State-of-the-Art Vision-Language
Models" (2024). transformers has no class for it; modules are in modeling.py, the processor is in
processors/hf/molmo.py. Images stand before the text, whatever it says, and rows are added to the
embeddings of their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from aioengine.errors import ModelLoadError, UnsupportedModalityError
from aioengine.models.molmo.modeling import MolmoForCausalLM
from aioengine.models.runtime import encoding
from aioengine.models.runtime.defined_model import DefinedModel
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, merge_multimodal_embeddings
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.hf.molmo import MolmoImageProcessor, MolmoProcessor
from aioengine.processors.info import ImageDummyInputsBuilder, ImageInfo
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import ImageProcessorItems, ImageSize, MultiModalDataItems
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.prompt.updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptUpdate,
    PromptUpdateDetails,
)
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["AddedRows", "Molmo", "MolmoConfig", "MolmoMultiModalProcessor", "MolmoProcessingInfo"]


class MolmoConfig(PreTrainedConfig):  # type: ignore[misc]
    """The published config.json, and what the published code has as constants.

    Those of the tower begin with `image_`; they are settings here so that it can be smaller.
    """

    model_type = "molmo"

    vocab_size: int = 50304
    embedding_size: int | None = 50304
    additional_vocab_size: int = 128
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    layer_norm_type: str = "rms"
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    clip_qkv: float | None = None
    qkv_bias: bool = False
    attention_layer_norm: bool = False
    norm_after: bool = False
    weight_tying: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    vit_layers: tuple[int, ...] | list[int] = (-2, -9)
    image_input_size: tuple[int, int] | list[int] = (336, 336)
    image_patch_size: int = 14
    image_num_pos: int = 577
    image_num_layers: int = 23
    image_emb_dim: int = 1024
    image_num_heads: int = 16
    image_num_key_value_heads: int = 16
    image_head_dim: int = 64
    image_mlp_dim: int = 4096
    image_norm_eps: float = 1e-5


class MolmoProcessingInfo(ImageInfo):
    """Images in any number. Raises ModelLoadError for a processor that does not fit the model."""

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> MolmoProcessor:
        """The published one is code of the checkpoint's; this is ours with its settings."""
        from transformers.image_processing_base import ImageProcessingMixin

        settings, _ = ImageProcessingMixin.get_image_processor_dict(
            source, revision=options.get("revision")
        )
        tokenizer = cls.load_tokenizer(source, hf_config, options)
        if hf_config.eos_token_id is None:
            # No published file says where to stop: the caller of the published code does.
            hf_config.eos_token_id = tokenizer.eos_token_id
        images = MolmoImageProcessor(**{**settings, **kwargs})
        sides = [images.geometry.crop_size] * 2
        patch = images.geometry.patch_size
        if sides != list(hf_config.image_input_size) or patch != hf_config.image_patch_size:
            raise ModelLoadError(
                f"the processor's crops of {sides[0]} pixels in patches of {patch} are not the "
                f"tower's: {list(hf_config.image_input_size)} in {hf_config.image_patch_size}"
            )
        return MolmoProcessor(images, tokenizer)

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Encoder rows of one image, with the engine's own options."""
        images = self.get_image_processor()
        rows, columns = images.grid(image_height, image_width, self.ctx.mm_processor_kwargs)
        return int(rows * columns + images.side**2)

    def get_image_size_with_most_features(self) -> ImageSize:
        """Choose of the sizes that fill their crops one with the most rows."""
        images = self.get_image_processor()
        geometry = images.with_options(self.ctx.mm_processor_kwargs)
        rows, columns = max(geometry.canvases(), key=lambda size: size[0] * size[1])
        return ImageSize(columns * geometry.patch_size, rows * geometry.patch_size)


class MolmoMultiModalProcessor(BaseMultiModalProcessor):
    """First token, images, text. A text begins with a space, which is put there if it does not.

    Texts are taken as they are: "User: ... Assistant:" is the chat template's, which chat messages
    go through.
    """

    info: MolmoProcessingInfo

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if add_special_tokens and not text.startswith(" "):
            text = f" {text}"
        return super().tokenize(text, add_special_tokens=add_special_tokens)

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        first = self.info.get_hf_processor().bos_id
        return prompt_tokens if prompt_tokens[:1] == [first] else [first, *prompt_tokens]

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        outputs: Mapping[str, Any] = self.info.get_hf_processor()(**mm_data, **mm_kwargs)
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        sizes = hf_inputs["num_crops"]
        flat = MultiModalFieldConfig.flat_from_sizes
        return {
            "pixel_values": flat("image", sizes),
            "image_masks": flat("image", sizes),
            "image_input_idx": flat("image", sizes, keep_on_cpu=True),
            "num_crops": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        processor = self.info.get_hf_processor()
        if isinstance(mm_items.get("image"), EmbeddingItems):
            raise UnsupportedModalityError(
                "the model takes no image embeddings: how rows and other tokens alternate depends "
                "on the image",
                parameter="images",
            )

        def get_insertion(item_idx: int) -> PromptUpdateDetails:
            images = mm_items.get_items("image", ImageProcessorItems)
            width, height = images.get_image_size(item_idx)
            tokens = processor.layout_tokens(height, width, hf_processor_mm_kwargs)
            return PromptUpdateDetails.select_token_id(tokens, processor.patch_id)

        first = PromptIndexTargets.prefix([processor.bos_id])
        return [PromptInsertion(modality="image", target=first, insertion=get_insertion)]


class AddedRows(TransformersModel):
    """Encoder rows are added to the embeddings of their tokens, which they do not replace."""

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        if rows is None or is_multimodal is None:
            return embeds
        added = torch.zeros_like(embeds)
        return embeds + merge_multimodal_embeddings(
            input_ids, added, rows, is_multimodal=is_multimodal
        )


@MULTIMODAL_REGISTRY.register_processor(
    MolmoMultiModalProcessor, info=MolmoProcessingInfo, dummy_inputs=ImageDummyInputsBuilder
)
class Molmo(AddedRows, DefinedModel):
    """Molmo-7B-D, 7B-O and 72B of September 2024; not MolmoE, which has experts."""

    definition: ClassVar[type[nn.Module]] = MolmoForCausalLM
    config_class = MolmoConfig

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """Rows [rows, hidden] of each image, in the order of its tokens.

        Takes what the processor makes: see `MolmoProcessor`.
        """
        places, counts = kwargs.pop("image_input_idx"), kwargs.pop("num_crops").tolist()
        crops = torch.stack(encoding.encode_batch(self.model, kwargs, self.dtype, self.device))
        found = []
        start = 0
        for count in counts:
            # On the CPU, where the places are.
            place = places[start : start + count].flatten()
            order = place.argsort()[int((place < 0).sum()) :].to(crops.device)
            found.append(crops[start : start + count].flatten(0, 1)[order])
            start += count
        return found
