"""Speech to text: an encoder of what a feature extractor makes of audio, and a decoder of text.

Any of transformers' AutoModelForSpeechSeq2Seq whose audio is as long as it is: Wang et al.,
"fairseq S2T: Fast Speech-to-Text Modeling with fairseq" (2020), and the many built like it. What
the decoder attends to is what the module's own forward gives it (`decoder_memory`), and its tokens
and positions reach it as they do in transformers, through its own tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import EngineError, ModelLoadError
from aioengine.models.encdec.decoder_memory import memory_of, shapes_and_masks
from aioengine.models.encdec.hearing import HearingDummyInputs, HearingInfo, HearingProcessor
from aioengine.models.encdec.text import TextToText
from aioengine.models.runtime.probe import NUM_PROBE_ROWS, NUM_PROBE_TOKENS, LayerSpec
from aioengine.models.runtime.registry import find_class
from aioengine.models.runtime.whole_pass import run_head
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["SpeechToText"]


class _Given:
    """Forward of a decoder's table of tokens: the step's embeddings, while there are any."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.embeds: Tensor | None = None

    def __call__(self, input_ids: Tensor) -> Tensor:
        if self.embeds is not None:
            return self.embeds[None]
        found: Tensor = type(self._table).forward(self._table, input_ids)
        return found


class _MemoryPlaces(nn.Module):
    """Rows of a table [places, dim] for what cross-attention reads in a step: of each item anew."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table.weight
        self.lengths: Sequence[int] = (1,)

    @property
    def num_places(self) -> int:
        """Rows of the longest item."""
        return len(self.table)

    def forward(self, _places: Tensor) -> Tensor:
        return torch.cat([self.table[:length] for length in self.lengths])


@MULTIMODAL_REGISTRY.register_processor(
    HearingProcessor, info=HearingInfo, dummy_inputs=HearingDummyInputs
)
class SpeechToText(TextToText):
    """Audio of 64 seconds at most, which is encoded as long as it is; a decoder prompt beside it.

    The decoder is called with token ids, as decoders scale and place what they look up themselves.
    """

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        return find_class(hf_config)

    def decoder(self) -> nn.Module:
        """The module below all heads: a decoder may be a whole model with one of its own."""
        decoder: Any = self.model.get_decoder()
        while decoder.get_output_embeddings() is not None and decoder.get_decoder() is not decoder:
            decoder = decoder.get_decoder()
        found: nn.Module = decoder
        return found

    @property
    def max_position_embeddings(self) -> int | None:
        names = ("max_target_positions", "max_text_positions", "max_position_embeddings")
        found = (getattr(self.text_config, name, None) for name in names)
        return next((int(each) for each in found if each is not None), None)

    @cached_property
    def row_size(self) -> int:
        """Width of the states that the decoder takes; the encoder's own, or what these become."""
        decoder: Any = self.decoder()
        config = self.encoder().config
        widths = [getattr(config, name, None) for name in ("hidden_size", "d_model")]
        table = decoder.get_input_embeddings().weight
        for width in dict.fromkeys([*filter(None, widths), self.hidden_size]):
            memory = table.new_zeros(1, 1, width)
            try:
                with torch.no_grad(), shapes_and_masks() if table.is_meta else nullcontext():
                    self._call(decoder, 1, encoder_hidden_states=memory)
            except RuntimeError:  # shapes that do not go together
                continue
            return int(width)
        raise ModelLoadError(
            f"{type(decoder).__name__} takes states neither as wide as its encoder's nor as its "
            "own. Run this model with transformers"
        )

    # The decoder is run for the rows' width, which has to be before its attention is rerouted.

    def layers(self) -> tuple[LayerSpec, ...]:
        assert self.row_size
        return super().layers()

    def patch(self) -> None:
        assert self.row_size
        decoder: Any = self.decoder()
        self._memory_places = []
        for name in self._find_memory_tables(decoder):
            places = _MemoryPlaces(decoder.get_submodule(name))
            decoder.set_submodule(name, places)
            self._memory_places.append(places)
        self._check_memory(decoder)
        super().patch()

    def _find_memory_tables(self, decoder: Any) -> list[str]:
        """Find the tables by whose rows the decoder tells the rows that it attends to apart."""
        found = []

        def note(name: str, _module: nn.Module, args: Any) -> None:
            if args[0].shape[-1] == NUM_PROBE_ROWS:
                found.append(name)

        modules = {n: each for n, each in decoder.named_modules() if isinstance(each, nn.Embedding)}
        with ExitStack() as hooks:
            for name, module in modules.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
            self._run_on(decoder, torch.zeros(NUM_PROBE_ROWS, self.row_size))
        return found

    def _check_memory(self, decoder: Any) -> None:
        """Raise ModelLoadError where the decoder still tells equal rows of two items apart: a step
        gives it the rows of several."""
        given: list[Tensor] = []

        def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            given.extend(each for each in tensors if each.dim() == 3 and each.shape[1] == 2)

        row = torch.linspace(-1, 1, self.row_size)
        for places in self._memory_places:
            places.lengths = (1, 1)
        with ExitStack() as hooks:
            for spec in self.specs:
                if spec.kind == "cross":
                    layer = decoder.get_submodule(spec.name)
                    hooks.enter_context(layer.register_forward_pre_hook(note, with_kwargs=True))
            self._run_on(decoder, torch.stack([row, row]))
        if not given or not all(
            torch.allclose(each[0, 0], each[0, 1], rtol=1e-3) for each in given
        ):
            raise ModelLoadError(
                f"{type(decoder).__name__} tells the rows that it attends to apart by their "
                "places, which the engine cannot give it. Run this model with transformers"
            )

    def _run_on(self, decoder: Any, memory: Tensor) -> None:
        """Run the decoder on a few tokens and these rows, before its attention is rerouted."""
        weight = decoder.get_input_embeddings().weight
        with torch.no_grad():
            self._call(decoder, NUM_PROBE_TOKENS, encoder_hidden_states=memory.to(weight)[None])

    def memory(self, items: Sequence[Tensor]) -> Tensor:
        for places in self._memory_places:
            places.lengths = [len(each) for each in items] or [1]
        return super().memory(items)

    def encode_prompt(self, **kwargs: Any) -> Any:
        """Each item's rows [rows, dim] of those that count, or those that were given."""
        given = kwargs.get("audio_embeds")
        if given is not None:
            return [self._checked(rows) for rows in given]
        features = {name: each for name, each in kwargs.items() if name != "input_ids"}
        states, mask = memory_of(self.model, features)
        if mask is None:
            return [self._checked(rows) for rows in states]
        counts = mask.sum(1)
        places = torch.arange(mask.shape[1], device=mask.device)
        if not (mask == (places < counts[:, None])).all():
            raise EngineError("the encoder's mask leaves out other rows than the last ones")
        kept = zip(states, counts.tolist(), strict=True)
        return [self._checked(rows[:count]) for rows, count in kept]

    def _checked(self, rows: Tensor) -> Tensor:
        most = min((places.num_places for places in self._memory_places), default=len(rows))
        if len(rows) > most:
            raise EngineError(f"the decoder knows {most} rows, and these are {len(rows)}")
        return rows

    def run_decoder(
        self, decoder: nn.Module, embeds: Tensor, positions: Tensor, **others: Any
    ) -> Tensor:
        table: Any = decoder.get_input_embeddings()  # type: ignore[operator]
        given = self._given(table)
        given.embeds = embeds
        try:
            arguments = {**self.position_arguments(positions), **others}
            return self._call(decoder, len(embeds), **arguments)[0]
        finally:
            given.embeds = None

    def run_alone(self, decoder: Any, length: int) -> Any:
        weight = decoder.get_input_embeddings().weight
        memory = weight.new_zeros(1, 1, self.row_size)
        return self._call(decoder, length, encoder_hidden_states=memory)

    def run_plan(self, *_: Any) -> Tensor | None:
        """None: a plan knows nothing of what a decoder does before its layers."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        whole: Any = self.model.get_decoder()
        if whole is self.decoder():
            return super().logits(hidden)
        # A decoder with a head of its own, which may be more than one layer.
        return run_head(whole, self.decoder(), hidden)

    @staticmethod
    def _given(table: Any) -> _Given:
        found = vars(table).get("forward")
        if not isinstance(found, _Given):
            table.forward = found = _Given(table)
        return found

    @cached_property
    def _ids_name(self) -> str:
        decoder: Any = self.decoder()
        return next(iter(inspect.signature(decoder.forward).parameters))

    def _call(self, decoder: Any, num_tokens: int, **arguments: Any) -> Tensor:
        """The hidden states [1, T, hidden] of any tokens, or of what stands for embeddings."""
        table = decoder.get_input_embeddings()
        token_id = 1 if table.padding_idx == 0 else 0  # padding has no position
        ids = torch.full((1, num_tokens), token_id, device=table.weight.device)
        output = decoder(**{self._ids_name: ids}, use_cache=False, **arguments)
        hidden: Tensor = output.last_hidden_state
        return hidden
