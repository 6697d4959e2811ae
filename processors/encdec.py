"""Prompts of two halves: what the encoder reads, with its media, and what the decoder begins with.

Names and meaning as in vLLM's class of the same name. What a caller gives as the prompt is one of
the halves, by the family: text to text reads it, one that listens goes on from it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.processors.items import MultiModalDataItems
from aioengine.processors.processor import (
    BaseMultiModalProcessor,
    ItemsByModality,
    Layout,
    MultiModalInputs,
    TextOrTokens,
)
from aioengine.processors.text_only import TextOnlyProcessor

__all__ = [
    "EncDecLayout",
    "EncDecMultiModalProcessor",
    "EncDecTextProcessor",
    "EncoderPromptProcessor",
    "Halves",
    "MultiModalEncDecInputs",
    "forced_tokens",
    "half_name",
    "start_tokens",
]


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Halves that a caller has given: the prompt, and either half by name; None where nothing."""

    prompt: TextOrTokens | None = None
    encoder: TextOrTokens | None = None
    decoder: TextOrTokens | None = None


@dataclass(frozen=True, kw_only=True)
class EncDecLayout(Layout):
    """Both halves. `token_ids` and `placeholders` are the encoder's: as many tokens as the encoder
    gives rows."""

    decoder_token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class MultiModalEncDecInputs(MultiModalInputs):
    """The encoder's inputs, and the token ids that the decoder begins with.

    `token_ids` and `placeholders` are the encoder prompt's.
    """

    decoder_token_ids: list[int]


class EncDecMultiModalProcessor(BaseMultiModalProcessor):
    """A family whose decoder attends to an encoder, which reads the media and perhaps text.

    The encoder's prompt, expanded, has one token for each row that the encoder gives.
    """

    prompt_half: ClassVar[Literal["encoder", "decoder"]] = "encoder"
    """Which half a prompt is that is not called either."""

    @abstractmethod
    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        """Return what the encoder reads, placeholders not expanded: the caller's prompt, or a dummy
        token for each item where the encoder takes media only."""

    def create_decoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        """Return what the decoder begins with: here the caller's prompt."""
        return prompt

    @property
    def decoder_start_token_id(self) -> int | None:
        """The token that every decoder prompt begins with; None: none is put before it.

        The tokenizer's BOS where neither of the model's configs names one.
        """
        config = self.info.get_hf_config()
        text_config = config.get_text_config(decoder=True)
        start = _start_token(self.info.ctx.generation_config, config, text_config)
        return self._bos_token_id if start is None else start

    @property
    def _bos_token_id(self) -> int | None:
        found: int | None = getattr(self.info.get_tokenizer(), "bos_token_id", None)
        return found

    def default_decoder_prompt(self) -> list[int]:
        """Return what HF `generate` would start with, if the caller says nothing.

        It would with nothing where no config names a start token. Then the start token and BOS are
        the prompt, and the former is the latter: one BOS.
        """
        generation_config, hf_config = self.info.ctx.generation_config, self.info.get_hf_config()
        return start_tokens(generation_config, hf_config, self._bos_token_id)

    def layout_halves(
        self,
        halves: Halves,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: ItemsByModality | None = None,
    ) -> EncDecLayout:
        """Both prompts, the encoder's with its placeholders expanded, from headers alone.

        A half that is given by name wins over what is made of the prompt. Raises
        InvalidRequestError, also where the prompt would be the half that is given.
        """
        if halves.prompt is not None and getattr(halves, self.prompt_half) is not None:
            raise InvalidRequestError(
                f"the prompt is the {self.prompt_half}'s, which is given as "
                f"{self.prompt_half}_text or {self.prompt_half}_token_ids too; give one of them",
                parameter="prompt",
            )
        if halves == Halves(decoder=halves.decoder) and not items.get_all_counts():
            raise InvalidRequestError(
                "there is nothing for the encoder to read; give a prompt", parameter="prompt"
            )
        if self.prompt_half == "decoder" and halves.encoder is not None:
            raise InvalidRequestError(
                "the model's encoder reads media only; give the text as the prompt",
                parameter="encoder_text",
            )
        prompt: TextOrTokens = "" if halves.prompt is None else halves.prompt
        with _blaming("decoder", halves.decoder):
            decoder = halves.decoder
            if decoder is None:
                decoder = self.create_decoder_prompt(prompt, items)
            decoder_token_ids = self.decoder_prompt(decoder)
        with _blaming("encoder", halves.encoder):
            read = prompt if halves.encoder is None else halves.encoder
            encoder = self.create_encoder_prompt(read, items)
            layout = self.layout(encoder, items, mm_kwargs, outputs)
        return EncDecLayout(
            token_ids=layout.token_ids,
            placeholders=layout.placeholders,
            decoder_token_ids=decoder_token_ids,
        )

    def decoder_prompt(self, prompt: TextOrTokens) -> list[int]:
        """The decoder's token ids, with its start token before them where it is not there yet."""
        token_ids = (
            self.tokenize(prompt, add_special_tokens=False)
            if isinstance(prompt, str)
            else self._checked_ids(prompt)
        )
        start = self.decoder_start_token_id
        if start is None or self.has_start(token_ids, start):
            return token_ids
        return [start, *token_ids]

    def has_start(self, token_ids: Sequence[int], start: int) -> bool:
        """Return whether a decoder's prompt has its start token already."""
        return list(token_ids[:1]) == [start]

    def apply(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any] | None = None,
        decoder_prompt: TextOrTokens | None = None,
    ) -> MultiModalEncDecInputs:
        """Both halves. An explicit `decoder_prompt` wins over what is made of `prompt`."""
        read = self.create_encoder_prompt(prompt, items)
        encoder = super().apply(read, items, mm_kwargs)
        if decoder_prompt is None:
            decoder_prompt = self.create_decoder_prompt(prompt, items)
        decoder_token_ids = self.decoder_prompt(decoder_prompt)
        return MultiModalEncDecInputs(
            token_ids=encoder.token_ids,
            placeholders=encoder.placeholders,
            items=encoder.items,
            decoder_token_ids=decoder_token_ids,
        )


class EncoderPromptProcessor(EncDecMultiModalProcessor):
    """The prompt is what the encoder reads."""

    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        return prompt

    def create_decoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        return self.default_decoder_prompt()


class EncDecTextProcessor(EncoderPromptProcessor, TextOnlyProcessor):
    """Text to text."""


def half_name(half: str, given: TextOrTokens | None) -> str:
    """Name what a caller has given for a half; the prompt, if nothing by name."""
    if given is None:
        return "prompt"
    return f"{half}_text" if isinstance(given, str) else f"{half}_token_ids"


@contextmanager
def _blaming(half: str, given: TextOrTokens | None) -> Iterator[None]:
    """Report an error about the prompt in the block for the half that was given by name."""
    try:
        yield
    except InvalidRequestError as error:
        if given is None or error.parameter != "prompt":
            raise
        raise error.for_parameter(half_name(half, given)) from error


def start_tokens(
    generation_config: Any, hf_config: Any, bos_token_id: int | None = None
) -> list[int]:
    """Compute what a decoder's prompt begins with: the start token, then those that would be
    forced.

    `generation_config`: transformers', or None; `hf_config`: the model's; `bos_token_id`: the
    tokenizer's, the start token where neither has one. Raises ModelLoadError where there is none at
    all, and for what is no token id.
    """
    text_config = hf_config.get_text_config(decoder=True)
    start = _start_token(generation_config, hf_config, text_config)
    if start is None:
        start = bos_token_id
    if start is None:
        raise ModelLoadError(
            "neither generation_config.json nor config.json says with which token the decoder "
            "begins, and the tokenizer has no BOS; put decoder_start_token_id into "
            "generation_config.json"
        )
    known = [start, *forced_tokens(generation_config)]
    forced = getattr(generation_config, "forced_bos_token_id", None)
    if len(known) < 2 and forced is not None:
        known.append(_token_id("forced_bos_token_id", forced))
    return known


def forced_tokens(*configs: Any) -> list[int]:
    """Find what the first config with `forced_decoder_ids` puts behind the start token."""
    for config in configs:
        pairs = getattr(config, "forced_decoder_ids", None)
        if pairs:
            return [_token_id("forced_decoder_ids", each) for _, each in pairs if each is not None]
    return []


def _token_id(name: str, value: Any) -> int:
    """One token id, be it in a list of its own. Raises ModelLoadError."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ModelLoadError(f"{name} in the generation config must be one token id")


def _start_token(*configs: Any) -> int | None:
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in configs:
            found = getattr(config, name, None)
            if found is not None:
                return _token_id(name, found)
    return None
