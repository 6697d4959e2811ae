"""What is shipped to try the engine with: a small model and eight pictures, both synthetic."""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_model", "demo_pictures"]

ASSETS = Path(__file__).parent / "assets"


def demo_model() -> Path:
    """The folder of the demo model, a small LLaVA trained on rendered shapes and digits.

    It describes such pictures and answers questions about them; it knows nothing of photographs.
    """
    return ASSETS / "demo_llava"


def demo_pictures() -> list[Path]:
    """Eight picture files that the demo model can describe."""
    return sorted(path for path in (ASSETS / "pictures").iterdir() if path.suffix != ".md")
