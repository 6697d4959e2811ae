"""Text to text: the prompt is what an encoder reads, and the answer is its decoder's.

Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation,
Translation, and Comprehension" (2019); Raffel et al., "Exploring the Limits of Transfer Learning
with a Unified Text-to-Text Transformer" (2019); and the many built like one of them. Where a
decoder's tokens stand, families say in three ways, and the module is asked which it is: embeddings
that are added, a bias by distance in attention, or positions that the decoder is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.kernels.layer_slot import LayerSlot, attach_slot, slot_of
from aioengine.models.encdec.base import EncoderDecoderModel, PlacedEmbedding
from aioengine.models.runtime.hf_loading import padding_of
from aioengine.models.runtime.probe import LayerSpec, probe_layers
from aioengine.models.runtime.registry import find_class
from aioengine.models.runtime.whole_pass import find_logit_scale
from aioengine.processors.encdec import EncDecTextProcessor
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["TextToText", "bias_by_distance", "embeddings_by_position"]


@MULTIMODAL_REGISTRY.register_processor(EncDecTextProcessor)
class TextToText(EncoderDecoderModel):
    """The prompt is what the encoder reads.

    transformers' module as it is, whatever family it is of. An encoder without positions of its own
    takes `max_model_len` tokens, by default the config's `n_positions`: no distance beyond these is
    new to it, but its memory grows with their square.
    """

    padding_id: int | None = None
    """The id of padding, where the decoder gives it a position of its own."""

    def __init__(self, model: Any, *, max_model_len: int | None = None, **kwargs: Any) -> None:
        self._max_len = max_model_len
        super().__init__(model, max_model_len=max_model_len, **kwargs)

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        """The class with a head: a checkpoint of the bare model shares it with the embeddings.

        Where these are not tied, a checkpoint without a head is refused as it is read.
        """
        from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, GenerationMixin

        found = find_class(hf_config)
        if issubclass(found, GenerationMixin):
            return found
        return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(hf_config), found)

    @property
    def hidden_size(self) -> int:
        """Width of the decoder's embeddings, which may be another than the encoder's."""
        decoder: Any = self.decoder()
        return int(decoder.get_input_embeddings().weight.shape[-1])

    @property
    def row_size(self) -> int:
        encoder: Any = self.encoder()
        return int(encoder.get_input_embeddings().weight.shape[-1])

    @property
    def max_encoder_len(self) -> int:
        config: Any = self.encoder().config
        limit: int | None = getattr(config, "max_position_embeddings", None)
        return limit or self._max_len or int(getattr(config, "n_positions", 512))

    @cached_property
    def _takes_positions(self) -> bool:
        """Return whether the decoder is given the positions of its tokens."""
        decoder: Any = self.decoder()
        names = inspect.signature(decoder.forward).parameters
        return not hasattr(decoder, "embed_positions") and "position_ids" in names

    @staticmethod
    def _has_biases(decoder: nn.Module, specs: Sequence[LayerSpec]) -> bool:
        layers = (decoder.get_submodule(spec.name) for spec in specs)
        return any(hasattr(layer, "relative_attention_bias") for layer in layers)

    def layers(self) -> tuple[LayerSpec, ...]:
        decoder: Any = self.decoder()
        obstacle = self._find_obstacle(decoder)
        if obstacle is not None:
            raise _refused(self.model, obstacle)
        specs = probe_layers(decoder, self.call_decoder, self.hidden_size, takes_bias=True)
        is_told = self._takes_positions or hasattr(decoder, "embed_positions")
        if not (is_told or self._has_biases(decoder, specs)):
            raise _refused(
                self.model,
                "its decoder has neither embed_positions nor relative_attention_bias, and takes no "
                "position_ids, so that it cannot be told where a token stands",
            )
        return specs

    def _find_obstacle(self, decoder: Any) -> str | None:
        """Describe what keeps the model from being run in batches, in words; None if nothing
        known."""
        if getattr(self.model.config, "attention_type", None) == "block_sparse":
            return (
                "block-sparse attention of its encoder reads random blocks, and a short prompt "
                "turns it off for all later ones; set attention_type to 'original_full' in "
                "config.json"
            )
        if not hasattr(decoder, "get_input_embeddings"):
            return "its decoder does not tell its embeddings"
        if self.has_other_head(decoder):
            return "its decoder is a whole model with a head of its own"
        return None

    def has_other_head(self, decoder: Any) -> bool:
        """Return whether a decoder has an output head that is not known to be computed here."""
        return decoder.get_output_embeddings() is not None

    def patch(self) -> None:
        decoder: Any = self.decoder()
        self._scale = self._find_scale(decoder)
        self.padding_id = padding_of(decoder)
        super().patch()
        if hasattr(decoder, "embed_positions"):
            length = self.max_position_embeddings or self._max_len
            if length is None:
                raise _refused(
                    self.model, "config.json has no max_position_embeddings; set max_model_len"
                )
            run = partial(self.run_alone, decoder, length)
            table = embeddings_by_position(decoder, length, self.hidden_size, run)
            decoder.embed_positions = PlacedEmbedding(table, self._holder)
        self._place_biases(decoder)

    def run_alone(self, decoder: Any, length: int) -> Any:
        """Run the decoder on one sequence of any tokens, before its attention is rerouted or
        after."""
        weight = decoder.get_input_embeddings().weight
        return decoder(
            inputs_embeds=weight.new_full((1, length, self.hidden_size), 0.5),  # no padding's id
            encoder_hidden_states=weight.new_zeros(1, 1, self.row_size),
            use_cache=False,
        )

    def _find_scale(self, decoder: nn.Module) -> float:
        """Find the factor of what goes into the head: T5's kind has one where the head is tied."""
        scale = self.hidden_size**-0.5
        is_scaled = getattr(self.text_config, "scale_decoder_outputs", None)
        if is_scaled is None and self._has_biases(decoder, self.specs):
            return find_logit_scale(self.model, decoder, self.text_config, [scale])
        return scale if is_scaled else 1.0

    def _place_biases(self, decoder: nn.Module) -> None:
        """Have the kernels add each layer's bias by distance, or the last one before it."""
        table: Tensor | None = None
        for spec in self.specs:
            layer: Any = decoder.get_submodule(spec.name)
            if spec.kind == "self" and hasattr(layer, "relative_attention_bias"):
                table = bias_by_distance(layer)
            if table is None:
                continue
            slot = slot_of(layer)
            if spec.kind == "self" and isinstance(slot, LayerSlot):
                attach_slot(layer, replace(slot, distance_bias=table))
            # Else each would be made anew for every step, over all pairs of the batch's tokens.
            nothing = table.new_zeros(1)
            layer.has_relative_attention_bias = True
            layer.compute_bias = lambda *args, nothing=nothing, **kwargs: nothing

    def position_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        return super().position_arguments(positions) if self._takes_positions else {}

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden if self._scale == 1 else hidden * self._scale)
        bias: Tensor | None = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias.to(logits.dtype)


def _refused(module: Any, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{type(module).__name__} cannot be run as it is: {reason}. Run this model with "
        "transformers, or add a class of yours with aioengine.models.register_model"
    )


class _AnsweredError(Exception):
    """Ends a forward that has shown what it was run for."""


@torch.no_grad()
def embeddings_by_position(decoder: Any, length: int, width: int, run: Callable[[], Any]) -> Tensor:
    """Rows [length, width] that a decoder adds to embeddings at the positions from 0 on.

    `run` runs the decoder on a sequence of that length, as far as its `embed_positions`:
    modules are called in different ways, start at different offsets, and may be no table at all.
    Raises ModelLoadError where this gives no such rows.
    """
    weight = decoder.get_input_embeddings().weight
    found: list[Any] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        found.append(output)
        raise _AnsweredError

    hook = decoder.embed_positions.register_forward_hook(note)
    try:
        run()
    except _AnsweredError:
        pass
    except Exception as error:
        raise ModelLoadError(
            f"{type(decoder).__name__} has no embeddings for {length} positions: {error!s:.200}"
        ) from error
    finally:
        hook.remove()
    if not (found and isinstance(found[0], Tensor) and found[0].numel() == length * width):
        raise ModelLoadError(
            f"{type(decoder).__name__} does not add what its embed_positions gives to embeddings"
        )
    table: Tensor = found[0].reshape(length, width).to(weight.dtype)
    return table.clone()


@torch.no_grad()
def bias_by_distance(attention: Any) -> Tensor:
    """A decoder layer's bias [heads, distances]; the last is that of all greater ones.

    Raises ModelLoadError where greater distances than `relative_attention_max_distance` differ.
    """
    most = int(attention.relative_attention_max_distance)
    seen = 2 * most
    row = attention.compute_bias(1, seen + 1, past_seen_tokens=seen)
    by_distance: Tensor = row[0, :, 0].flip(-1)
    if not (by_distance[:, most:] == by_distance[:, most : most + 1]).all():
        raise ModelLoadError("the relative attention buckets do not end at their max_distance")
    return by_distance[:, : most + 1].contiguous()
