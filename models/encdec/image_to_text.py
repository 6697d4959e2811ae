"""Image to text: an encoder that reads one image and nothing else, and a decoder that writes.

Li et al., "TrOCR: Transformer-based Optical Character Recognition with Pre-trained Models" (2021);
Kim et al., "OCR-free Document Understanding Transformer" (Donut, 2022); Lee et al., "Pix2Struct:
Screenshot Parsing as Pretraining for Visual Language Understanding" (2023). What the decoder
attends to is what transformers' own forward of the whole model gives it, whatever lies between the
encoder and the decoder; and so is the number of its rows, on the meta device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from aioengine.errors import EngineError, InvalidRequestError, ModelLoadError
from aioengine.models.encdec.decoder_memory import memory_of, shapes_and_masks
from aioengine.models.encdec.text import TextToText
from aioengine.models.runtime.hf_loading import build_on_meta
from aioengine.models.runtime.registry import find_class
from aioengine.models.runtime.whole_pass import run_head
from aioengine.processors.embeddings import repeat_token
from aioengine.processors.encdec import EncDecMultiModalProcessor
from aioengine.processors.hf.substitutes import merge_image_options
from aioengine.processors.info import (
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    ProcessingContext,
    ProcessorInputs,
)
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import MultiModalDataItems
from aioengine.processors.processor import TextOrTokens
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdate
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "ImageReaderDummyInputs",
    "ImageReaderInfo",
    "ImageReaderProcessor",
    "ImageToText",
]

_SIDE = 448
_MASK = "attention_mask"


def _seen_whole(model: Any, features: Mapping[str, Tensor]) -> Tensor:
    """The rows [n, rows, dim] that the decoder attends to. Raises EngineError where some of them
    are to be hidden."""
    memory, mask = memory_of(model, features)
    if mask is not None:
        raise EngineError("the decoder sees a part of what the encoder gives")
    return memory


class ImageReaderInfo(BaseProcessingInfo):
    """One image in a prompt. Raises ModelLoadError where text is drawn into it."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        if getattr(self.get_image_processor(), "is_vqa", False):
            raise ModelLoadError(
                f"the image processor of {self.model_id!r} draws the prompt into the image "
                "(is_vqa), so that what the encoder reads depends on both. Run this model with "
                "transformers"
            )

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """Do as the base class; a checkpoint may have an image processor beside a tokenizer, and
        nothing that says so of both."""
        found = super().load_hf_processor(source, hf_config, options, **kwargs)
        if hasattr(found, "image_processor"):
            return found
        from transformers import AutoImageProcessor, TrOCRProcessor

        images = AutoImageProcessor.from_pretrained(source, **options, **kwargs)
        return TrOCRProcessor(images, cls.load_tokenizer(source, hf_config, options))

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Rows of a blank image, and of what would be cut from it."""
        (image,) = ImageReaderDummyInputs(self)._get_dummy_images(
            width=_SIDE, height=_SIDE, num_images=1
        )
        outputs = self.process_images([image], {})
        outputs.pop(_MASK, None)
        return {"image": self.count_rows({name: data[0] for name, data in outputs.items()})}

    def process_images(
        self, images: Sequence[Any], mm_kwargs: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """HF's outputs [n, ...]. The text has no part in it: HF's processor would make labels."""
        options = merge_image_options(self.get_hf_processor(), mm_kwargs) if mm_kwargs else {}
        outputs = self.get_image_processor()(list(images), **{**options, "return_tensors": "pt"})
        return {name: torch.as_tensor(value) for name, value in outputs.items()}

    def count_rows(self, item: Mapping[str, Tensor]) -> int:
        """Rows that the decoder attends to, for an item of these shapes."""
        known: dict[tuple[object, ...], int] = vars(self.ctx).setdefault("_rows_of_shapes", {})
        shapes = tuple((name, *data.shape) for name, data in sorted(item.items()))
        if shapes not in known:
            config = self.get_hf_config()
            # Pix2Struct hides patches of zeros.
            features = {
                name: torch.ones(
                    1, *data.shape, dtype=torch.bfloat16 if data.is_floating_point() else data.dtype
                )
                for name, data in item.items()
            }
            model = build_on_meta(find_class(config), config)
            with torch.no_grad(), shapes_and_masks():
                known[shapes] = _seen_whole(model, features).shape[1]
        return known[shapes]


class ImageReaderDummyInputs(BaseDummyInputsBuilder):
    """A blank image."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        count = mm_counts.get("image", 0)
        images = self._get_dummy_images(width=_SIDE, height=_SIDE, num_images=count)
        return ProcessorInputs(prompt_text="", mm_data={"image": images})


class ImageReaderProcessor(EncDecMultiModalProcessor):
    """The prompt is the decoder's; the encoder's is one token, as often as the image has rows."""

    prompt_half: ClassVar[Literal["encoder", "decoder"]] = "decoder"
    layout_needs_hf_outputs = True
    info: ImageReaderInfo

    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        if not mm_items.get_all_counts().get("image"):
            raise InvalidRequestError(
                "the model writes what it sees; give it an image: images=[...]", parameter="images"
            )
        return [0]

    def create_decoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        return prompt if len(prompt) else self.default_decoder_prompt()

    def has_start(self, token_ids: Sequence[int], start: int) -> bool:
        """Do as the base class; a task's token is Donut's start, as in HF `generate`."""
        encoder = getattr(self.info.get_hf_config(), "encoder", None)
        is_donut = "donut" in getattr(encoder, "model_type", "")
        return (is_donut and bool(token_ids)) or super().has_start(token_ids, start)

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        images = mm_data["images"]
        assert isinstance(images, list)
        outputs = self.info.process_images(images, mm_kwargs)
        mask = outputs.pop(_MASK, None)
        if mask is None:
            return outputs
        # What is hidden from all is left out.
        (kept,) = mask.bool()
        cut = {name for name, data in outputs.items() if data.shape[:2] == mask.shape}
        return {name: data[:, kept] if name in cut else data for name, data in outputs.items()}

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {name: MultiModalFieldConfig.batched("image") for name in hf_inputs}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        def count(item_idx: int) -> int:
            return self.info.count_rows(out_mm_kwargs.get_item("image", item_idx))

        repeated = repeat_token(mm_items, "image", 0, count)
        return [PromptReplacement(modality="image", target=[0], replacement=repeated)]


@MULTIMODAL_REGISTRY.register_processor(
    ImageReaderProcessor, info=ImageReaderInfo, dummy_inputs=ImageReaderDummyInputs
)
class ImageToText(TextToText):
    """One image, and what the decoder is to go on from.

    The decoder may be a language model of its own, or have the output head inside.
    """

    _has_inner_head = False

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        return find_class(hf_config)

    @classmethod
    def load_module(cls, path: str | os.PathLike[str], *, hf_config: Any, **options: Any) -> Any:
        module = super().load_module(path, hf_config=hf_config, **options)
        try:
            module.get_input_embeddings()
        except NotImplementedError:  # some classes do not say, and others' are the decoder's
            module.get_input_embeddings = module.get_decoder().get_input_embeddings
        return module

    @property
    def row_size(self) -> int:
        """Width of what the decoder's layers of cross-attention take."""
        decoder: Any = self.decoder()
        other: int | None = getattr(decoder.config, "cross_attention_hidden_size", None)
        return other or self.hidden_size

    @property
    def max_encoder_len(self) -> int:
        """Nothing that the model says: the rows of the largest image."""
        return 0

    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.get_decoder().get_decoder()
        return decoder

    def patch(self) -> None:
        super().patch()
        head: Any = self.model.get_output_embeddings()
        self._has_inner_head = any(module is head for module in self.decoder().modules())
        if self._has_inner_head:
            # It would be computed for all tokens, and hidden states are what is wanted.
            head.forward = _pass_on

    def encode_prompt(self, **kwargs: Any) -> Tensor:
        """The rows [n, rows, dim] of an image processor's outputs, or rows that were given."""
        given: Tensor | None = kwargs.get("image_embeds")
        if given is not None:
            return given
        features = {name: value for name, value in kwargs.items() if name != "input_ids"}
        return _seen_whole(self.model, features)

    def run_decoder(
        self, decoder: nn.Module, embeds: Tensor, positions: Tensor, **others: Any
    ) -> Tensor:
        arguments = {**self.position_arguments(positions), **others}
        output = decoder(inputs_embeds=embeds[None], use_cache=False, **arguments)
        hidden: Tensor | None = getattr(output, "last_hidden_state", None)
        found: Tensor = (output.logits if hidden is None else hidden)[0]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        logits: Tensor
        if self._has_inner_head:
            logits = type(head).forward(head, hidden)
        elif self._has_long_head:
            logits = run_head(self.model.get_decoder(), self.decoder(), hidden)
        else:
            logits = super().logits(hidden)
        return logits

    @cached_property
    def _has_long_head(self) -> bool:
        """Return whether a language model has more behind its decoder than an output head."""
        whole, head = self.model.get_decoder(), self.model.get_output_embeddings()
        known = {id(each) for part in (self.decoder(), head) for each in part.parameters()}
        return any(id(each) not in known for each in whole.parameters())

    def _find_scale(self, decoder: nn.Module) -> float:
        return 1.0

    def has_other_head(self, decoder: Any) -> bool:
        return decoder.get_output_embeddings() not in (None, self.model.get_output_embeddings())


def _pass_on(hidden: Tensor) -> Tensor:
    return hidden
