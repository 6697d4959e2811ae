"""One media item of a request at each stage: as its caller gave it, then with its content known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine.processors.cache.memory import Lease

__all__ = ["EncoderInput", "IdentifiedMedia", "MediaInput", "MediaOwner", "ProcessorOptions"]


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """A request's options for the HF processor; `digest`: of these and the engine's together."""

    mm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class MediaOwner:
    """The request whose media are identified; its `lease` holds features until it ends."""

    request_id: str
    options: ProcessorOptions
    lease: Lease
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A media item as its caller gave it.

    `index` counts within the modality; `parameter`: its name in the caller's words; `trusted`:
    whether local paths may be read.
    """

    modality: str
    index: int
    item: Any
    parameter: str
    trusted: bool
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class IdentifiedMedia:
    """A media item whose content is known, and which can be decoded and processed.

    `key`: its identity, with the options; `header`: what the layout reads of it; `source`: a
    `MediaSource`, `Embeddings` or `EncoderInput`, None where the features are held and nothing
    could make them again.
    """

    modality: str
    index: int
    parameter: str
    key: str
    header: Any
    source: Any
    options: ProcessorOptions

    @property
    def may_change(self) -> bool:
        """Return whether it is an object of the caller's own, which may be broken meanwhile."""
        return bool(getattr(self.source, "may_change", False))


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Input of an encoder for cross-attention: features of its own, and those of media.

    `are_apart`: these are a list of each medium's, `media`, and not among the others.
    """

    features: Mapping[str, Any]
    media: tuple[IdentifiedMedia, ...]
    are_apart: bool = False

    @property
    def may_change(self) -> bool:
        """Return whether that is so of a medium in it."""
        return any(media.may_change for media in self.media)
