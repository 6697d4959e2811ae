"""Audio of any length: its features, and the number of its rows, asked of HF's own module.

Prompts are laid out before audio is decoded, so that the number of rows has to follow from that of
samples. Convolutions, windows and padding to a multiple all round a quotient, and such roundings of
roundings are one: from some length on there is one row more every so many samples. Both numbers are
found on a module without weights, and a model that does otherwise anywhere it is tried is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.encdec.decoder_memory import memory_of, shapes_and_masks
from aioengine.models.encdec.whisper import SpeechDummyInputs, SpeechInfo, SpeechMultiModalProcessor
from aioengine.models.runtime.hf_loading import build_on_meta
from aioengine.models.runtime.registry import find_class
from aioengine.models.runtime.whole_pass import spare_layers, without_layers
from aioengine.processors.generic_info import notes_of
from aioengine.processors.info import ProcessorInputs
from aioengine.processors.inputs import MultiModalFieldConfig
from aioengine.processors.items import noise_clip

__all__ = [
    "HearingDummyInputs",
    "HearingInfo",
    "HearingProcessor",
    "Staircase",
    "find_staircase",
]

LONGEST_S = 64
"""Of the longest audio that a model is given, as Moonshine is; its config may know less."""
_LANGUAGES = "text_decoder_lang_to_code_id"
"""How generation configs call the tokens that a decoder's prompt has for languages."""
_LIMITS = ("max_source_positions", "max_speech_positions", "max_position_embeddings")
"""How configs of encoders call the rows that there may be at most."""


@dataclass(frozen=True, slots=True)
class Staircase:
    """Rows by samples: one at `first` samples, and one more with every further `step`.

    `most_rows`: the most that the encoder's config knows; None where it says nothing.
    """

    first: int
    step: int
    most_rows: int | None = None

    def count(self, num_samples: int) -> int:
        """Rows of so many samples; 0 if too few."""
        return max(0, (num_samples - self.first) // self.step + 1)

    def most_samples(self, limit: int) -> int:
        """The longest audio of `limit` samples at most that makes no more than `most_rows`."""
        if self.most_rows is None:
            return limit
        return min(limit, self.first + self.most_rows * self.step - 1)


def find_staircase(
    model_class: Any, hf_config: Any, extract: Callable[[int], Mapping[str, Tensor]], rate: int
) -> Staircase:
    """Rows of audio by its samples. `extract`: features of so many samples at `rate` Hz.

    Raises ModelLoadError where they do not rise evenly.
    """
    model = build_on_meta(model_class, hf_config)
    count = _Counter(model, extract)
    try:
        found = _find_steps(count, rate, _most_rows(model))
    # Whatever extractors and modules raise that want something else.
    except Exception as error:
        raise ModelLoadError(
            f"the encoder of {model_class.__name__} does not say how many rows it makes of audio: "
            f"{type(error).__name__}: {error!s:.200}"
        ) from error
    if found is None:
        raise ModelLoadError(
            f"the rows that the encoder of {model_class.__name__} makes of audio do not rise "
            "evenly with its length"
        )
    return found


class _Counter:
    """Rows of so many samples, of a module on the meta device."""

    def __init__(self, model: Any, extract: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._model = model
        self._extract = extract
        self._dtype = next(model.parameters()).dtype
        self._spared = spare_layers(model, {})
        self._known: dict[Hashable, int] = {}

    def __call__(self, num_samples: int) -> int:
        features = self._extract(num_samples)
        # Numbers of samples that make as many frames are one case.
        key = tuple(
            (name, each.shape, None if each.is_floating_point() else each.numpy().tobytes())
            for name, each in features.items()
        )
        if key not in self._known:
            self._known[key] = self._count(features)
        return self._known[key]

    @torch.no_grad()
    def _count(self, features: Mapping[str, Tensor]) -> int:
        given = {
            name: each.to("meta", self._dtype) if each.is_floating_point() else each
            for name, each in features.items()
        }
        with without_layers(self._model, self._spared), shapes_and_masks():
            states, mask = memory_of(self._model, given)
        return states.shape[1] if mask is None else int(mask.sum())


def _find_steps(count: Callable[[int], int], rate: int, most_rows: int | None) -> Staircase | None:
    """The staircase, if it is one wherever it is tried."""
    rows, longer = count(rate), count(8 * rate)
    if not 0 < rows < longer - 1:
        return None
    # Between so many ends of steps lies one step less than there are, and less than one more.
    steps = longer - rows
    least, most = 7 * rate // (steps + 1) - 1, -(-7 * rate // (steps - 1))
    end = _first(lambda length: count(length) > rows, rate, rate + most)
    step = _first(lambda size: count(end + size) > rows + 1, least, most)
    found = Staircase(end - rows * step, step, most_rows)
    tried = [found.first + step - 1, found.first + step, *(end + n * step // 3 for n in range(7))]
    is_even = all(count(each) == found.count(each) for each in tried if each > 0)
    return found if is_even and longer == found.count(8 * rate) else None


def _first(is_enough: Callable[[int], bool], too_few: int, enough: int) -> int:
    """The least number that is enough, between one that is not and one that is."""
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _most_rows(model: Any) -> int | None:
    config = model.get_encoder().config
    # A config of the whole says by its last name how long the decoder's sequences are.
    names = _LIMITS[:-1] if config is model.config else _LIMITS
    return next((int(config.to_dict()[name]) for name in names if hasattr(config, name)), None)


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
        if context:
            raise InvalidRequestError(
                "the model's decoder has no place for what was said before", parameter="prompt"
            )
        if language is None:
            return self.default_decoder_prompt()
        known = getattr(self.info.ctx.generation_config, _LANGUAGES, None) or {}
        if language not in known:
            raise InvalidRequestError(
                f"the generation config has no token for the language {language!r:.40} "
                f"({_LANGUAGES}); give the decoder's token ids as the prompt",
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
