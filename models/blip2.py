"""BLIP-2: a frozen tower, a Q-Former that asks it a few questions, and OPT for a decoder.

Li et al., "BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image Encoders and Large
Language Models" (2023). The answers stand before the prompt's first token, and nothing in the text
stands for an image. Over T5 they stand before what its encoder reads. Dai et al., "InstructBLIP:
Towards General-purpose Vision-Language Models with Instruction Tuning" (2023): the Q-Former reads
the prompt too, so that an image becomes other rows beside each text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aioengine.errors import InvalidRequestError, ModelLoadError, PlaceholderMismatchError
from aioengine.models.encdec.media import ImageReader
from aioengine.models.encdec.text import TextToText
from aioengine.models.runtime.image_tokens import ImageTokenProcessor
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.encdec import EncoderPromptProcessor
from aioengine.processors.info import ImageDummyInputsBuilder, OneImageInfo
from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargs,
    MultiModalKwargsItem,
)
from aioengine.processors.items import MultiModalDataItems
from aioengine.processors.processor import Layout, TextOrTokens
from aioengine.processors.prompt.updates import PromptIndexTargets, PromptInsertion, PromptUpdate
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "Blip2",
    "Blip2MultiModalProcessor",
    "Blip2ProcessingInfo",
    "Blip2T5",
    "Blip2T5MultiModalProcessor",
    "InstructBlip",
    "InstructBlipMultiModalProcessor",
    "InstructBlipT5",
    "InstructBlipT5MultiModalProcessor",
]

_QUERY = "query_text"
"""Option of an item that says what the Q-Former reads beside it."""
_QFORMER = ("qformer_input_ids", "qformer_attention_mask")


class Blip2ProcessingInfo(OneImageInfo):
    """One image in a prompt."""

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Encoder rows of any image: one for each query."""
        return int(self.get_hf_config().num_query_tokens)


class Blip2MultiModalProcessor(ImageTokenProcessor):
    """An image's rows go before everything."""

    info: Blip2ProcessingInfo

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        # The text has no part in it, and HF's processor would tokenise it twice.
        outputs: Mapping[str, Any] = self.info.get_hf_processor()(
            **mm_data, **mm_kwargs, return_tensors="pt"
        )
        return outputs

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        if not mm_items.get_count("image"):
            return []
        tokens, start = self.repeat_image_token(mm_items), PromptIndexTargets.start()
        return [PromptInsertion(modality="image", target=start, insertion=tokens)]


@MULTIMODAL_REGISTRY.register_processor(
    Blip2MultiModalProcessor, info=Blip2ProcessingInfo, dummy_inputs=ImageDummyInputsBuilder
)
class Blip2(TransformersModel):
    """Over OPT; or over T5, then as an encoder-decoder model. The image comes before the text.

    A whole language model inside, whose decoder is one level further down.
    """

    @classmethod
    def chosen_for(cls, hf_config: Any) -> type[TransformersModel]:
        """The class for T5 where that is the language model; other encoders are not built."""
        kind = hf_config.text_config.model_type
        if not hf_config.text_config.is_encoder_decoder:
            return cls
        if kind != "t5":
            raise ModelLoadError(
                f"{hf_config.model_type} over {kind!r} is not supported; take a checkpoint with a "
                "decoder or T5"
            )
        return Blip2T5 if cls is Blip2 else InstructBlipT5

    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.language_model.get_decoder()
        return decoder


class Blip2T5MultiModalProcessor(Blip2MultiModalProcessor, EncoderPromptProcessor):
    """The prompt is the encoder's; an image's tokens come before everything."""

    def layout(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]] | None = None,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """Do as the base class; an image's token may stand in the prompt for nothing else."""
        found = super().layout(prompt, items, mm_kwargs, outputs, literals)
        places = found.placeholders.get("image", ())
        # A text needs no such token, and checkpoints are about that name none.
        num_tokens = found.token_ids.count(self.info.get_hf_config().image_token_id)
        spare = num_tokens - sum(place.length for place in places)
        if spare:
            raise PlaceholderMismatchError(
                f"the prompt has {spare} placeholder(s) for images; leave them out, as an image "
                "comes before the text by itself",
                parameter="prompt",
                value=spare,
            )
        return found


@MULTIMODAL_REGISTRY.register_processor(
    Blip2T5MultiModalProcessor, info=Blip2ProcessingInfo, dummy_inputs=ImageDummyInputsBuilder
)
class Blip2T5(ImageReader, TextToText):
    """A whole T5 inside; `Blip2.chosen_for` hands it the configs that say so."""

    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.language_model.get_decoder()
        return decoder


class InstructBlipMultiModalProcessor(Blip2MultiModalProcessor):
    """The prompt goes to the Q-Former as well, as text, and is a part of an image's identity."""

    def options_for(
        self,
        mm_kwargs: Mapping[str, Any],
        mm_counts: Mapping[str, int],
        prompt: TextOrTokens = "",
    ) -> Mapping[str, Any]:
        """Do as the base class, with the prompt's text. Raises InvalidRequestError for ids."""
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                "the model's Q-Former reads the prompt's text with a tokenizer of its own; give "
                "text instead of token ids",
                parameter="prompt",
            )
        return {**mm_kwargs, _QUERY: prompt}

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        options = {name: value for name, value in mm_kwargs.items() if name != _QUERY}
        outputs: Mapping[str, Any] = self.info.get_hf_processor()(
            text=str(mm_kwargs.get(_QUERY, "")), **mm_data, **options, return_tensors="pt"
        )
        found = {name: torch.as_tensor(outputs[name]) for name in ("pixel_values", *_QFORMER)}
        limits = self.info.get_hf_config().qformer_config
        token_ids = found[_QFORMER[0]]
        if token_ids.shape[1] > limits.max_position_embeddings:
            raise InvalidRequestError(
                f"the prompt has {token_ids.shape[1]} tokens for the Q-Former, which reads "
                f"{limits.max_position_embeddings} at most; shorten it",
                parameter="prompt",
                value=token_ids.shape[1],
            )
        if token_ids.numel() and int(token_ids.max()) >= limits.vocab_size:
            raise ValueError("the Q-Former's tokenizer has more tokens than it embeds")
        return found

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {name: MultiModalFieldConfig.batched("image") for name in hf_inputs}


class InstructBlipT5MultiModalProcessor(
    InstructBlipMultiModalProcessor, Blip2T5MultiModalProcessor
):
    """Both at once: the prompt is the encoder's and the Q-Former's."""


@MULTIMODAL_REGISTRY.register_processor(
    InstructBlipMultiModalProcessor, info=Blip2ProcessingInfo, dummy_inputs=ImageDummyInputsBuilder
)
class InstructBlip(Blip2):
    """BLIP-2 whose Q-Former reads the prompt too."""


@MULTIMODAL_REGISTRY.register_processor(
    InstructBlipT5MultiModalProcessor,
    info=Blip2ProcessingInfo,
    dummy_inputs=ImageDummyInputsBuilder,
)
class InstructBlipT5(Blip2T5):
    """BLIP-2 over T5 whose Q-Former reads the prompt too."""
