"""audio/transcriptions: a recording in, however long, and what was said in it out.

A recording longer than the model hears is cut into windows where it is quiet. They are written down
side by side, and told in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from aioengine.asgi.exchange import EventStream, attend
from aioengine.asgi.faults import ApiError, api_error
from aioengine.asgi.generation import together
from aioengine.asgi.service import Service
from aioengine.config import MediaConfig
from aioengine.errors import InvalidRequestError
from aioengine.params import SamplingParams
from aioengine.processors.media.open import open_media
from aioengine.processors.speech import SupportsTranscription, cut_windows
from aioengine.streams.bridge import run_apart
from aioengine.streams.tokens import TokenStream
from aioengine.types import Prompt

__all__ = ["Transcription"]

FIELDS = frozenset(
    {"file", "model", "language", "prompt", "response_format", "temperature", "stream", "seed"}
)
FORMATS = ("json", "text")
MAX_FIELD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one request asks for. `data`: the recording's file."""

    data: bytes
    model: str | None
    language: str | None
    context: str
    params: SamplingParams
    response_format: str
    is_streamed: bool


class Transcription:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST request. Raises what goes wrong before the answer has begun."""
        request = Request(scope, receive)
        async with request.form(
            max_files=1, max_fields=len(FIELDS), max_part_size=MAX_FIELD_BYTES
        ) as form:
            ask = await _read(form)
        self._service.check_model(ask.model)
        await attend(receive, self._transcribe(ask, scope, receive, send))

    async def _transcribe(self, ask: Ask, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._service.engine
        processor = engine.processor
        if not isinstance(processor, SupportsTranscription):
            raise ApiError(
                400, "the model does not write down speech; ask it in a chat", code="model"
            )
        token_ids = processor.create_transcription_prompt(ask.language, ask.context)
        windows, seconds = await run_apart(
            _windows,
            ask.data,
            engine.config.media,
            *processor.get_audio_window(),
        )
        events = EventStream(send)
        try:
            async with AsyncExitStack() as stack:
                streams = []
                for window in windows:
                    prompt = Prompt(token_ids=token_ids, media={"audio": [window]})
                    stream = engine.stream(prompt, ask.params)
                    stack.callback(stream.close)
                    streams.append(stream)
                if ask.is_streamed:
                    await _stream_text(streams, events, seconds)
                else:
                    response = await _whole(ask, streams, seconds)
                    await response(scope, receive, send)
        except Exception as error:
            if not events.has_begun:
                raise
            await events.fail(api_error(error))


async def _whole(ask: Ask, streams: Sequence[TokenStream], seconds: float) -> Response:
    outputs = await together(stream.result() for stream in streams)
    text = _joined([output.text for output in outputs])
    if ask.response_format == "text":
        return PlainTextResponse(text + "\n")
    return JSONResponse({"text": text, "usage": _usage(seconds)})


async def _stream_text(streams: Sequence[TokenStream], events: EventStream, seconds: float) -> None:
    """Window by window; those that come later have been at work meanwhile."""
    texts: list[str] = []
    for stream in streams:
        texts.append("")
        async for delta in stream:
            # What `_joined` will put between windows, and leave out before them.
            fresh = delta.text if texts[-1] else delta.text.lstrip()
            lead = " " if fresh and not texts[-1] and any(texts) else ""
            texts[-1] += fresh
            if fresh:
                await events.send({"type": "transcript.text.delta", "delta": lead + fresh})
    text = _joined(texts)
    await events.send({"type": "transcript.text.done", "text": text, "usage": _usage(seconds)})
    await events.done()


def _windows(
    data: bytes, config: MediaConfig, max_samples: int, sample_rate: int
) -> tuple[list[Any], float]:
    """The recording in pieces that the model can hear, and its length in seconds.

    One that is short enough stays a file: it is decoded like any other, and known by its bytes.
    """
    source = open_media(
        "audio", data, config, parameter="file", options={}, get_sample_rate=lambda: sample_rate
    )
    seconds = source.header().num_samples / sample_rate
    if source.header().num_samples <= max_samples:
        return [data], seconds
    samples, window_s = source.decode().samples, max_samples / sample_rate
    windows = cut_windows(samples, sample_rate, window_s=window_s, search_s=window_s / 10)
    return windows, seconds


def _joined(texts: Sequence[str]) -> str:
    return " ".join(text.strip() for text in texts if text.strip())


def _usage(seconds: float) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(seconds, 3)}


async def _read(form: FormData) -> Ask:
    unknown = sorted(form.keys() - FIELDS)
    if unknown:
        raise InvalidRequestError(f"{unknown[0]!r:.60} is not supported", parameter=unknown[0])
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidRequestError("file must be a recording's file", parameter="file")
    fields = {name: value for name, value in form.items() if isinstance(value, str) and value}
    response_format = fields.get("response_format", "json")
    if response_format not in FORMATS:
        raise InvalidRequestError(
            f"response_format must be one of {', '.join(FORMATS)}: time stamps are not built",
            parameter="response_format",
        )
    temperature, seed = _number(fields, "temperature"), _number(fields, "seed")
    return Ask(
        data=await upload.read(),
        model=fields.get("model"),
        language=fields.get("language"),
        context=fields.get("prompt", ""),
        params=SamplingParams(
            temperature=temperature or 0.0,
            seed=None if seed is None else int(seed),
            max_tokens=None,
        ),
        response_format=response_format,
        is_streamed=fields.get("stream", "").lower() in ("true", "1"),
    )


def _number(fields: dict[str, str], name: str) -> float | None:
    if name not in fields:
        return None
    try:
        return float(fields[name])
    except ValueError:
        raise InvalidRequestError(f"{name} must be a number", parameter=name) from None
