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
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import isclass, iscoroutinefunction, signature
from itertools import islice
from typing import Any, TypeVar

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
MAX_NAME_LENGTH = 60
DID_YOU_MEAN = "; did you mean {!r}?"

Predicate = Callable[[Any], bool]
Checks = Mapping[str, tuple[Predicate, str]]
Target = TypeVar("Target")

SYNONYMS = {
    "best_of": "n",
    "context_length": "max_model_len",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "gpu_memory": "gpu_memory_utilization",
    "guided_decoding": "structured_outputs",
    "guided_json": "structured_outputs",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "logprob": "logprobs",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_seq_len": "max_model_len",
    "json_schema": "json",
    "max_seqs": "max_num_seqs",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "model_max_length": "max_model_len",
    "n_ctx": "max_model_len",
    "num_gpu_blocks": "kv_cache_bytes",
    "num_return_sequences": "n",
    "response_format": "structured_outputs",
    "sampling_params": "params",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "torch_dtype": "dtype",
}
"""Other engines' names -> ours, where the spelling does not tell."""

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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'max_num_seqs'?"` for the known name meant by `word`, or nothing."""
    meant = _meant(word, known)
    return DID_YOU_MEAN.format(meant) if meant else ""


def _meant(word: str, known: Iterable[str]) -> str:
    """The name that another engine's word or a misspelt one stands for; of flags too."""
    names = {name.lstrip("-").replace("-", "_"): name for name in known}
    plain = word.lstrip("-").replace("-", "_")
    if plain in SYNONYMS:
        return names.get(SYNONYMS[plain], "")
    is_short = len(word) <= MAX_NAME_LENGTH
    # Two letters that changed places are much of a short name; a long one half alike misleads.
    cutoff = 0.6 if len(plain) <= 6 else 0.75
    found = get_close_matches(plain, names, 1, cutoff) if is_short else []
    return names[found[0]] if found else ""


def refuse_names(
    message: str,
    given: Iterable[str],
    known: Collection[str],
    others: Mapping[str, Collection[str]] | None = None,
    prefix: str = "",
) -> None:
    """Raise InvalidRequestError for the first name that is given and not known.

    `message`: what is raised, with `{}` for the name; `others`: what else the name may belong to,
    such as `"MediaConfig: media=MediaConfig({}=...)"`; `prefix`: of the error's parameter.
    """
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return
    owners = {f"; it belongs to {form}": names for form, names in (others or {}).items()}
    owners = {DID_YOU_MEAN: known, **owners}
    exact = [form.format(unknown) for form, names in owners.items() if unknown in names]
    near = [(form, _meant(unknown, names)) for form, names in owners.items()]
    way_out = next(iter(exact + [form.format(name) for form, name in near if name]), "")
    text = message.format(shown(unknown, MAX_NAME_LENGTH))
    raise InvalidRequestError(text + way_out, parameter=(prefix + unknown)[:MAX_NAME_LENGTH])


def with_known_names(
    message: str, others: Mapping[str, Collection[str]] | None = None, prefix: str = ""
) -> Callable[[Target], Target]:
    """Make a function, or a class's constructor, refuse unknown keywords as `refuse_names` does.

    Without it that is a TypeError. Signatures stay as they are.
    """

    def decorate(function: Any) -> Any:
        if isclass(function):
            owner: Any = function
            owner.__init__ = decorate(owner.__init__)
            return function
        known = signature(function).parameters

        @wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            refuse_names(message, options, known, others, prefix)
            return function(*arguments, **options)

        @wraps(function)
        async def checked_coroutine(*arguments: Any, **options: Any) -> Any:
            return await checked(*arguments, **options)

        return checked_coroutine if iscoroutinefunction(function) else checked

    return decorate


def require(condition: bool, parameter: str, value: object, rule: str) -> None:
    """Raise InvalidRequestError, which says what `parameter` must be, unless `condition`.

    `value`: what it is, or the type of that, or its size.
    """
    if condition:
        return
    if isinstance(value, type):
        value = text = value.__name__
    else:
        try:
            text = shown(value)
        except Exception:  # a number of thousands of digits, or an object that cannot show itself
            value = text = type(value).__name__
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
        if not is_fit(value):
            require(False, prefix + name, value, rule)


def check_text(value: object, longest: int, parameter: str, what: str = "text") -> None:
    """Raise InvalidRequestError unless it is Unicode text of 1 to `longest` characters.

    `what`: what the parameter is, where the value is one of several.
    """
    require(isinstance(value, str), parameter, type(value), what)
    length = len(str(value))
    require(0 < length <= longest, parameter, length, f"{what} of 1 to {longest} characters")
    if not is_text(value, longest):
        message = f"{parameter} must be {what} in Unicode, without lone surrogates"
        raise InvalidRequestError(message, parameter=parameter)


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
