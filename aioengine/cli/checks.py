"""Refusals that flags alone allow, before a model is loaded, and errors in terms of flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from aioengine import EngineConfig, MediaConfig, SamplingParams
from aioengine.cli.options import engine_config, given
from aioengine.errors import AioEngineError, InvalidRequestError, MediaError

__all__ = ["check_items", "check_options", "in_flags"]

FLAGS = {
    field.name: "--" + field.name.replace("_", "-")
    for kind in (EngineConfig, MediaConfig, SamplingParams)
    for field in fields(kind)
}
SERVERS = ("max_body_bytes", "max_bodies_bytes", "trusted_hosts", "allowed_origins")
FLAGS |= {name: "--" + name.replace("_", "-") for name in SERVERS}
FLAGS["model_name"] = FLAGS["model_names"] = "--served-model-name"
IN_PYTHON = (
    (r", or pass (MediaConfig\(fetcher=\.\.\.\)|media\.fetcher)[^;]*", ""),
    (r"media=MediaConfig\((\w+)=\.\.\.\)", r"media.\1"),
    (r"\b(\w+)\[['\"]\w+['\"]\]", r"\1"),
    (r"4 << 30 \(4 GiB\)", "4GiB"),
    (r"\b(image|video|audio)s=\[\.\.\.\]", r"--\1 FILE"),
)
"""What messages say of Python that has no place among flags, and what is put for it."""


def check_options(options: argparse.Namespace) -> None:
    """Raise InvalidRequestError for the first option or media item that cannot be right."""
    config = engine_config(options)
    SamplingParams(**given(options, SamplingParams))
    if getattr(options, "system", None) and getattr(options, "chat", None) is False:
        message = "--system is for chat messages, and --raw is plain text; give one of them"
        raise InvalidRequestError(message, parameter="system")
    check_items(getattr(options, "items", ()), config.media)


def check_items(items: Iterable[tuple[str, str | Path]], config: MediaConfig) -> None:
    """Raise MediaError for a URL that may not be fetched, and a file that is not an image."""
    from aioengine.processors.media.fetch import check_image_file  # takes a moment

    for modality, item in items:
        if isinstance(item, Path):
            if modality == "image":
                check_image_file(item, config, parameter=f"{item!s:.80}")
        elif re.match("https?:", item, re.IGNORECASE):
            _check_url(item, config)
        elif not re.match("data:|file:", item, re.IGNORECASE):
            message = f"{item:.80} must be a file, or a data:, file: or http(s) URL"
            raise MediaError(message, parameter=modality)


def _check_url(url: str, config: MediaConfig) -> None:
    if not config.allowed_hosts:
        raise MediaError(
            f"{url:.80} is an http(s) URL, and fetching is off; name the hosts that may be asked "
            'with --allowed-hosts (or "*" for any public one)',
            parameter="allowed_hosts",
        )
    try:
        from aioengine.processors.media.http import check_url
    except ModuleNotFoundError as error:
        message = f'{url:.80} cannot be fetched without httpx: pip install "aioengine[fetch]"'
        raise MediaError(message, parameter="image") from error
    check_url(url, config, parameter=f"{url:.80}")


def in_flags(error: AioEngineError) -> str:
    """The message of an error, with flags in place of the parameters that they stand for."""
    text = str(error)
    for pattern, put in IN_PYTHON:
        text = re.sub(pattern, put, text)
    parameter = (getattr(error, "parameter", None) or "").removeprefix("media.")
    text = text.removeprefix("media.") if parameter in FLAGS else text
    if parameter in FLAGS and text.startswith(f"{parameter} "):
        text = FLAGS[parameter] + text.removeprefix(parameter)
    return re.sub(r"(?<![\w-])(?:media\.)?([a-z]+(?:_[a-z]+)+)(=True|=False)?\b", _as_flag, text)


def _as_flag(found: re.Match[str]) -> str:
    flag = FLAGS.get(found[1])
    if flag is None:
        return found[0]
    return f"--no-{flag[2:]}" if found[2] == "=False" else flag
