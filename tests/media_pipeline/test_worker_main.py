"""Errors on their way out of a worker process."""

from __future__ import annotations

import pytest

from aioengine import errors
from aioengine.media_pipeline.worker_main import describe_error, rebuild_error


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_of_ours_comes_back(name: str) -> None:
    kind = getattr(errors, name)
    is_request = issubclass(kind, errors.InvalidRequestError)
    error = kind("as it was", **({"parameter": "images[0]", "value": 7} if is_request else {}))
    found = rebuild_error(describe_error(error))
    is_of_the_engine = name in ("EngineClosedError", "EngineDeadError", "WrongLoopError")
    assert type(found) is (errors.EngineError if is_of_the_engine else kind)
    assert str(found) == "as it was"
    if is_request:
        assert isinstance(found, errors.InvalidRequestError)
        assert (found.parameter, found.value) == ("images[0]", 7)


def test_a_subclass_becomes_the_class_that_it_derives_from() -> None:
    class Own(errors.OverloadedError):
        pass

    assert type(rebuild_error(describe_error(Own("later")))) is errors.OverloadedError
