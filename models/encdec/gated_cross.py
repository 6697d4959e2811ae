"""Decoders with gated layers of cross-attention to images: how their modules are given these.

Alayrac et al., "Flamingo: a Visual Language Model for Few-Shot Learning" (2022); Laurencon et al.,
"OBELICS" (Idefics, 2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024), section 7.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from aioengine.errors import InvalidRequestError
from aioengine.models.encdec.media_memory import MediaMemoryModel, SetAside, no_embeddings
from aioengine.models.runtime.image_tokens import ImageTokenDummyInputsBuilder, ImageTokenProcessor
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, PromptMedia
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.hf.substitutes import merge_image_options
from aioengine.processors.info import ImageInfo
from aioengine.processors.inputs import MultiModalFieldConfig
from aioengine.processors.items import MultiModalDataItems
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["LastImageModel", "TiledMemoryModel"]

_IMAGE, _AROUND, _END_OF_TEXT = "<image>", "<fake_token_around_image>", "end_of_text"
_TOWERS = ("vision_model", "perceiver_resampler")


class TiledMemoryModel(MediaMemoryModel):
    """Images in tiles, of which as many are padding as an image lacks to the most there are.

    Tokens see the tiles of the images that stand together before them, and no padding. Those before
    the first image attend to all tiles, padding too, as transformers' mask of them is added to
    nothing; but their feed-forward layers beside cross-attention are left out.
    """

    feature_names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    blind_see_all = True

    @property
    def piece_rows(self) -> int:
        rows: int = self.model.model.vision_model.num_patches
        return rows

    @property
    def pieces_per_item(self) -> int:
        return int(self.hf_config.vision_config.max_num_tiles)

    def media_mask(self, token_ids: Sequence[int], items: Sequence[PromptMedia]) -> Tensor:
        from transformers.models.mllama import processing_mllama as hf

        # Another number would be looked up beyond the ends of the encoder's tables.
        for item in items:
            count = item.features["aspect_ratio_mask"].numel()
            if count != self.pieces_per_item:
                raise InvalidRequestError(
                    f"an image was cut into {count} tiles, padding included, and the model takes "
                    f"{self.pieces_per_item}: leave max_image_tiles as its image processor has it",
                    parameter="mm_processor_kwargs",
                    value=count,
                )
        places = {item.span.offset for item in items}
        spans = hf.get_cross_attention_token_mask(
            [int(index in places) for index in range(len(token_ids))], 1
        )
        num_tiles = [int(item.features["aspect_ratio_mask"].sum()) for item in items]
        mask = hf.convert_sparse_cross_attention_mask_to_dense(
            [spans], [num_tiles], self.pieces_per_item, len(token_ids)
        )
        return torch.from_numpy(mask[0]).flatten(1) != 0

    def encode_media(self, **features: Tensor) -> Tensor:
        seen = self.model.model.vision_model(**features)
        rows: Tensor = self.model.model.multi_modal_projector(seen.last_hidden_state)
        return rows

    def memory_arguments(self, memory: Tensor, sighted: Tensor) -> dict[str, Any]:
        step = self._holder.current
        meta = None if step is None else step.metadata[-1]
        if meta is not None and not (meta.query_lens or meta.slot_blocks.shape[0]):
            return {}  # nobody sees anything, and these layers are passed by
        mask = sighted.to(memory.dtype)[None, None, :, None]
        return {"cross_attention_states": memory[None], "full_text_row_masked_out_mask": mask}

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        extra = {}
        if prompt.items:
            mask = self.media_mask(prompt.token_ids, prompt.items).to(torch.int64)
            extra["cross_attention_mask"] = mask.view(1, len(mask), len(prompt.items), -1)
        return run_whole(self.model, prompt, rows, **extra)


class LastImageInfo(SetAside, ImageInfo):
    """One token for each image."""

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        return 1


class LastImageDummyInputs(ImageTokenDummyInputsBuilder):
    """White images."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return _IMAGE * mm_counts.get("image", 0)


class LastImageProcessor(ImageTokenProcessor):
    """`<image>` in a text is a place for an image, around which the markers are written.

    The HF processor is given texts and images in turns, and so has no placeholder. It is not given
    a user's text here, as it fetches what looks like an address. A text that has markers already is
    left as it is.
    """

    layout_needs_hf_outputs = True
    adds_special_tokens = False

    @property
    def image_token_id(self) -> int:
        return int(self.info.get_tokenizer().convert_tokens_to_ids(_IMAGE))

    def write(self, text: str) -> str:
        """The text as the HF processor writes it, of the same texts and images in turns."""
        written: str = self.info.get_tokenizer().bos_token
        if _AROUND in text:
            return written + text.strip(" ")
        is_behind_image = False
        for index, part in enumerate(text.split(_IMAGE)):
            if index:
                written += "" if is_behind_image else _AROUND
                written += _IMAGE + _AROUND
                is_behind_image = True
            if part:
                written += part.strip(" ")
                is_behind_image = False
        return written

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        processor = self.info.get_hf_processor()
        options = merge_image_options(processor, mm_kwargs) if mm_kwargs else {}
        pixels = processor.image_processor(mm_data["images"], **{**options, "return_tensors": "pt"})
        end = torch.full((len(pixels),), self.info.get_tokenizer().eos_token_id)
        return {"pixel_values": pixels, _END_OF_TEXT: end}

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            name: MultiModalFieldConfig.batched("image", keep_on_cpu=name == _END_OF_TEXT)
            for name in hf_inputs
        }

    def repeat_image_token(
        self, mm_items: MultiModalDataItems, **options: Any
    ) -> Callable[[int], list[int]]:
        if isinstance(mm_items.get("image"), EmbeddingItems):
            raise no_embeddings("image")
        return super().repeat_image_token(mm_items, **options)


@MULTIMODAL_REGISTRY.register_processor(
    LastImageProcessor, info=LastImageInfo, dummy_inputs=LastImageDummyInputs
)
class LastImageModel(MediaMemoryModel):
    """Each token sees the last image before it, and none behind a text's end.

    The decoder is one module with the towers, which it is run without.
    """

    feature_names = ("pixel_values",)

    @property
    def piece_rows(self) -> int:
        config = self.hf_config
        if config.use_resampler:
            return int(config.perceiver_config.resampler_n_latents)
        return int(self.model.model.vision_model.embeddings.num_positions)

    @property
    def pieces_per_item(self) -> int:
        return 1

    @property
    def row_size(self) -> int:
        return int(self.hf_config.vision_config.embed_dim)

    @property
    def vocab_size(self) -> int:
        return super().vocab_size + int(self.hf_config.additional_vocab_size)

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """Do as the module, of whose two tables the second has added tokens, but ask no device."""
        table = self.model.get_input_embeddings()
        if not table.num_additional_embeddings:
            return super().embed(input_ids, rows, is_multimodal)
        count = table.num_embeddings
        usual = embedding(input_ids.clamp(max=count - 1), table.weight)
        added = table.additional_embedding((input_ids - count).clamp(min=0))
        return torch.where((input_ids < count)[:, None], usual, added)

    def decoder(self) -> nn.Module:
        return self._without_towers

    @cached_property
    def _without_towers(self) -> nn.Module:
        decoder: nn.Module = copy.copy(self.model.model)
        parts = decoder._modules.items()
        decoder._modules = {name: part for name, part in parts if name not in _TOWERS}
        return decoder

    def media_mask(self, token_ids: Sequence[int], items: Sequence[PromptMedia]) -> Tensor:
        from transformers.models.idefics import processing_idefics as hf

        # No id but an image's own place is an image here, whatever it looks like.
        end, image = 1, 2
        ids = (torch.tensor(token_ids) == int(items[0].features[_END_OF_TEXT])) * end
        ids[[item.span.offset for item in items]] = image
        special = SimpleNamespace(convert_tokens_to_ids=lambda _: image, eos_token_id=end)
        last, _ = hf.image_attention_mask_for_packed_input_ids_pt(ids[None], special)
        mask = hf.incremental_to_binary_attention_mask(last, "pt", num_classes=len(items))
        shown: Tensor = mask[0] != 0
        return shown

    def encode_media(self, **features: Tensor) -> Tensor:
        inner = self.model.model
        seen: Tensor = inner.vision_model(features["pixel_values"][None]).last_hidden_state
        if not self.hf_config.use_resampler:
            return seen
        rows: Tensor = inner.perceiver_resampler(seen)
        return rows

    def memory_arguments(self, memory: Tensor, sighted: Tensor) -> dict[str, Any]:
        is_resampled = self.hf_config.use_resampler
        name = "perceiver_embeddings" if is_resampled else "image_encoder_embeddings"
        return {name: memory[None, None], "image_attention_mask": sighted[None, :, None]}

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        if prompt.items:
            mask = self.media_mask(prompt.token_ids, prompt.items)
            pixels = torch.stack([item.features["pixel_values"] for item in prompt.items])
        else:
            mask = torch.zeros(len(prompt.token_ids), 1, dtype=torch.bool)
            vision = self.hf_config.vision_config
            pixels = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)
        extra = {"image_attention_mask": mask[None], "pixel_values": pixels[None]}
        return run_whole(self.model, WholePrompt(token_ids=prompt.token_ids), rows, **extra)
