"""Input of an encoder-decoder model's encoder: token ids, and features of media among them.

It is one item to the scheduler and one entry of the encoder cache, whatever it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aioengine.media_pipeline.items import EncoderInput, IdentifiedMedia, ProcessorOptions
from aioengine.processors.cache.hasher import item_key
from aioengine.processors.encdec import EncDecLayout

__all__ = ["encoder_input"]


def encoder_input(
    media: Sequence[IdentifiedMedia],
    layout: EncDecLayout,
    options: ProcessorOptions,
    *,
    model_id: str,
    parameter: str,
    cache_salt: str | None,
) -> IdentifiedMedia:
    """The item that stands for all that a request's encoder reads: text, and `media` in it.

    Its features are `input_ids` int64 [rows] and those of the media. `parameter`: what the caller
    calls the text.
    """
    token_ids = torch.tensor(layout.token_ids, dtype=torch.int64)
    modality = media[0].modality if media else "text"
    places = [layout.placeholders[each.modality][each.index].to_span() for each in media]
    identity = [
        token_ids.numpy().tobytes(),
        [[each.key, place.offset, place.length] for each, place in zip(media, places, strict=True)],
    ]
    key = item_key(
        model_id=model_id,
        modality=f"encoder {modality}",
        options=options.digest,
        identity=identity,
        cache_salt=cache_salt,
    )
    return IdentifiedMedia(
        modality,
        0,
        media[0].parameter if media else parameter,
        key,
        None,
        EncoderInput({"input_ids": token_ids}, tuple(media)),
        options,
    )
