"""audio/transcriptions: an audio item in, however long, and what was said in it out.

Audio longer than the model hears is cut into windows where it is quiet. They are transcribed side
by side, and joined in order.
"""

from __future__ import annotations

import re
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from aioengine.asgi.api.fields import TRANSCRIPTIONS, known
from aioengine.asgi.client_task import EventStream, attend, failures_in
from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.service import Service
from aioengine.config import MediaConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import InvalidRequestError
from aioengine.processors.speech import SupportsTranscription, cut_windows
from aioengine.sampling_params import SamplingParams
from aioengine.streams.loop_bridge import run_apart
from aioengine.streams.tokens import TokenStream
from aioengine.types import Prompt

__all__ = ["Transcription"]

FORMATS = ("json", "text")
MAX_FIELD_BYTES = 1 << 16
AT_ONCE = 8
"""Windows of one audio item."""
MULTIPART = re.compile(r"\s*multipart/form-data\s*(;|$)", re.IGNORECASE)
UTF8 = re.compile(r"^(?!.*charset)|charset=[\"']?utf-?8", re.IGNORECASE)

Number = TypeVar("Number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Fields of one request. `data`: the audio file."""

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
        content_type = request.headers.get("content-type", "")
        if not MULTIPART.match(content_type):
            # An URL-encoded form is parsed byte by byte on the loop, and has no files.
            message = "file must be an audio file, in a form that is multipart/form-data"
            raise ApiError(400, message, parameter="file", code="invalid_value")
        if not UTF8.search(content_type):
            raise ApiError(415, "the form must be in UTF-8")
        async with request.form(
            max_files=1, max_fields=len(TRANSCRIPTIONS), max_part_size=MAX_FIELD_BYTES
        ) as form:
            ask = await _read_form(form)
        self._service.check_model(ask.model)
        await attend(receive, self._transcribe(ask, scope, receive, send))

    async def _transcribe(self, ask: Ask, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._service.engine
        processor = engine.processor
        if not isinstance(processor, SupportsTranscription):
            message = "the model does not write down speech; ask it in a chat"
            raise ApiError(400, message, parameter="model", code="invalid_value")
        token_ids = processor.create_transcription_prompt(ask.language, ask.context)
        prompt = self._service.salted(scope, Prompt(token_ids=token_ids))
        windows, seconds = await run_apart(
            _windows, ask.data, engine.config.media, *processor.get_audio_window()
        )
        hearing = _Hearing(engine, prompt, ask.params, windows)
        headers = [(name.encode(), value.encode()) for name, value in hearing.headers.items()]
        events = EventStream(send, headers)
        async with failures_in(events, _about_the_file), hearing:
            if ask.is_streamed:
                await _stream_text(hearing, events, seconds)
            else:
                response = await _whole(ask, hearing, seconds)
                await response(scope, receive, send)


class _Hearing:
    """The windows' streams, in order; some are at work before they are asked for."""

    def __init__(
        self, engine: AsyncEngine, prompt: Prompt, params: SamplingParams, windows: Sequence[Any]
    ) -> None:
        # Several windows are as many requests, whose names the engine makes.
        self._name = f"transcript-{uuid.uuid4().hex}" if len(windows) == 1 else None
        self.headers = {"x-request-id": self._name} if self._name else {}
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._windows = deque(windows)
        self._streams: deque[TokenStream] = deque()
        self._num_at_once = min(AT_ONCE, engine.config.max_num_seqs)

    async def __aenter__(self) -> None:
        self._engine.check_room(min(len(self._windows), self._num_at_once))

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()

    async def streams(self) -> AsyncIterator[TokenStream]:
        """One for each window; what is asked for is read to its end."""
        while self._windows or self._streams:
            while self._windows and len(self._streams) < self._num_at_once:
                prompt = replace(self._prompt, media={"audio": [self._windows.popleft()]})
                stream = self._engine.stream(prompt, self._params, request_id=self._name)
                self._streams.append(stream)
            yield self._streams[0]
            self._streams.popleft().close()


async def _whole(ask: Ask, hearing: _Hearing, seconds: float) -> Response:
    text = _joined([(await stream.result()).text async for stream in hearing.streams()])
    if ask.response_format == "text":
        return PlainTextResponse(text + "\n", headers=hearing.headers)
    return JSONResponse({"text": text, "usage": _usage(seconds)}, headers=hearing.headers)


async def _stream_text(hearing: _Hearing, events: EventStream, seconds: float) -> None:
    """Window by window."""
    texts: list[str] = []
    async for stream in hearing.streams():
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


def _about_the_file(error: Exception) -> Exception:
    """An error about a window is one about the upload."""
    if isinstance(error, InvalidRequestError) and (error.parameter or "").startswith("audios"):
        return error.for_parameter("file")
    return error


def _windows(
    data: bytes, config: MediaConfig, max_samples: int, sample_rate: int
) -> tuple[list[Any], float]:
    """The audio in pieces that the model can hear, and its length in seconds.

    One that is short enough stays a file: it is decoded like any other, and known by its bytes.
    """
    # Not at the top of the file: it needs torch, which whoever only serves may not have loaded.
    source = import_module("aioengine.processors.media.open").open_media(
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


async def _read_form(form: FormData) -> Ask:
    given = known({name.removesuffix("[]"): value for name, value in form.items()}, TRANSCRIPTIONS)
    upload = given.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidRequestError("file must be an audio file", parameter="file")
    fields = {name: value for name, value in given.items() if isinstance(value, str) and value}
    response_format = fields.get("response_format", "json")
    if response_format not in FORMATS:
        message = f"response_format must be one of {', '.join(FORMATS)}: time stamps are not built"
        raise InvalidRequestError(message, parameter="response_format")
    return Ask(
        data=await upload.read(),
        model=fields.get("model"),
        language=fields.get("language"),
        context=fields.get("prompt", ""),
        params=SamplingParams(
            temperature=_read(float, fields, "temperature") or 0.0,
            seed=_read(int, fields, "seed"),
            max_tokens=None,
        ),
        response_format=response_format,
        is_streamed=_flag(fields, "stream"),
    )


def _read(kind: Callable[[str], Number], fields: dict[str, str], name: str) -> Number | None:
    if name not in fields:
        return None
    try:
        return kind(fields[name])
    except ValueError:
        raise InvalidRequestError(f"{name} must be a number", parameter=name) from None


def _flag(fields: dict[str, str], name: str) -> bool:
    value = fields.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name} must be true or false", parameter=name)
    return value in ("true", "1")
