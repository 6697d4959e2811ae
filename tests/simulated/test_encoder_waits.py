"""Encoders on the simulated GPU: none waits for the device more often than is listed."""

from __future__ import annotations

import pytest

from tests.simulated.test_simulated import pytestmark, run

__all__ = ["pytestmark"]


@pytest.mark.slow
def test_encoders_wait_no_more_than_is_listed() -> None:
    status, text = run("tests/simulated/encoder_waits.py")
    assert status == 0, text
