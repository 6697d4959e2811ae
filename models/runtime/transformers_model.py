"""A transformers model as the engine runs it: a flattened batch over paged attention.

`TransformersModel` wraps transformers' own module and weights. What the runner calls is at the top;
what a family may override is below, each hook with a default that fits most models:

    decoder    the module that turns embeddings into hidden states
    layers     its attention layers (a run on the meta device tells)
    patch      make the loaded modules run flattened
    unread_layers  encoder layers that are computed for nothing
    positions  a prompt's position ids
    blocks     which prompt tokens attend to each other in both directions
    sees_blocks  whether a KV group's layers do so
    encode     media items to encoder rows
    encoder_arguments  what the encoder is given that the host computes
    memory     rows for cross-attention
    embed      token ids and encoder rows to embeddings
    forward    embeddings to hidden states
    logits     hidden states to logits

A family without surprises is an empty subclass under `register_model`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aioengine.kernels.attention import AttentionBackend, AttentionMetadata
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder
from aioengine.kernels.logits import cap_softly, to_floats
from aioengine.kernels.pool import PageFormat
from aioengine.models.fusion import fuse_layers
from aioengine.models.fusion.decoder_plan import run_decoder_plan
from aioengine.models.fusion.packed_linear import own_layers
from aioengine.models.fusion.swap import pass_on
from aioengine.models.fusion.tied_head import tables_of
from aioengine.models.latent.layers import attach_latents, prepare_latents
from aioengine.models.quantization.rounding import Rounding, round_weights
from aioengine.models.runtime import encoding
from aioengine.models.runtime.attention import give_positions, route_attention
from aioengine.models.runtime.hf_loading import build_on_meta, limit_of, load_pretrained, pin_rotary
from aioengine.models.runtime.interfaces import (
    MultiModalEmbeddings,
    PromptInputs,
    PromptMedia,
    merge_multimodal_embeddings,
    positions_of,
)
from aioengine.models.runtime.probe import LayerSpec, group_layers, probe_layers
from aioengine.models.runtime.registry import find_class
from aioengine.models.runtime.whole_pass import WholePrompt, find_logit_scale, run_whole
from aioengine.models.state.layers import attach_states
from aioengine.models.state.memory import StateSpec, StateStep
from aioengine.types import KVGroup

__all__ = ["TransformersModel"]


class TransformersModel:
    """One loaded model. It is called under `torch.inference_mode`, by one thread at a time; but
    `encode` may be called by another thread than all else, at the same time.

    `model`: transformers' module, which belongs to this object from here on: its decoder's
    attention is rerouted. `specs`: its attention layers, if they are known already.

    `kv_groups`: layers by the shape and life of their KV blocks. `layer_groups`: for each layer,
    in the order in which they run, (its group, its index within the group).
    """

    config_class: ClassVar[type[Any] | None] = None
    """What reads this family's config.json, a PreTrainedConfig; None: what transformers chooses."""
    blocks_in_window: ClassVar[bool] = False
    """Whether a layer's window bounds what the tokens of a block see of each other, too."""
    is_causal: ClassVar[bool] = True
    """Whether a token of text sees those before it only."""

    def __init__(
        self,
        model: Any,
        *,
        specs: Sequence[LayerSpec] | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.model = model
        self.hf_config = model.config
        self.text_config = self.hf_config.get_text_config(decoder=True)
        self.specs = specs if specs is not None else self.probe(self.hf_config)
        self.states = getattr(self.specs, "states", ())
        self.kv_groups, self.layer_groups = group_layers(self.specs)
        self._holder = StepHolder()
        self._backend: AttentionBackend | None = None
        self._caches: tuple[tuple[Tensor, Tensor], ...] = ()
        pin_rotary(self.decoder(), max_model_len)
        self.logit_scale = find_logit_scale(model, self.decoder(), self.text_config)
        self.patch()

    @classmethod
    def chosen_for(cls, hf_config: Any) -> type[TransformersModel]:
        """The class for this config; a family may hand some of its configs to another."""
        return cls

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        hf_config: Any,
        max_model_len: int | None = None,
        **options: Any,
    ) -> Self:
        """The model at `path`, as `load_module` takes it. Blocks; call it in a thread.

        The layers are probed before any weight is read. Raises ModelLoadError.
        """
        specs = cls.probe(hf_config)
        module = cls.load_module(path, hf_config=hf_config, **options)
        return cls(module, specs=specs, max_model_len=max_model_len)

    @classmethod
    def load_module(cls, path: str | os.PathLike[str], *, hf_config: Any, **options: Any) -> Any:
        """The module with its weights, as transformers made it. Raises ModelLoadError.

        `path`: a folder or a hub id; `options`: `dtype`, `device`, and `revision` or None.
        """
        return load_pretrained(cls.hf_class(hf_config), path, hf_config=hf_config, **options)

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        """transformers' class that is built for this config."""
        return find_class(hf_config)

    @classmethod
    def probe(cls, hf_config: Any) -> tuple[LayerSpec, ...]:
        """The attention layers of a model with this config, without its weights.

        Raises ModelLoadError where a layer cannot be served.
        """
        return cls.around(build_on_meta(cls.hf_class(hf_config), hf_config)).layers()

    @classmethod
    def around(cls, module: Any) -> Self:
        """A model around a module that is left as it is: without pages, it takes no steps."""
        shell = cls.__new__(cls)
        shell._holder = StepHolder()
        shell.model = module
        shell.hf_config = module.config
        shell.text_config = module.config.get_text_config(decoder=True)
        return shell

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """Logits [n, vocab] at the positions `rows` of a whole prompt, by the module's own forward.

        Called on what `around` gives, for the trial at load (`execution/load_trial`). Override it
        where transformers' forward wants more than what the encoder takes.
        """
        return run_whole(self.model, prompt, rows)

    # What the runner reads and calls.

    logit_scale: float = 1.0
    states: tuple[StateSpec, ...] = ()
    kv_groups: tuple[KVGroup, ...]
    layer_groups: tuple[tuple[int, int], ...]

    @property
    def hidden_size(self) -> int:
        """Width of the decoder's embeddings."""
        return int(self.model.get_input_embeddings().weight.shape[-1])

    @property
    def row_size(self) -> int:
        """Width of encoder rows; `embed` may make wider embeddings of them than `hidden_size`."""
        return self.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, which is the width of the logits."""
        head = self.model.get_output_embeddings()
        return self.hidden_size if head is None else int(head.weight.shape[0])

    @property
    def generates(self) -> bool:
        """Return whether it has an output head; without one, hidden states are its logits."""
        return self.model.get_output_embeddings() is not None

    @property
    def max_position_embeddings(self) -> int | None:
        """Tokens of the longest sequence the model knows; None where its config sets no limit."""
        return limit_of(self.text_config)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, embeddings and encoder rows."""
        return self.model.get_input_embeddings().weight.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def round_weights(self, rounding: Rounding, *, keep: bool) -> None:
        """Round the decoder's weights; see `models.quantization.rounding`. Mutates the modules."""
        layers = own_layers(self.model, nn.Linear).values()
        tables = tables_of(self.model)
        round_weights(self.model, self.decoder(), layers, tables, rounding, keep=keep)

    def pack(self) -> None:
        """Lay linear layers out for the device, fuse what is around, plan the decoder.

        float64 is left as it is, but `unread_layers` go. Mutates the modules; to be called before
        the first step. Raises ModelLoadError where rounded weights cannot be packed.
        """
        for layer in self.unread_layers():
            pass_on(layer)
        fuse_layers(self.model, self.decoder())

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]], backend: AttentionBackend) -> None:
        """Give every layer its pages: (key cache, value cache) in the order of `layer_groups`.

        Key caches are [num_blocks, block_size, Hkv, Dk], value caches [..., Dv], or rows of bytes.
        Layers of one place are given the same ones.
        """
        assert len(caches) == len(self.specs)
        for pages, spec in zip(caches, self.specs, strict=True):
            for each, dim in zip(pages, (spec.key_dim, spec.value_dim), strict=True):
                row = PageFormat(each.dtype).row_size(dim)
                assert each.shape[2:] == (spec.num_kv_heads, row)
        self._caches = tuple(caches)
        self._backend = backend
        prepare_latents(self.decoder())

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """The encoder's rows, one [rows, hidden] tensor per item, for a batch of items.

        `pixel_values` [n, 3, height, width] and whatever else transformers' `get_image_features`
        takes (and so for videos and audio); or `image_embeds`, rows that are there already, which
        are passed through in the model's dtype. A subclass may define the older
        `get_multimodal_embeddings(**kwargs)` instead.
        """
        found = encoding.passed_through(kwargs, self.dtype, self.device)
        if found is not None:
            return found
        older = getattr(self, "get_multimodal_embeddings", None)
        if older is not None:
            rows: MultiModalEmbeddings | None = older(**kwargs)
            return [] if rows is None else rows
        ready = self.encoder_arguments(kwargs)
        return encoding.encode_batch(self.model, kwargs, self.dtype, self.device, ready)

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [T, hidden] of `input_ids` [T], encoder rows where `is_multimodal` [T].

        Ids under the mask may lie outside the embedding table. A subclass may define the older
        `get_input_embeddings(input_ids, multimodal_embeddings=None)` instead, which finds the
        placeholders by their ids.
        """
        older = getattr(self, "get_input_embeddings", None)
        if older is not None:
            return older(input_ids, multimodal_embeddings)  # type: ignore[no-any-return]
        return self.embed(input_ids, multimodal_embeddings, is_multimodal)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of hidden states [n, hidden], in float32 at least."""
        return to_floats(self.logits(hidden))

    def prompt_inputs(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> PromptInputs | None:
        """Compute what `positions` and `blocks` say of a prompt; None where all is as usual.

        Reads nothing that a step changes: it may be called while one runs.
        """
        positions, blocks = self.positions(token_ids, items), self.blocks(token_ids, items)
        if positions is None and blocks is None:
            return None
        return PromptInputs(positions, None if blocks is None else blocks.to(torch.int32))

    def positions_for(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        prompts: Sequence[tuple[Tensor, int] | None] | None = None,
    ) -> Tensor:
        """Position ids [T] (or [3, T]) of a step that computes tokens [starts[i], ends[i]).

        `prompts[i]` is what `positions` gave for request i; without it, or with None in it, a
        token's position is its index. On the CPU.
        """
        return positions_of(prompts, starts, ends)

    # Hooks.

    def decoder(self) -> nn.Module:
        """The module that takes embeddings [1, T, hidden] and gives the last hidden state."""
        decoder: nn.Module = self.model.get_decoder()
        head = self.model.get_output_embeddings()
        if decoder is head:  # its name is a head's here
            decoder = getattr(self.model, "model", decoder)
        elif decoder is self.model or getattr(decoder, "lm_head", None) is head:
            decoder = getattr(decoder, "model", decoder)  # it is one with its head
        return decoder

    def layers(self) -> tuple[LayerSpec, ...]:
        """The decoder's attention layers; called on a model on the meta device, used up by it."""
        return probe_layers(self.decoder(), self.call_decoder, self.hidden_size)

    def patch(self) -> None:
        """Reroute the loaded decoder's attention to this model's pages; mutates the modules."""
        decoder = self.decoder()
        route_attention(decoder, [spec.name for spec in self.specs])
        for index, spec in enumerate(self.specs):
            group, _ = self.layer_groups[index]
            stores = spec.shares is None
            # Behind the last attention layer may be one that needs all tokens.
            is_last = index == len(self.specs) - 1 and not self.states
            slot = LayerSlot(index, group, self._holder, stores=stores, is_last=is_last)
            attach_latents(decoder.get_submodule(spec.name), slot, spec.latent)
        give_positions(decoder, self._holder)
        attach_states(decoder, self.states, self._holder, self.model.get_input_embeddings().weight)

    def unread_layers(self) -> Sequence[nn.Module]:
        """Layers of encoders that compute hidden states which nobody reads."""
        return ()

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int] | None:
        """A prompt's position ids [L] or [3, L], and what a later token's index is off by.

        None where a token's position is its index. Of one kind for all prompts of a model.
        """
        return None

    def blocks(self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()) -> Tensor | None:
        """A block id [L] per prompt token, -1 for causal ones; None where all are causal.

        Tokens of one block see each other both ways, and are computed in one step.
        """
        return None

    def sees_blocks(self, group: int) -> bool:
        """Return whether layers of a KV group see blocks; else they are causal throughout."""
        return True

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Each item's rows [rows, hidden]. Items of equal shapes go through the encoder together.

        An item holds what transformers' processor made for it, without a batch dimension
        (`pixel_values` [3, height, width]), or `{modality}_embeds` [rows, hidden].
        """
        return encoding.encode_items(self.embed_multimodal, items)

    def encoder_arguments(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Build arguments that transformers' encoder takes as they are, in the place of some of
        `kwargs` (see `embed_multimodal`) or beside them.

        What can be computed on the host is best given so: reading it back from a device waits.
        """
        return {}

    def memory(self, items: Sequence[Tensor]) -> Tensor | None:
        """Build what cross-attention layers are given in a step that writes the keys and values of
        these encoder outputs, [rows, dim] each; None for a model that has no such layers."""
        return None

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """See `embed_input_ids`."""
        table = self.model.get_input_embeddings()
        if is_multimodal is None:
            return table(input_ids)  # type: ignore[no-any-return]
        mask = is_multimodal.to(input_ids.device)
        embeds = table(input_ids.masked_fill(mask, 0))
        if rows is None:
            return embeds  # type: ignore[no-any-return]
        if self.row_size > embeds.shape[-1]:
            embeds = pad(embeds, (0, self.row_size - embeds.shape[-1]))
        return merge_multimodal_embeddings(input_ids, embeds, rows, is_multimodal=is_multimodal)

    def forward(
        self,
        inputs_embeds: Tensor,
        positions: Tensor,
        metadata: Sequence[AttentionMetadata],
        encoded: Sequence[Tensor] = (),
        *,
        rows: Tensor | None = None,
        states: StateStep | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of a step's embeddings [T, hidden].

        `positions` [T] or [3, T]; `metadata`: one for each of `kv_groups`; `encoded`: the encoder
        outputs whose keys and values this step writes. `rows` [n]: those of the result that will be
        read, None for all; what the others hold is not defined, as the last layer may leave them
        out. `states`: of the layers that keep one. Writes the step's keys and values into the pages
        that were bound.
        """
        assert self._backend is not None, "bind() comes before forward()"
        assert len(metadata) == len(self.kv_groups)
        memory = self.memory(encoded)
        given = tuple(metadata), self._caches, self._backend, positions, memory, rows, states
        with self._holder.hold(StepContext(*given)):
            return self.call_decoder(self.decoder(), inputs_embeds, positions)

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Run `decoder` on [T, hidden] and [T] or [3, T]; the probe and `forward` share it."""
        found = self.run_plan(decoder, embeds, positions)
        return self.run_decoder(decoder, embeds, positions) if found is None else found

    def run_plan(
        self, decoder: nn.Module, embeds: Tensor, positions: Tensor, rows: Sequence[Tensor] = ()
    ) -> Tensor | None:
        """Do as `run_decoder` without the decoder's modules; None where these are needed.

        `rows` [T, hidden] each: added behind the first layers.
        """
        return run_decoder_plan(decoder, embeds, positions, rows)

    def run_decoder(
        self, decoder: nn.Module, embeds: Tensor, positions: Tensor, **others: Any
    ) -> Tensor:
        """Call transformers' own forward, with `others` beside embeddings and positions."""
        arguments = {**self.position_arguments(positions), **others}
        output = decoder(inputs_embeds=embeds[None], use_cache=False, **arguments)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def position_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        """Build the arguments that give the decoder the positions [T] or [3, T] of its tokens."""
        return {"position_ids": positions[None] if positions.dim() == 1 else positions[:, None]}

    def logits(self, hidden: Tensor) -> Tensor:
        """The output head on [n, hidden], with the config's scale and final soft cap."""
        head = self.model.get_output_embeddings()
        logits: Tensor = hidden if head is None else head(hidden)
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        cap = getattr(self.text_config, "final_logit_softcapping", None)
        return logits if cap is None else cap_softly(logits, cap)
