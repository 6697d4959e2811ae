"""What the encoder of an encoder-decoder model reads: token ids, and features of media among them.

It is one item to the scheduler and one entry of the encoder cache, whatever it is made of.
"""

from __future__ import annotations

import torch

from aioengine.engine.request_state import EncoderInput, MediaInput, RequestState
from aioengine.processors.cache.hasher import item_key
from aioengine.processors.encdec import EncDecLayout

__all__ = ["encoder_input"]


def encoder_input(
    state: RequestState, layout: EncDecLayout, model_id: str, parameter: str, cache_salt: str | None
) -> MediaInput:
    """The item that stands for all that the request's encoder reads.

    Its features are `input_ids` int64 [rows] and those of the media. `parameter`: what the caller
    calls the text.
    """
    media = tuple(state.media)
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
        options=state.options_digest,
        identity=identity,
        cache_salt=cache_salt,
    )
    return MediaInput(
        modality,
        0,
        None,
        media[0].parameter if media else parameter,
        True,
        source=EncoderInput({"input_ids": token_ids}, media),
        key=key,
    )
