"""Fetches other people's clients for tests/clients: `python tests/clients/packages.py FOLDER`.

They come through pip and npm, into folders of their own: some want versions of what we use that are
not ours. Tests never call this. Needs about 500 MB on disk.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PYTHON = ("anthropic>=2", "litellm>=1.80", "langchain-openai>=1", "pydantic-ai-slim[openai]>=2")
NODE = ("openai@6", "@anthropic-ai/sdk")


def fetch(root: Path) -> None:
    """Install what is missing. Raises CalledProcessError."""
    python, node = root / "python", root / "node"
    root.mkdir(parents=True, exist_ok=True)
    if not python.is_dir():
        made = root / "python.part"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(made), *PYTHON]
        subprocess.run(pip, check=True)
        made.rename(python)
    if not node.is_dir():
        made = root / "node.part"
        made.mkdir(exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(made)]
        subprocess.run([*npm, *NODE], check=True)
        made.rename(node)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]).resolve())
