"""What pictures, recordings and videos have in common before they are decoded."""

from __future__ import annotations

from typing import Any, Protocol

from aioengine.processors.items import AudioHeader, ImageHeader, VideoHeader

__all__ = ["MediaSource"]


class MediaSource(Protocol):
    """One media item of a request. Every failure is a MediaError without anything of the data."""

    @property
    def may_change(self) -> bool:
        """Whether it is an object of the caller's, of which the engine holds no copy."""
        ...

    def header(self) -> ImageHeader | AudioHeader | VideoHeader:
        """What the layout needs, without decoding where the format tells; checked against limits.

        The decoded item is exactly as the header says.
        """
        ...

    def identity(self) -> Any:
        """What is equal for equal items only; `item_key` hashes it."""
        ...

    def decode(self) -> Any:
        """The decoded item: a picture of Pillow's, an `AudioClip` or a `VideoClip`."""
        ...

    def verify(self) -> None:
        """Raise MediaError if the item is not what `identity` saw; called after processing."""
        ...
