"""Skips for versions of transformers that lack what a test needs."""

from __future__ import annotations

import pytest
import transformers

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
NO_VIDEOS = "its video processors cannot do without torchvision"


def skip_up_to(major: int, minor: int, reason: str) -> None:
    """Skip a test, a fixture's tests, or a module under this release of transformers or older."""
    if (major, minor) >= RELEASE:
        pytest.skip(f"transformers {transformers.__version__}: {reason}", allow_module_level=True)
