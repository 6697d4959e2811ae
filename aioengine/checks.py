"""Checks of what callers pass, shared by the classes that take it."""

from __future__ import annotations

import math
from itertools import islice

from aioengine.errors import InvalidRequestError

__all__ = ["is_int", "is_real", "is_text", "require", "shown"]


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


def shown(value: object, most: int = 80) -> str:
    """The beginning of `repr(value)`. Takes no longer for a value that is large."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:most]
    elif isinstance(value, dict):
        value = dict(islice(value.items(), most))
    return repr(value)[:most]


def is_int(value: object) -> bool:
    """Whether it is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether it is a finite number, and not a bool."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def is_text(value: object, longest: int) -> bool:
    """Whether it is Unicode text of 1 to `longest` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True
