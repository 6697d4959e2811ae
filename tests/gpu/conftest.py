"""These tests need a CUDA device, and are skipped, and counted as skipped, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    # Of the simulated GPU, which a real one need not know.
    config.addinivalue_line("markers", "encoders_may_wait: waits of the encoder's work are printed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "there is no CUDA device; docs/gpu.md says what ran on one"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))
