"""Typed text and flags as a prompt and as sampling parameters for the model at hand."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioengine import Prompt, RequestOutput, SamplingParams
from aioengine.cli.options import MAX_TOKENS, given, media_item
from aioengine.engine.prompts import PromptLike
from aioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from aioengine import AsyncEngine

__all__ = [
    "MODALITIES",
    "MediaItems",
    "add_form_flags",
    "add_media_flags",
    "chat_message",
    "in_own_words",
    "plain_prompt",
    "prompt_of",
    "sampling_params",
    "summary",
    "takes_messages",
]

MODALITIES = ("image", "video", "audio")
MediaItems = Sequence[tuple[str, str | Path]]
"""(modality, item) in the order in which they were given."""


def add_media_flags(parser: argparse.ArgumentParser) -> None:
    """--image, --video and --audio, each as often as need be; their common order is kept."""
    for modality in MODALITIES:
        parser.add_argument(
            f"--{modality}",
            dest="items",
            action="append",
            default=[],
            type=partial(_tagged, modality),
            metavar="FILE",
            help="a file, or a URL that the media flags allow; may be given again",
        )


def add_form_flags(parser: argparse.ArgumentParser) -> None:
    """--system, --chat and --raw: what becomes of a text."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", default=None, help="as a chat message, in any case"
    )
    form.add_argument(
        "--raw",
        action="store_false",
        dest="chat",
        help="as plain text, in any case; placeholders that it lacks are put before it",
    )


def prompt_of(
    engine: AsyncEngine, options: argparse.Namespace, text: str, items: MediaItems
) -> PromptLike:
    """The text and media in the form that the flags say, or that suits the model.

    Raises InvalidRequestError.
    """
    if takes_messages(engine) if options.chat is None else options.chat:
        system = [{"role": "system", "content": options.system}] if options.system else []
        return [*system, chat_message(text, items)]
    if options.system:
        message = "--system is for chat messages, which this model is not given"
        raise InvalidRequestError(message, parameter="system")
    return plain_prompt(engine, text, items)


def _tagged(modality: str, text: str) -> tuple[str, str | Path]:
    return modality, media_item(text)


def takes_messages(engine: AsyncEngine) -> bool:
    """Return whether the model is spoken to in chat messages."""
    # torch is there by now; at the top, this would make `--help` take seconds.
    from aioengine.processors.chat import renderer

    return renderer.takes_messages(engine.processor)


def chat_message(text: str, items: MediaItems) -> dict[str, Any]:
    """A user's message: media first, as templates and training have them."""
    if not items:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": modality, modality: item} for modality, item in items]
    if text:
        parts.append({"type": "text", "text": text})
    return {"role": "user", "content": parts}


def plain_prompt(engine: AsyncEngine, text: str, items: MediaItems) -> Prompt:
    """The text as it stands; placeholders that it lacks are put before it."""
    media: dict[str, list[str | Path]] = {}
    for modality, item in items:
        media.setdefault(modality, []).append(item)
    placeholder = engine.processor.dummy_inputs.get_dummy_text
    known = engine.processor.info.get_supported_mm_limits()
    lacking = Counter(modality for modality, _ in items if modality in known)
    for modality in list(lacking):
        if placeholder({modality: 1}) in text:
            del lacking[modality]
    return Prompt(text=placeholder(lacking) + text, media=media)


def in_own_words(
    error: InvalidRequestError, items: MediaItems, message: int
) -> InvalidRequestError:
    """The error, with a file's name in place of its place in message number `message`, or in the
    plain prompt."""
    names, counts = {}, Counter[str]()
    for index, (modality, item) in enumerate(items):
        names[f"messages[{message}].content[{index}]"] = f"{item!s:.80}"
        names[f"{modality}s[{counts[modality]}]"] = f"{item!s:.80}"
        counts[modality] += 1
    name = names.get(error.parameter or "")
    return error if name is None else error.for_parameter(name)


def sampling_params(engine: AsyncEngine, options: argparse.Namespace) -> SamplingParams:
    """Merge the flags with what the checkpoint's makers recommend; greedy by default.

    Raises InvalidRequestError.
    """
    recommended = SamplingParams.recommended(engine.processor.info.ctx.generation_config)
    usual = {"max_tokens": MAX_TOKENS, **recommended}
    return SamplingParams(**{**usual, **given(options, SamplingParams)})


def summary(output: RequestOutput) -> str:
    """One line of what a request took."""
    usage, timings = output.usage, output.timings
    parts = [
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
        f"{usage.completion_tokens} tokens out",
    ]
    if timings.first_token is not None and timings.finished is not None:
        parts.append(f"first after {timings.first_token:.2f} s")
        decoding_s = timings.finished - timings.first_token
        if usage.completion_tokens > 1 and decoding_s > 0:
            parts.append(f"then {(usage.completion_tokens - 1) / decoding_s:.1f} tokens/s")
    return ", ".join(parts) + f", {output.outputs[0].finish_reason}"
