"""What a caller can set: frozen, keyword-only, checked on construction, never rewritten.

Names and defaults are vLLM's where the meaning is the same. What an engine resolves from these
(block counts, byte sizes, the dtype) lives in its own object, not here.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from aioengine.errors import InvalidRequestError

__all__ = ["EngineConfig", "MediaConfig", "SamplingParams"]

MIB = 1 << 20


def _require(condition: bool, parameter: str, value: object, rule: str) -> None:
    if not condition:
        raise InvalidRequestError(
            f"{parameter} must be {rule}, not {value!r:.80}", parameter=parameter, value=value
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Limits on media, which are hostile until decoded. All are checked before decoding."""

    max_image_pixels: int = 64_000_000
    """Width times height of one picture."""
    max_image_bytes: int = 64 * MIB
    """Encoded size of one picture."""
    image_formats: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    """Pillow format names that may be decoded."""
    local_roots: tuple[str | Path, ...] = ()
    """Folders that `file:` URLs may point into; a path given by the application is not limited."""
    fetcher: Callable[[str], Awaitable[bytes]] | None = None
    """Called with an http(s) URL, returns the body; without one, such URLs are refused."""
    fetch_timeout_s: float = 30.0
    """How long one fetch may take."""

    def __post_init__(self) -> None:
        for name in ("max_image_pixels", "max_image_bytes"):
            value = getattr(self, name)
            _require(_is_int(value) and value > 0, f"media.{name}", value, "a positive integer")
        _require(
            _is_real(self.fetch_timeout_s) and self.fetch_timeout_s > 0,
            "media.fetch_timeout_s",
            self.fetch_timeout_s,
            "a positive number of seconds",
        )


DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Sizes left at None are resolved when the engine starts."""

    dtype: str = "auto"
    """Of weights and KV cache: "auto" (the checkpoint's), "float64" (parity), "float32", ..."""
    device: str = "auto"
    """"auto", "cpu" or "cuda[:N]"."""
    revision: str | None = None
    """Of a hub checkpoint."""
    trust_remote_code: bool = False
    """Whether a checkpoint's own Python may run."""
    max_model_len: int | None = None
    """Prompt plus output tokens of one request; None: the model's, or what the KV cache holds."""
    max_num_seqs: int = 64
    """Requests in one step."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step."""
    block_size: int = 32
    """Tokens in one KV block."""
    kv_cache_bytes: int | None = None
    """Bytes for KV blocks; None: a share of what is free."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that the engine may fill, weights included."""
    enable_prefix_caching: bool = True
    """Whether full KV blocks are kept and shared between requests."""
    encoder_cache_bytes: int | None = None
    """Bytes for encoder outputs on the device; None: room for the items of one large step."""
    max_num_encoder_input_tokens: int | None = None
    """Encoder rows in one encoder batch; raised to the largest item if it is smaller."""
    disable_chunked_mm_input: bool = False
    """Never end a chunk inside a media item."""
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    """Modality -> items allowed in one prompt."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments for the HF processor."""
    mm_processor_cache_bytes: int = 256 * MIB
    """Bytes of processed media kept in memory; 0 keeps none."""
    processor_workers: str = "thread:2"
    """Where media are decoded and processed: "thread:N"."""
    media: MediaConfig = field(default_factory=MediaConfig)
    """Limits, allow-lists and the fetcher."""
    max_queued_requests: int | None = None
    """Requests that may be live beyond `max_num_seqs`; one more raises OverloadedError."""
    tensor_parallel_size: int = 1
    """Only 1 is built."""
    mm_encoder_tp_mode: str = "tensor"
    """Only "tensor" is built."""

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            _require(_is_int(value) and value > 0, name, value, "a positive integer")
        for name in (
            "max_model_len",
            "kv_cache_bytes",
            "encoder_cache_bytes",
            "max_num_encoder_input_tokens",
            "max_queued_requests",
        ):
            value = getattr(self, name)
            _require(
                value is None or (_is_int(value) and value > 0), name, value, "positive or None"
            )
        share = self.gpu_memory_utilization
        _require(_is_real(share) and 0 < share <= 1, "gpu_memory_utilization", share, "in (0, 1]")
        size = self.mm_processor_cache_bytes
        _require(_is_int(size) and size >= 0, "mm_processor_cache_bytes", size, "0 or more")
        _require(
            self.tensor_parallel_size == 1,
            "tensor_parallel_size",
            self.tensor_parallel_size,
            "1 (nothing else is built)",
        )
        _require(
            self.mm_encoder_tp_mode == "tensor",
            "mm_encoder_tp_mode",
            self.mm_encoder_tp_mode,
            '"tensor" (nothing else is built)',
        )
        for modality, limit in self.limit_mm_per_prompt.items():
            _require(
                _is_int(limit) and limit >= 0, f"limit_mm_per_prompt[{modality!r}]", limit, ">= 0"
            )
        _require(
            self.num_processor_workers > 0,
            "processor_workers",
            self.processor_workers,
            '"thread:N" with N >= 1',
        )

    @property
    def num_processor_workers(self) -> int:
        """N of `processor_workers="thread:N"`; 0 if that is not its form."""
        kind, _, count = self.processor_workers.partition(":")
        return int(count) if kind == "thread" and count.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. vLLM's names and defaults."""

    n: int = 1
    """Completions of one prompt. Only 1 is built."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (nucleus sampling)."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has already. Not built yet."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the output has the token. Not built yet."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that prompt or output have already. Not built yet."""
    seed: int | None = None
    """The same seed gives the same tokens, alone or in company; None draws one."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; the one completed first wins."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the text."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the stop token, stays in the output text."""
    bad_words: Sequence[str] | None = None
    """Words that must not come. Not built yet."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """Output tokens at most; None: as many as the model's length allows."""
    min_tokens: int = 0
    """Output tokens before end-of-sequence and stop tokens may be chosen."""
    logprobs: int | None = None
    """Log probabilities of so many tokens at each position. Not built yet."""
    prompt_logprobs: int | None = None
    """The same for the prompt. Not built yet."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what is added to its logit. Not built yet."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may come. Not built yet."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False: token ids only, no text (and no stop strings)."""

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_lengths()
        self._check_stops()
        self._check_unbuilt()

    def _check_distribution(self) -> None:
        _require(
            _is_real(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "in [0, 100]",
        )
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "-1, 0 or positive")
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed",
            self.seed,
            "a 64-bit integer or None",
        )

    def _check_lengths(self) -> None:
        most = self.max_tokens
        _require(
            most is None or (_is_int(most) and most >= 1), "max_tokens", most, "positive or None"
        )
        _require(
            _is_int(self.min_tokens) and self.min_tokens >= 0,
            "min_tokens",
            self.min_tokens,
            "0 or more",
        )
        _require(
            most is None or self.min_tokens <= most,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({most})",
        )

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _require(
                value is None or isinstance(value, Sequence), name, value, "a sequence or None"
            )
        strings = self.stop_strings
        _require(
            len(strings) <= 64 and all(isinstance(s, str) and 0 < len(s) <= 1024 for s in strings),
            "stop",
            type(self.stop).__name__,
            "a string or up to 64 strings, each of 1 to 1024 characters",
        )
        _require(self.detokenize or not strings, "stop", "given", "absent when detokenize is False")
        ids = self.stop_token_ids or ()
        _require(
            len(ids) <= 1024 and all(_is_int(i) and i >= 0 for i in ids),
            "stop_token_ids",
            type(ids).__name__,
            "up to 1024 token ids",
        )

    def _check_unbuilt(self) -> None:
        # Part of the fixed names, but not built yet: better refused than silently ignored.
        defaults = {f.name: f.default for f in fields(self)}
        for name in _UNBUILT:
            value = getattr(self, name)
            _require(value == defaults[name], name, value, "left at its default: not built yet")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_UNBUILT = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
)
