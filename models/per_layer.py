"""Families in which every decoder layer takes an input of its own, looked up by the token's id.

Gemma 3n (Google, 2025) and Gemma 4 (2026). What a token brings is one row of a second embedding
table, a piece of it for each layer; the decoder adds to it what it projects from the embedding.
Only `embed` sees token ids, so there the row is looked up and travels on beside the embedding, as
further columns, until `call_decoder` parts them: neither the runner nor the core knows of it.

Their last layers attend to the keys and values of an earlier one, which the probe finds
(`LayerSpec.shares`); their layers differ in head size and window, which makes KV groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import relu
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from aioengine.errors import ModelLoadError, UnsupportedModalityError
from aioengine.kernels.transfer import to_device
from aioengine.models.bidirectional import Gemma3
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, PromptMedia
from aioengine.models.runtime.probe import LayerSpec, probe_layers
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.generic_info import GenericProcessingInfo
from aioengine.processors.info import ProcessingContext
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.processors.text_only import TextOnlyInfo

__all__ = ["Gemma3n", "Gemma4", "Gemma4Unified", "PerLayerModel", "PerLayerText"]


class PerLayerModel(TransformersModel):
    """Embeddings of `hidden_size` columns, and behind them those of the layers' own inputs."""

    @property
    def per_layer_size(self) -> int:
        """Columns of a token's inputs of all layers together; 0 where the config wants none."""
        size = getattr(self.text_config, "hidden_size_per_layer_input", None) or 0
        return int(size * self.text_config.num_hidden_layers)

    @property
    def bidirectional(self) -> str | None:
        """Kind of tokens that see those behind them: "vision" (an image's), "all" or None."""
        found: str | None = getattr(self.text_config, "use_bidirectional_attention", None)
        return found

    def layers(self) -> tuple[LayerSpec, ...]:
        """See the base class. Raises ModelLoadError for a model that embeds and cannot generate."""
        if self.bidirectional == "all":
            raise ModelLoadError(
                "use_bidirectional_attention is 'all' in the config: every token sees those behind "
                "it, so that none can be generated; models that generate have 'vision' or nothing"
            )
        width = self.hidden_size + self.per_layer_size
        return probe_layers(self.decoder(), self.call_decoder, width)

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """[T, hidden_size + per_layer_size]. Where rows stand, the layers get padding's inputs."""
        embeds = super().embed(input_ids, rows, is_multimodal)
        if not self.per_layer_size:
            return embeds
        if is_multimodal is not None:
            padding = self.text_config.pad_token_id or 0
            input_ids = input_ids.masked_fill(is_multimodal.to(input_ids.device), padding)
        decoder: Any = self.decoder()
        compute = decoder.get_per_layer_inputs
        # Some versions of some families take the embeddings too, of which nothing is needed.
        others = [None] * (len(inspect.signature(compute).parameters) - 1)
        return torch.cat([embeds, compute(input_ids, *others).flatten(-2)], dim=-1)

    def patch(self) -> None:
        """Do as the base class; sparse activations find their cutoff without a copy to the
        device."""
        super().patch()
        modules: Iterator[Any] = self.decoder().modules()
        for module in modules:
            share = getattr(module, "activation_sparsity", 0.0)
            if share and hasattr(module, "_gaussian_topk"):
                module._gaussian_topk = _gaussian_cutoff(share)

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class, on embeddings as `embed` makes them."""
        if not self.per_layer_size:
            return super().call_decoder(decoder, embeds, positions)
        first, layers = torch.split(embeds, [self.hidden_size, self.per_layer_size], dim=-1)
        num_layers = self.text_config.num_hidden_layers
        inputs = layers.reshape(1, len(layers), num_layers, -1)
        return self.run_decoder(decoder, first, positions, per_layer_inputs=inputs)


def _gaussian_cutoff(share: float) -> Callable[[Tensor], Tensor]:
    """Keep what of a row exceeds the cutoff that a normal row's `share` lies below, less that."""
    normal: Any = Normal(0, 1)
    deviations: Tensor = normal.icdf(torch.tensor(share, dtype=torch.float32))

    def cut(inputs: Tensor) -> Tensor:
        mean = inputs.mean(dim=-1, keepdim=True)
        deviation = inputs.std(dim=-1, keepdim=True, unbiased=False)
        return relu(inputs - (mean + deviation * deviations.to(inputs.dtype)))

    return cut


class PerLayerText(PerLayerModel):
    """A causal language model: token ids in, logits out."""


class Gemma3nTextPart(Gemma3nTextConfig):  # type: ignore[misc]
    """Config of a checkpoint's text model; of the towers nothing is read."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        settings, options = super().get_config_dict(*args, **kwargs)
        text = settings.get("text_config", settings)
        return {**text, "architectures": settings.get("architectures")}, options


class Gemma3nInfo(TextOnlyInfo):
    """A tokenizer and nothing else. Media are refused, and it is said why."""

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        return cls.load_tokenizer(source, hf_config, options)

    def validate_num_items(self, counts: Mapping[str, int]) -> None:
        for modality, count in counts.items():
            if count:
                raise UnsupportedModalityError(
                    f"the model takes no {modality} items: of Gemma 3n the text model alone is "
                    "served, as its vision tower is code of timm's, which the engine does without",
                    parameter=f"{modality}s",
                    value=count,
                )


@MULTIMODAL_REGISTRY.register_processor(info=Gemma3nInfo)
class Gemma3n(PerLayerText):
    """The text model of a checkpoint that holds towers too: transformers cannot build them here."""

    config_class = Gemma3nTextPart

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        return Gemma3nForCausalLM


class Gemma4ProcessingInfo(GenericProcessingInfo):
    """Audio only where the config has a tower for them: transformers' processor always has."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        if self.get_hf_config().audio_config is None:
            self.contracts.pop("audio", None)


@MULTIMODAL_REGISTRY.register_processor(info=Gemma4ProcessingInfo)
class Gemma4(PerLayerModel, Gemma3):
    """Soft tokens of an image see each other both ways in some sizes, in layers with a window.

    Layers without one are causal throughout, unlike Gemma 3's.
    """

    def blocks(self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()) -> Tensor | None:
        """A block for every run of an image's soft tokens, where the config wants them."""
        seen = [item for item in items if item.modality != "audio"]
        return super().blocks(token_ids, seen) if self.bidirectional == "vision" else None

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """See the base class. A placeholder that the model itself writes is padding to it."""
        for modality in ("image", "video", "audio"):
            named = getattr(self.hf_config, f"{modality}_token_id", None)
            if named is not None:
                padding = self.text_config.pad_token_id or 0
                input_ids = input_ids.masked_fill(input_ids == named, padding)
        return super().embed(input_ids, rows, is_multimodal)

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Do as the base class; of audio the rows that hold sound.

        `input_features` [n, frames, mel bins] with `input_features_mask` [n, frames].
        """
        features, mask = kwargs.get("input_features"), kwargs.get("input_features_mask")
        if features is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(features, Tensor) and isinstance(mask, Tensor)
        features = to_device(features, self.device).to(self.dtype)
        inner: Any = self.model.model
        output = inner.get_audio_features(features, to_device(mask, self.device))
        pairs = zip(output.pooler_output, output.attention_mask, strict=True)
        return [rows[is_sound] for rows, is_sound in pairs]

    def sees_blocks(self, group: int) -> bool:
        return self.kv_groups[group].window is not None


class Gemma4Unified(Gemma4):
    """Without towers. An image's tokens see each other in every layer, and beyond a window.

    So it is in transformers' forward, and in `generate` with the caches that it makes by itself;
    with a static cache it makes Gemma 4's masks. Should its forward do so too, the trial refuses.
    """

    blocks_in_window: ClassVar[bool] = False

    def sees_blocks(self, group: int) -> bool:
        return True
