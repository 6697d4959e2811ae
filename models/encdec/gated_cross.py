"""Decoders with gated layers of cross-attention to images: how their modules are given these.

Alayrac et al., "Flamingo: a Visual Language Model for Few-Shot Learning" (2022); Laurencon et al.,
"OBELICS" (Idefics, 2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024), section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aioengine.models.encdec.media_memory import MediaMemoryModel
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole

__all__ = ["TiledMemoryModel"]


class TiledMemoryModel(MediaMemoryModel):
    """Images in tiles, of which as many are padding as an image lacks to the most there are.

    Tokens see the tiles of the images that stand together before them, and no padding. Those before
    the first image attend to all tiles, padding too, as transformers' mask of them is added to
    nothing; but their feed-forward layers beside cross-attention are left out.
    """

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
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        seen = self.model.model.vision_model(**{name: features[name] for name in names})
        rows: Tensor = self.model.model.multi_modal_projector(seen.last_hidden_state)
        return rows.flatten(1, -2)

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
