"""Engine and media options: frozen, keyword-only, checked on construction, never rewritten.

Names and defaults are vLLM's where the meaning is the same. What an engine resolves from these
(block counts, byte sizes, the dtype) lives in its own object, not here.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from aioengine.errors import (
    Checks,
    ints,
    is_int,
    is_real,
    optional,
    require,
    require_fields,
    with_known_names,
)

__all__ = ["EngineConfig", "MediaConfig"]

MIB = 1 << 20
DEVICE = re.compile(r"auto|cpu(:0)?|cuda(:[0-9]{1,4})?")
HOST = re.compile(r"(\*|(\*\.)?[^\s*:/@\[\]\\]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?")


def _are_texts(value: Any) -> bool:
    is_list = isinstance(value, Collection) and not isinstance(value, str)
    return is_list and all(isinstance(entry, str) for entry in value)


def _is_positive(value: Any) -> bool:
    return is_real(value) and value > 0


CHECKS_BY_TYPE = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (ints(1), "a positive integer"),
    "int | None": (optional(ints(1)), "a positive integer or None"),
    "float": (_is_positive, "a positive number of seconds"),
    "tuple[str, ...]": (_are_texts, "a tuple of texts"),
}
"""What a field of such a type must be, where no other check is named for it."""
BYTES = "a positive number of bytes, such as 4 << 30 (4 GiB),"
MEDIA_CHECKS = {
    "video_num_frames": (optional(ints(1)), "a positive integer or None"),
    "video_fps": (optional(_is_positive), "a positive number or None"),
}


def _check_fields(config: Any, base: type[Any], own: Checks, prefix: str = "") -> None:
    """Check the fields that `base` has; those of a subclass are its own business."""
    kinds = {each.name: each.type for each in fields(base)}
    checks = {name: CHECKS_BY_TYPE[kind] for name, kind in kinds.items() if kind in CHECKS_BY_TYPE}
    for name in filter(lambda name: name.endswith("_bytes"), checks):
        is_fit, rule = checks[name]
        checks[name] = is_fit, rule.replace("a positive integer", BYTES).rstrip(",")
    require_fields(config, {**checks, **own}, prefix)


@with_known_names("MediaConfig has no option {}", prefix="media.")
@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Limits on images, audio and videos, all checked before anything is decoded."""

    max_image_pixels: int = 64_000_000
    """Width times height of one image."""
    max_image_bytes: int = 64 * MIB
    """Encoded size of one image."""
    image_formats: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    """Pillow format names that may be decoded."""
    max_audio_bytes: int = 64 * MIB
    """Encoded size of one audio item."""
    max_audio_s: float = 1800.0
    """Length of one audio item, in seconds."""
    audio_formats: tuple[str, ...] = ("WAV", "FLAC", "OGG", "MP3")
    """libsndfile's names of the formats that may be decoded."""
    max_video_bytes: int = 512 * MIB
    """Encoded size of one video."""
    max_video_s: float = 3600.0
    """Length of one video, in seconds."""
    max_video_frames: int = 512
    """Frames that may be taken of one video."""
    max_video_pixels: int = 300_000_000
    """Width times height times frames that are taken of one video."""
    video_formats: tuple[str, ...] = ("mp4", "matroska", "avi")
    """FFmpeg's names of the containers that may be decoded ("mp4" is MOV too, "matroska" WebM)."""
    video_num_frames: int | None = 32
    """Frames taken of a video at equal distances; all, if it has fewer."""
    video_fps: float | None = None
    """Frames taken of each second, in place of `video_num_frames`."""
    local_roots: tuple[str | Path, ...] = ()
    """Folders that `file:` URLs may point into; a path given by the application is not limited."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that http(s) URLs may name ("*": any). Their addresses must be public."""
    fetcher: Callable[[str], Awaitable[bytes]] | None = None
    """Called with an http(s) URL, returns the body, in place of the engine's own client. It may
    raise MediaError, or MediaUnavailableError for what may be there later."""
    fetch_timeout_s: float = 30.0
    """How long one fetch may take."""
    max_concurrent_fetches: int = 16
    """Fetches under way at once; the others wait."""

    def __post_init__(self) -> None:
        _check_fields(self, MediaConfig, MEDIA_CHECKS, "media.")
        rule = "a host, *.host or *, with a port or without"
        for host in self.allowed_hosts:
            require(HOST.fullmatch(host) is not None, "media.allowed_hosts", host, rule)

    def max_bytes(self, modality: str) -> int:
        """Encoded size of one item of the modality: "image", "audio" or "video"."""
        limit: int = getattr(self, f"max_{modality}_bytes")
        return limit


MM_OPTIONS = {
    "image": ("count", "width", "height"),
    "audio": ("count", "length"),
    "video": ("count", "num_frames", "width", "height"),
}


def one_of(*names: str | None) -> Callable[[Any], bool]:
    """Make a check for one of some names: not for an array, say, that compares with them."""
    return lambda value: (value is None or isinstance(value, str)) and value in names


def _is_device(value: Any) -> bool:
    return isinstance(value, str) and DEVICE.fullmatch(value) is not None


DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")
CHECKS = {
    "device": (_is_device, '"auto", "cpu", "cuda" or "cuda:N"'),
    "dtype": (one_of(*DTYPES), f"one of {', '.join(DTYPES)}"),
    "gpu_memory_utilization": (
        lambda value: is_real(value) and 0 < value <= 1,
        "a number above 0 and at most 1",
    ),
    "media": (lambda value: isinstance(value, MediaConfig), "a MediaConfig"),
    "mm_processor_cache_bytes": (ints(0), f"0 or {BYTES.rstrip(',')}"),
    "mm_processor_cache_dir_bytes": (ints(0), f"0 or {BYTES.rstrip(',')}"),
    "attention_backend": (lambda value: isinstance(value, str), "a name, or auto"),
    "model_impl": (one_of("auto", "native", "transformers"), '"auto", "native" or "transformers"'),
    "thread_niceness": (ints(0, 19), "an integer from 0 to 19"),
    "quantization": (one_of("int8", "int4", None), '"int8", "int4" or None'),
    "kv_cache_dtype": (one_of("auto", "int8"), '"auto" or "int8"'),
    "tensor_parallel_size": (lambda value: value == 1, "1 (nothing else is built)"),
    "mm_encoder_tp_mode": (lambda value: value == "tensor", '"tensor" (nothing else is built)'),
}


MEDIA_OPTIONS = {"MediaConfig: media=MediaConfig({}=...)": MediaConfig.__dataclass_fields__}
"""Names that EngineConfig does not know, and where they go."""


@with_known_names("EngineConfig has no option {}", MEDIA_OPTIONS)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes left at None are resolved when the engine starts."""

    dtype: str = "auto"
    """Of weights: "auto" (the checkpoint's), "float64" (parity), "float32", ..."""
    device: str = "auto"
    """"auto", "cpu" or "cuda[:N]"."""
    revision: str | None = None
    """Of a hub checkpoint."""
    trust_remote_code: bool = False
    """Let a checkpoint's own Python run."""
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
    """Keep full KV blocks and share them between requests. The completions of one request share
    those of their prompt in any case."""
    encoder_cache_bytes: int | None = None
    """Bytes for encoder outputs on the device; None: room for the items of one large step."""
    max_num_encoder_input_tokens: int | None = None
    """Encoder rows in one encoder batch; raised to the largest item if it is smaller."""
    disable_chunked_mm_input: bool = False
    """Never end a chunk inside a media item."""
    limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] = field(default_factory=dict)
    """Modality -> items allowed in one prompt, or a mapping with `count` and the size that memory
    is reserved for: {"image": {"count": 2, "width": 512, "height": 512}}. A video has
    "num_frames" too, audio "length" in samples."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments for the HF processor."""
    mm_processor_cache_bytes: int = 256 * MIB
    """Bytes of processed media kept in memory; 0 keeps none."""
    mm_processor_cache_dir: str | Path | None = None
    """A folder where processed media are kept beyond memory, and beyond the process."""
    mm_processor_cache_dir_bytes: int = 4096 * MIB
    """Bytes of processed media kept there."""
    processor_workers: str = "thread:2"
    """Workers that decode and process media: "thread:N" or "process:N"."""
    media: MediaConfig = field(default_factory=MediaConfig)
    """Limits, allow-lists and the fetcher."""
    max_queued_requests: int | None = None
    """Completions that may be live beyond `max_num_seqs`; more raise OverloadedError."""
    attention_backend: str = "auto"
    """"auto" (the fastest here), "cpu" (C++), "triton" (for GPUs), "gather" (plain PyTorch),
    "reference" or your own."""
    enforce_eager: bool = False
    """On a GPU, launch each kernel of a step by itself, instead of replaying captured steps."""
    packed_layers: bool = True
    """Lay weights out for the CPU's kernels, and drop encoder layers that nothing reads."""
    model_impl: str = "auto"
    """"native": an architecture's own class here; "transformers": transformers' module with what
    fits all of its kind; "auto": the first, or else the second."""
    check_model: bool = True
    """Compare a freshly loaded model with its own module in a short trial. A verdict is kept for
    the same settings and versions."""
    quantization: str | None = None
    """"int8" or "int4": the decoder's weights in so many bits, on a CPU; implies packed_layers."""
    quantize_activations: bool = True
    """Round to 8 bits what is multiplied with quantized weights; False is slower and more exact."""
    kv_cache_dtype: str = "auto"
    """Of keys and values: "auto" (`dtype`), or "int8": in half the bytes of 16 bits, less exact."""
    thread_niceness: int = 0
    """Added to the niceness of threads that decode and compute, on Linux: 0 to 19."""
    tensor_parallel_size: int = 1
    """Only 1 is built."""
    mm_encoder_tp_mode: str = "tensor"
    """Only "tensor" is built."""

    def __post_init__(self) -> None:
        _check_fields(self, EngineConfig, CHECKS)
        folder = self.mm_processor_cache_dir
        is_folder = isinstance(folder, str | Path | None)
        require(is_folder, "mm_processor_cache_dir", type(folder), "a path or None")
        self._check_mm_limits()
        rule = '"thread:N" or "process:N" with N >= 1'
        require(self.num_processor_workers > 0, "processor_workers", self.processor_workers, rule)

    def _check_mm_limits(self) -> None:
        name, limits = "limit_mm_per_prompt", self.limit_mm_per_prompt
        known = ", ".join(MM_OPTIONS)
        require(isinstance(limits, Mapping), name, limits, f"a mapping from {known}")
        for modality, limit in limits.items():
            require(modality in MM_OPTIONS, name, modality, f"keyed by {known}")
            options = limit if isinstance(limit, Mapping) else {"count": limit}
            names = MM_OPTIONS[modality]
            rule = f"a count, or a mapping from {', '.join(names)}"
            for option, value in options.items():
                require(option in names, f"{name}[{modality!r}]", option, rule)
                place = f"{name}[{modality!r}]" + f"[{option!r}]" * (options is limit)
                least = 0 if option == "count" else 1
                is_fit = is_int(value) and value >= least
                require(is_fit, place, value, rule if options is not limit else f">= {least}")

    @property
    def num_processor_workers(self) -> int:
        """N of `processor_workers`; 0 if it has another form."""
        kind, _, count = str(self.processor_workers).partition(":")
        is_known = kind in ("thread", "process") and count.isascii() and count.isdecimal()
        return int(count) if is_known else 0

    @property
    def uses_processes(self) -> bool:
        """Return whether media are decoded and processed in processes of their own."""
        return self.processor_workers.startswith("process:")
