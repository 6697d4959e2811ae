"""Speech to text: an encoder of what a feature extractor makes of audio, and a decoder of text.

Any of transformers' AutoModelForSpeechSeq2Seq whose audio is as long as it is: Wang et al.,
"fairseq S2T: Fast Speech-to-Text Modeling with fairseq" (2020), and the many built like it. What
the decoder attends to is what the module's own forward tells it (`hearing`), and its tokens and
positions reach it as they do in transformers, through its own tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import EngineError, InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.encdec.hearing import Staircase, find_staircase, hear, shapes_and_masks
from aioengine.models.encdec.text import TextToText
from aioengine.models.encdec.whisper import SpeechDummyInputs, SpeechInfo, SpeechMultiModalProcessor
from aioengine.models.runtime.probe import NUM_PROBE_ROWS, NUM_PROBE_TOKENS, LayerSpec
from aioengine.models.runtime.registry import find_class
from aioengine.processors.generic_info import notes_of
from aioengine.processors.info import ProcessorInputs
from aioengine.processors.inputs import MultiModalFieldConfig
from aioengine.processors.items import noise_clip
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["HearingInfo", "HearingProcessor", "SpeechToText"]

LONGEST_S = 64
"""Of the longest audio that a model is given, as Moonshine is; its config may know less."""
_LANGUAGES = "text_decoder_lang_to_code_id"
"""How generation configs call the tokens that a decoder's prompt has for languages."""


class HearingInfo(SpeechInfo):
    """Audio as long as it is."""

    @property
    def extractor(self) -> Any:
        """The HF feature extractor. Raises ModelLoadError where there is none."""
        processor = self.get_hf_processor()
        found = getattr(processor, "feature_extractor", processor)
        if not hasattr(found, "sampling_rate"):
            raise ModelLoadError(
                f"{self.model_id!r} has no feature extractor: {type(processor).__name__} takes no "
                "audio; put a preprocessor_config.json beside it that names one"
            )
        return found

    def get_sample_rate(self) -> int:
        return int(self.extractor.sampling_rate)

    def extract(self, samples: Any, **options: Any) -> dict[str, Tensor]:
        """The features [1, ...] of one audio item that the model's forward takes.

        As the HF processor calls its feature extractor: with the options that its class has.
        Raises whatever that raises, and ValueError where it makes several items of one.
        """
        of_class = getattr(type(self.get_hf_processor()), "audio_kwargs", None)
        defaults = of_class if isinstance(of_class, Mapping) else {}
        options = {**defaults, **options, "sampling_rate": self.get_sample_rate()}
        outputs = self.extractor([samples], **{**options, "return_tensors": "pt"})
        taken = inspect.signature(find_class(self.get_hf_config()).forward).parameters
        found = {
            name: each
            for name, each in outputs.items()
            if name in taken and isinstance(each, Tensor)
        }
        if not found or any(len(each) != 1 for each in found.values()):
            raise ValueError("the feature extractor cuts such long audio into pieces")
        return found

    def _extract_noise(self, num_samples: int) -> dict[str, Tensor]:
        return self.extract(noise_clip(num_samples, self.get_sample_rate()).samples)

    @property
    def staircase(self) -> Staircase:
        """Rows by samples, found once for a context and its clones. Raises ModelLoadError."""
        notes = notes_of(self.ctx)
        if ("staircase", "audio") not in notes:
            config, rate = self.get_hf_config(), self.get_sample_rate()
            notes["staircase", "audio"] = find_staircase(
                find_class(config), config, self._extract_noise, rate
            )
        found: Staircase = notes["staircase", "audio"]
        return found

    def get_num_audio_tokens(self, *, num_samples: int) -> int:
        return self.staircase.count(num_samples)

    def get_max_samples(self) -> int:
        notes = notes_of(self.ctx)
        if ("longest", "audio") not in notes:
            rate = self.get_sample_rate()
            most = self.staircase.most_samples(LONGEST_S * rate)
            if not self._takes(most):
                most = self._find_longest(most // rate) * rate
            notes["longest", "audio"] = most
        return int(notes["longest", "audio"])

    def _find_longest(self, too_many_s: int) -> int:
        """The most whole seconds that the feature extractor leaves in one piece."""
        fits_s = 1
        while too_many_s - fits_s > 1:
            middle = (fits_s + too_many_s) // 2
            if self._takes(middle * self.get_sample_rate()):
                fits_s = middle
            else:
                too_many_s = middle
        return fits_s

    def _takes(self, num_samples: int) -> bool:
        try:
            self._extract_noise(num_samples)
        except ValueError:
            return False
        return True


class HearingDummyInputs(SpeechDummyInputs):
    """Noise: where all is silent there is nothing that could be normalized."""

    info: HearingInfo

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        size = self.info.ctx.bound_sizes("audio", length=self.info.get_max_samples())
        clip = noise_clip(size["length"], self.info.get_sample_rate())
        clips = [clip] * mm_counts.get("audio", 0)
        return ProcessorInputs(prompt_text="", mm_data={"audio": clips})


class HearingProcessor(SpeechMultiModalProcessor):
    """The features of one audio item, with their mask where the feature extractor gives one."""

    info: HearingInfo

    def __init__(self, info: HearingInfo, dummy_inputs: HearingDummyInputs) -> None:
        super().__init__(info, dummy_inputs)
        notes = notes_of(info.ctx)
        if ("checked", type(self)) not in notes:
            self._check_against_hf()
            notes["checked", type(self)] = True
            assert info.get_max_samples()  # found once, and refused here if it cannot be

    def create_transcription_prompt(self, language: str | None, context: str) -> list[int]:
        """See `SupportsTranscription`. The language is a token, if the generation config has
        these."""
        known = getattr(self.info.ctx.generation_config, _LANGUAGES, None) or {}
        if language is None or context or not known:
            return super().create_transcription_prompt(language, context)
        if language not in known:
            raise InvalidRequestError(
                f"the model does not know the language {language!r:.40}; it has "
                f"{', '.join(sorted(known)[:9])} ...",
                parameter="language",
            )
        return self.decoder_prompt([int(known[language])])

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        audio, most = mm_data["audio"], self.info.get_max_samples()
        assert isinstance(audio, list)
        options = {name: value for name, value in mm_kwargs.items() if name != "truncation"}
        each = [self.info.extract(samples[:most], **options) for samples in audio]
        found = {name: [one[name][0] for one in each] for name in each[0]}
        if not all(torch.isfinite(value).all() for values in found.values() for value in values):
            raise MediaError(
                "the feature extractor makes no numbers of the audio: it is silent, or too short",
                parameter="audio",
            )
        return found

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {name: MultiModalFieldConfig.batched("audio") for name in hf_inputs}

    def _check_against_hf(self) -> None:
        """Raise ModelLoadError where HF's processor makes other features of audio."""
        from transformers.processing_utils import ProcessorMixin

        processor, rate = self.info.get_hf_processor(), self.info.get_sample_rate()
        if not isinstance(processor, ProcessorMixin):
            return  # it is the feature extractor
        samples = noise_clip(rate, rate).samples
        mine = self.info.extract(samples)
        given = {"audio": samples, "sampling_rate": rate, "return_tensors": "pt"}
        call = type(processor).__call__
        try:
            try:
                inspect.signature(call).bind(processor, **given)
            except TypeError:  # it wants to know what to write as well
                call = ProcessorMixin.__call__
            theirs = call(processor, **given)
        # Whatever it raises, what it does to audio is not known.
        except Exception as error:
            raise ModelLoadError(
                f"{type(processor).__name__} failed on a second of audio: {error!s:.200}"
            ) from error
        if not all(torch.equal(value, theirs[name]) for name, value in mine.items()):
            raise ModelLoadError(
                f"{type(processor).__name__} makes other features of audio than its feature "
                "extractor. Run this model with transformers"
            )


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
        states, mask = hear(self.model, **features)
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
        hidden: Tensor = decoder(
            **{self._ids_name: ids}, use_cache=False, **arguments
        ).last_hidden_state
        return hidden
