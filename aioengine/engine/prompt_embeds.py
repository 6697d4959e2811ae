"""Prompts given as embeddings, in place of text or token ids.

They are items of a modality of their own, whose rows are there already and whose places cover the
whole prompt. So chunks, prefix caching, preemption and several completions are as with media.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from aioengine.core.request import Item
from aioengine.engine.loading.loader import Loaded
from aioengine.errors import InvalidRequestError, PromptTooLongError
from aioengine.execution.model_runner import PROMPT_ROWS
from aioengine.media_pipeline.items import EncoderInput, IdentifiedMedia, ProcessorOptions
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.cache.hasher import ContentHasher, item_key
from aioengine.processors.embeddings import check_array, check_rows
from aioengine.processors.encdec import EncDecMultiModalProcessor
from aioengine.types import Span

__all__ = ["read_embeds"]

PIECE_ROWS = 256
"""Of one item. The encoder cache holds those that a step needs, and drops them afterwards."""


def read_embeds(
    given: Any, loaded: Loaded, cache_salt: str | None
) -> tuple[tuple[int, ...], list[Item], tuple[IdentifiedMedia, ...]]:
    """Token ids that stand for the rows, and the items of these, for the core and the encoder.

    `given` is copied. Raises InvalidRequestError for what the model, or nobody, can take.
    """
    _check_model(loaded)
    model, most = loaded.runner.model, loaded.limits.max_model_len
    check_array(given, "prompt")
    if given.ndim == 2 and len(given) > most:
        message = f"prompt has {len(given)} embeddings, more than max_model_len ({most})"
        raise PromptTooLongError(message, parameter="prompt", value=len(given))
    rows = check_rows(given, model.row_size, "prompt", dtype=model.dtype).clone()
    items: list[Item] = []
    media: list[IdentifiedMedia] = []
    for start, end in pairwise([*range(0, len(rows), PIECE_ROWS), len(rows)]):
        hasher = ContentHasher("prompt embeddings")
        hasher.update(rows[start:end])
        key = item_key(
            model_id=loaded.layout_processor.info.model_id,
            modality=PROMPT_ROWS,
            options=b"",
            identity=hasher.digest(),
            cache_salt=cache_salt,
        )
        num_rows = end - start
        items.append(
            Item(key, PROMPT_ROWS, Span(start, num_rows), num_rows * loaded.row_bytes, "prompt")
        )
        source = EncoderInput({"rows": rows[start:end]}, ())
        no_options = ProcessorOptions()
        media.append(
            IdentifiedMedia(PROMPT_ROWS, len(media), "prompt", key, None, source, no_options)
        )
    return (_neutral_id(loaded),) * len(rows), items, tuple(media)


def _check_model(loaded: Loaded) -> None:
    model, reason = loaded.runner.model, None
    if isinstance(loaded.layout_processor, EncDecMultiModalProcessor):
        reason = "an encoder-decoder model takes none"
    elif not _is_plain(model):
        reason = "the model reads more of a token than its embedding"
    elif not loaded.limits.encoder_cache_bytes:
        num_bytes = loaded.limits.max_model_len * loaded.row_bytes
        reason = (
            "their room is the encoder cache, which a model without media has only if "
            f"encoder_cache_bytes says so ({num_bytes} hold the longest prompt)"
        )
    if reason is not None:
        message = f"prompt cannot be made of embeddings: {reason}"
        raise InvalidRequestError(message, parameter="prompt")


def _is_plain(model: TransformersModel) -> bool:
    """Return whether all that is read of a token is its row of the embedding table.

    A prompt's rows are then what transformers takes as `inputs_embeds`.
    """
    reads_rows = type(model).embed is TransformersModel.embed
    has_older = getattr(model, "get_input_embeddings", None) is not None
    width = model.model.get_input_embeddings().weight.shape[-1]
    return reads_rows and not has_older and bool(width == model.row_size)


def _neutral_id(loaded: Loaded) -> int:
    """The first token id that means nothing but letters, to no tokenizer and no model."""
    tokenizer = loaded.layout_processor.info.get_tokenizer()
    special: Sequence[int] = [*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids]
    padding = getattr(loaded.runner.model, "padding_id", None)
    found = range(loaded.num_embeddings)
    return next(each for each in found if each not in special and each != padding)
