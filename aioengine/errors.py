"""Every error the engine raises, on one page.

AioEngineError
├── InvalidRequestError          the caller's; raised before any KV work wherever arguments,
│   │                            headers or the token layout already show it
│   ├── PromptTooLongError       more tokens than the model or the KV cache can ever hold
│   ├── PlaceholderMismatchError placeholders and media items do not match
│   ├── UnsupportedModalityError the model takes no such media, or not as many
│   └── MediaError               fetch, format, limits, decoding, embeddings
│       └── MediaUnavailableError a fetch that failed for now; the same request may succeed later
├── RequestAbortedError          ended by abort() or aclose()
├── OverloadedError              max_queued_requests reached; try again later
└── EngineError                  the engine's
    ├── EngineClosedError        used before start or after close
    ├── WrongLoopError           used from another event loop
    ├── ModelLoadError           the model, its processor or the memory for it
    └── EngineDeadError          the device failed; __cause__ says why

Messages name the parameter, the value's kind and the way out. They never hold payload data, memory
addresses or other people's paths.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

__all__ = [
    "AioEngineError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineError",
    "InvalidRequestError",
    "MediaError",
    "MediaUnavailableError",
    "ModelLoadError",
    "OverloadedError",
    "PlaceholderMismatchError",
    "PromptTooLongError",
    "RequestAbortedError",
    "UnsupportedModalityError",
    "WrongLoopError",
]


MAX_TRACE_LINES = 40

Predicate = Callable[[Any], bool]
Checks = Mapping[str, tuple[Predicate, str]]

logger = logging.getLogger(__name__)


class AioEngineError(Exception):
    """The root of everything raised on purpose by aioengine."""


class InvalidRequestError(AioEngineError):
    """The request cannot be served as it was given.

    `parameter` names the argument in the caller's own words (`"images[1]"`, `"max_tokens"`);
    `value` is a short, harmless rendering of what was given (a type, a number, a size), or None.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def for_parameter(self, parameter: str) -> InvalidRequestError:
        """The same error for another waiter, who knows the item under another name.

        What is wrong with the options of the request stays the options' fault.
        """
        text = str(self)
        if self.parameter == "mm_processor_kwargs":
            parameter = self.parameter
        if self.parameter and text.startswith(self.parameter):
            text = parameter + text[len(self.parameter) :]
        return type(self)(text, parameter=parameter, value=self.value)


class PromptTooLongError(InvalidRequestError):
    """The prompt, with its media expanded, does not fit the model's or the engine's limits."""


class PlaceholderMismatchError(InvalidRequestError):
    """The prompt has more, or fewer, placeholders than there are media items."""


class UnsupportedModalityError(InvalidRequestError):
    """The model takes no such media, or not as many items of it in one prompt."""


class MediaError(InvalidRequestError):
    """A media item could not be fetched, recognised, decoded or processed."""


class MediaUnavailableError(MediaError):
    """A media item's server failed or did not answer: the same request may succeed later.

    For a status of 5xx, 408, 425 or 429, a connection that was refused or broke, a time-out, and a
    resolver that is out of order. An address that may not be asked is a plain MediaError, as is a
    name that nobody knows.
    """


class RequestAbortedError(AioEngineError):
    """The request was ended by `abort()`, by closing its stream, or by closing the engine."""


class OverloadedError(AioEngineError):
    """`max_queued_requests` requests are waiting already."""


class EngineError(AioEngineError):
    """The engine's own fault or state, not the request's."""


class EngineClosedError(EngineError):
    """The engine was used before `start()` or after `aclose()`."""


class WrongLoopError(EngineError):
    """An engine belongs to the event loop that started it; this call came from another one."""


class ModelLoadError(EngineError):
    """The model could not be loaded, or does not fit."""


class EngineDeadError(EngineError):
    """The device failed; nothing can run any more. `__cause__` says why."""


def trace_of(error: BaseException) -> str:
    """Return where in the code an error came up, and its kind, but never its text."""
    lines = traceback.format_tb(error.__traceback__)[-MAX_TRACE_LINES:]
    return "".join(lines) + type(error).__name__


def typed(error: Exception) -> AioEngineError:
    """An error of ours for any other that a tokenizer, processor or model may raise.

    Its text may hold payload, so only its kind is reported; `__cause__` has the rest, and the log
    has where it came up.
    """
    if isinstance(error, AioEngineError):
        return error
    logger.error("a request failed inside the engine\n%s", trace_of(error))
    wrapped = EngineError(f"the request failed inside the engine: {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def require(condition: bool, parameter: str, value: object, rule: str) -> None:
    """Raise InvalidRequestError, which says what `parameter` must be, unless `condition`."""
    if condition:
        return
    try:
        text = shown(value)
    except Exception:  # a number of thousands of digits, or an object that cannot show itself
        text = value = type(value).__name__
    raise InvalidRequestError(
        f"{parameter} must be {rule}, not {text}", parameter=parameter, value=value
    )


def require_fields(owner: object, checks: Checks, prefix: str = "") -> None:
    """Raise InvalidRequestError for the first field of `owner` that is not what it must be.

    `checks`: field -> a predicate of its value, and in words what it must be; errors name the
    field behind `prefix`.
    """
    for name, (is_fit, rule) in checks.items():
        value = getattr(owner, name)
        require(is_fit(value), prefix + name, value, rule)


def ints(least: int, most: float = math.inf) -> Predicate:
    """Return a predicate: an integer from `least` to `most`, and not a bool."""
    return lambda value: is_int(value) and least <= value <= most


def reals(least: float, most: float = math.inf) -> Predicate:
    """Return a predicate: a finite number from `least` to `most`, and not a bool."""
    return lambda value: is_real(value) and least <= value <= most


def optional(is_fit: Predicate) -> Predicate:
    """Return a predicate: None, or what `is_fit` takes."""
    return lambda value: value is None or is_fit(value)


def shown(value: object, most: int = 80) -> str:
    """The beginning of `repr(value)`. Takes no longer for a value that is large."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:most]
    elif isinstance(value, dict):
        value = dict(islice(value.items(), most))
    return repr(value)[:most]


def is_int(value: object) -> bool:
    """Return whether it is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Return whether it is a finite number, and not a bool."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def is_text(value: object, longest: int) -> bool:
    """Return whether it is Unicode text of 1 to `longest` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True
