"""Errors as OpenAI's clients expect them, and as Anthropic's do."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

from starlette.responses import Response

from aioengine import errors

__all__ = [
    "ApiError",
    "anthropic_error",
    "api_error",
    "error_response",
    "error_text",
    "forget_frames",
    "protocol_error",
]

RETRY_AFTER_S = 1
"""Of what is over soon: a queue moves on, an engine comes up or another one is asked."""

INVALID, UNAVAILABLE = "invalid_request_error", "service_unavailable_error"
KNOWN: tuple[tuple[type[Exception], int, str, str], ...] = (
    # Not 502: whoever names a broken server could have ours taken for one. OpenAI's clients
    # try again by a header of their own, whatever the status.
    (errors.MediaUnavailableError, 424, INVALID, "media_unavailable"),
    (errors.MediaError, 422, INVALID, "invalid_media"),
    (errors.PromptTooLongError, 400, INVALID, "context_length_exceeded"),
    (errors.InvalidRequestError, 400, INVALID, "invalid_value"),
    (errors.OverloadedError, 429, "rate_limit_error", "overloaded"),
    (errors.EngineClosedError, 503, UNAVAILABLE, "engine_closed"),
    (errors.EngineDeadError, 503, UNAVAILABLE, "engine_dead"),
    (errors.RequestAbortedError, 503, UNAVAILABLE, "aborted"),
)
"""Errors of the engine's, the first that fits: their status, type and code."""
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by their status; of others see `anthropic_error`."""
CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    431: "request_too_large",
    503: "engine_closed",
}
"""Codes of what is refused before it reaches an endpoint."""
JSON_WORDS = {"True": "true", "False": "false", "None": "null", "NoneType": "null"} | {
    "dict": "object",
    "str": "string",
    "bool": "boolean",
}
"""Python's words in the engine's errors, and those of a client's JSON."""
PYTHON = re.compile(r"(?<![\w'.])(True|False|None|(?<=, not )(?:NoneType|dict|str|bool))(?![\w'.])")
MEDIA = re.compile(r": (image|audio|video)s=\[\.\.\.\]")
MEDIA_PATHS = dict.fromkeys(("image", "video"), " in chat/completions") | {
    "audio": " in audio/transcriptions"
}
"""Media as Python's calls have them, and where a client gives them."""
AGAIN = (424, 429, 503)
"""Statuses of what is worth another try."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ApiError(Exception):
    """An error of the HTTP API: a status, and OpenAI's four fields."""

    status: int
    message: str
    kind: str = INVALID
    parameter: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of an event in a stream."""
        fields = {"type": self.kind, "param": self.parameter, "code": self.code}
        return {"error": {"message": self.message, **fields}}


def api_error(error: Exception) -> ApiError:
    """The fault that an error of the engine's amounts to; anything else is logged and is a 500."""
    if isinstance(error, ApiError):
        return error
    for kind, status, name, code in KNOWN:
        if isinstance(error, kind):
            headers = {"retry-after": str(RETRY_AFTER_S)} if status in AGAIN else {}
            if status == 424:
                headers["x-should-retry"] = "true"
            parameter = getattr(error, "parameter", None)
            return ApiError(status, _for_clients(error), name, parameter, code, headers)
    logger.error("a request failed\n%s", errors.trace_of(error))  # its text may hold payload
    message = str(error) if isinstance(error, errors.AioEngineError) else "internal error"
    return ApiError(500, message, "server_error", code="internal_error")


def protocol_error(status: int, message: str, code: str | None = None) -> ApiError:
    """The fault of a request that reaches no endpoint, or whose form is none. `code`: where it is
    not the status's own."""
    kind = UNAVAILABLE if status == 503 else INVALID
    parameter = "file" if message.startswith("Too many files") else None
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in AGAIN else {}
    return ApiError(status, message, kind, parameter, code or CODES.get(status), headers)


def _for_clients(error: Exception) -> str:
    """The text of an error of the engine's in a client's words."""
    text = str(error)
    if isinstance(error, errors.EngineClosedError):
        text = text.partition(";")[0]  # the rest tells how Python starts an engine
    text = MEDIA.sub(lambda found: MEDIA_PATHS[found[1]], text)
    return PYTHON.sub(lambda found: JSON_WORDS[found[1]], text)


def forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error has passed, which hold the request's body in a cycle."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        clear_frames(found.__traceback__)
        found.__traceback__ = None
        left += found.__cause__, found.__context__
        if isinstance(found, BaseExceptionGroup):
            left += found.exceptions


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error in Anthropic's shape."""
    other = INVALID if error.status < 500 else "api_error"
    kind = ANTHROPIC.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_text(error: ApiError, path: str = "") -> str:
    """The JSON of an error in the shape that clients of the path expect."""
    is_anthropics = path.rstrip("/").endswith(("/messages", "/messages/count_tokens"))
    return json.dumps(anthropic_error(error) if is_anthropics else error.body)


def error_response(error: ApiError, path: str) -> Response:
    """The whole HTTP response to a request for a path."""
    text = error_text(error, path)
    return Response(text, error.status, dict(error.headers), media_type="application/json")
