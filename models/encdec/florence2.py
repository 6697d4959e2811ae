"""Florence-2: a DaViT tower, and a BART that reads what it saw before the words of a task.

Xiao et al., "Florence-2: Advancing a Unified Representation for a Variety of Vision Tasks" (2023).
A prompt is a task's token, `<OD>` or `<CAPTION>` say, with its text where the task takes one, or
any other text; transformers' processor makes a sentence of it. Answers come as text, in which
`<loc_123>` are coordinates: `post_process_generation` of transformers' processor makes boxes of
them (`engine.processor.info.get_hf_processor()`), given text that was generated with
`skip_special_tokens=False`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.encdec.media import ImageReader
from aioengine.models.encdec.text import TextToText
from aioengine.models.runtime.image_tokens import ImageTokenProcessor
from aioengine.processors.encdec import EncoderPromptProcessor
from aioengine.processors.info import ImageDummyInputsBuilder, OneImageInfo
from aioengine.processors.items import ImageSize, MultiModalDataItems
from aioengine.processors.processor import TextOrTokens
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "Florence2",
    "Florence2ConfigReader",
    "Florence2MultiModalProcessor",
    "Florence2ProcessingInfo",
]


class Florence2ConfigReader:
    """Reads config.json, and tells the checkpoints of the model's first release apart.

    Their architecture has the same name, but it is code of their own with other weights.
    """

    @classmethod
    def from_pretrained(cls, source: Any, **options: Any) -> Any:
        """A transformers Florence2Config. Raises ModelLoadError for such a checkpoint."""
        from transformers import Florence2Config

        settings, _ = Florence2Config.get_config_dict(source, **options)
        vision, text = (settings.get(name) or {} for name in ("vision_config", "text_config"))
        if "dim_embed" in vision or text.get("model_type") == "florence2_language":
            raise ModelLoadError(
                "it is a checkpoint for Florence-2's own remote code; take its conversion to "
                "transformers: florence-community/Florence-2-base, -large, -base-ft or -large-ft"
            )
        return Florence2Config.from_pretrained(source, **options)


class Florence2ProcessingInfo(OneImageInfo):
    """One image in a prompt, or none."""

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Encoder rows of any image: all are resized to one size."""
        return int(self.get_hf_processor().num_image_tokens)

    def get_image_size_with_most_features(self) -> ImageSize:
        """A size of a photograph's order: all become the same."""
        return ImageSize(width=448, height=448)


class Florence2MultiModalProcessor(ImageTokenProcessor, EncoderPromptProcessor):
    """The encoder's prompt is the image, then a sentence between `<s>` and `</s>`.

    Without an image it is the sentence alone. A prompt of token ids is read as it is, with the
    image before it if it holds no placeholder.
    """

    info: Florence2ProcessingInfo

    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        has_image = bool(mm_items.get_all_counts().get("image"))
        if isinstance(prompt, str):
            text, tokenizer = self._sentence(prompt), self.info.get_tokenizer()
            if has_image:
                image_token = self.info.get_hf_processor().image_token
                text = f"{image_token}{tokenizer.bos_token}{text}{tokenizer.eos_token}"
            return self.tokenize(text, add_special_tokens=False)
        image_token_id = self.info.get_hf_config().image_token_id
        is_missing = has_image and image_token_id not in prompt
        return [image_token_id, *prompt] if is_missing else prompt

    def _sentence(self, prompt: str) -> str:
        """Expand a task's token and its text as transformers does."""
        try:
            (sentence,) = self.info.get_hf_processor()._construct_prompts(prompt)
        except ValueError:
            raise InvalidRequestError(
                "the prompt has text beside the token of a task that takes none; give the token "
                "alone, or a task with a text of its own",
                parameter="prompt",
            ) from None
        return str(sentence)


@MULTIMODAL_REGISTRY.register_processor(
    Florence2MultiModalProcessor, info=Florence2ProcessingInfo, dummy_inputs=ImageDummyInputsBuilder
)
class Florence2(ImageReader, TextToText):
    """The prompt is a task token or a sentence; checkpoints in transformers' format.

    A BART without its head inside, whose decoder is one level further down.
    """

    config_class: ClassVar[type[Any] | None] = Florence2ConfigReader

    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.get_decoder().decoder
        return decoder
