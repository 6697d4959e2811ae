"""One door to the sources of all modalities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from aioengine.config import MediaConfig
from aioengine.errors import UnsupportedModalityError
from aioengine.processors.media.source import MediaSource

__all__ = ["load_readers", "open_media"]

_READERS = {
    "audio": ("aioengine.processors.media.audio", "soundfile", "soxr"),
    "video": ("aioengine.processors.media.video", "av"),
}


def load_readers(modalities: Iterable[str], config: MediaConfig) -> None:
    """Import what opens items of these modalities now, and not for the first one that comes.

    An import holds the GIL, and so the event loop, for tens of milliseconds. What is not installed
    is left out: an item that needs it will say so.
    """
    for modality in modalities:
        if modality == "image":
            from aioengine.processors.media.image import load_formats

            load_formats(config)
        for name in _READERS.get(modality, ()):
            with suppress(ImportError, OSError):  # OSError: the library behind it is missing
                import_module(name)


def open_media(
    modality: str,
    item: object,
    config: MediaConfig,
    *,
    parameter: str,
    options: Mapping[str, Any],
    get_sample_rate: Callable[[], int],
) -> MediaSource[Any, Any]:
    """The source for one item as the caller gave it, or as it was fetched. Reads headers only.

    `options`: the HF processor's, of which a video's sampling is read (`num_frames`, `fps`, flat or
    in `videos_kwargs`); `get_sample_rate`: in Hz, asked for audio. Raises MediaError.
    """
    if modality == "image":
        from aioengine.processors.media.image import open_image

        return open_image(item, config, parameter=parameter)
    if modality == "audio":
        from aioengine.processors.media.audio import open_audio

        return open_audio(item, config, parameter=parameter, sample_rate=get_sample_rate())
    if modality == "video":
        from aioengine.processors.media.video import open_video

        scoped = options.get("videos_kwargs")
        wanted = {**options, **(scoped if isinstance(scoped, Mapping) else {})}
        return open_video(
            item,
            config,
            parameter=parameter,
            num_frames=wanted.get("num_frames"),
            fps=wanted.get("fps"),
        )
    raise UnsupportedModalityError(
        f"{parameter}: {modality} items are not supported", parameter=parameter
    )
