"""Admission: refuse at once what can never be served, by its layout, and bound the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aioengine import errors
from aioengine.core.plan import Limits
from aioengine.core.request import Item, Request, StopRule
from aioengine.types import FinishReason, Span

__all__ = ["bounded_stop", "refuse_impossible", "whole_ranges"]


def whole_ranges(request: Request, limits: Limits) -> tuple[tuple[int, int], ...]:
    """List ranges that must not be cut: ranges that see each other both ways, and items, if so
    configured."""
    spans = [item.span for item in request.items] if limits.disable_chunked_mm_input else []
    num_prompt = len(request.prompt_token_ids)
    inside = [
        (s.offset, min(s.end, num_prompt)) for s in spans if not _covers(request.bidirectional, s)
    ]
    return tuple(sorted([*request.bidirectional, *inside]))


def _covers(ranges: Sequence[tuple[int, int]], span: Span) -> bool:
    return any(low <= span.offset and span.end <= high for low, high in ranges)


def bounded_stop(request: Request, limits: Limits) -> StopRule:
    """Return the request's stop rule, with no more tokens than there is room for, or rows."""
    room = limits.max_model_len - len(request.prompt_token_ids)
    stop = replace(request.stop, max_tokens=min(request.stop.max_tokens, room))
    num_rows = request.num_answer_rows
    if not 0 < num_rows <= stop.max_tokens:
        return stop
    # What a form wants more of was cut off.
    reason = FinishReason.LENGTH if request.has_form else FinishReason.STOP
    return replace(stop, max_tokens=num_rows, reason_at_most=reason)


def refuse_impossible(request: Request, limits: Limits) -> None:
    """Raise for a request that no sequence of steps could serve; its `whole_ranges` are set."""
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise errors.InvalidRequestError(
            "prompt has no tokens; give it at least one", parameter="prompt", value=0
        )
    samples = request.pooling is None
    if num_prompt + samples > limits.max_model_len:
        raise errors.PromptTooLongError(
            f"prompt has {num_prompt} tokens, media included, but max_model_len is "
            f"{limits.max_model_len}{' and one output token must fit too' if samples else ''}; "
            f"shorten the prompt or raise max_model_len (and kv_cache_bytes)",
            parameter="prompt",
            value=num_prompt,
        )
    if request.num_encoder_rows > limits.max_encoder_len:
        assert request.encoder is not None
        raise errors.PromptTooLongError(
            f"{request.encoder.name} is {request.num_encoder_rows} long for the encoder, which "
            f"takes {limits.max_encoder_len} at most; shorten it, or raise max_model_len if the "
            f"model sets no limit of its own",
            parameter=request.encoder.name,
            value=request.num_encoder_rows,
        )
    for item in request.all_items:
        _refuse_bytes([item], limits)
    for low, high in request.whole_ranges:
        if high - low > limits.max_num_batched_tokens:
            raise errors.PromptTooLongError(
                f"prompt positions {low} to {high} must be computed in one step, but "
                f"max_num_batched_tokens is {limits.max_num_batched_tokens}; raise it to "
                f"{high - low} or more",
                parameter="prompt",
                value=high - low,
            )
        inside = {i.key: i for i in request.items if low <= i.span.offset < high}
        _refuse_bytes(list(inside.values()), limits)


def _refuse_bytes(items: Sequence[Item], limits: Limits) -> None:
    """Items that one step needs must fit the encoder cache side by side."""
    num_bytes = sum(item.num_bytes for item in items)
    if num_bytes > limits.encoder_cache_bytes:
        names = " and ".join(item.name for item in items)
        raise errors.MediaError(
            f"{names}: the encoder's output takes {num_bytes} bytes, but encoder_cache_bytes is "
            f"{limits.encoder_cache_bytes}; raise it",
            parameter=items[0].name,
            value=num_bytes,
        )
