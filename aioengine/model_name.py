"""What to call a model where others read it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["model_name"]


def model_name(model: str | os.PathLike[str]) -> str:
    """A hub id as it is; of a local folder its own name, as where it lies is nobody's business."""
    path = Path(model)
    return path.resolve().name if path.is_absolute() or path.exists() else os.fspath(model)
