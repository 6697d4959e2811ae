"""torchvision, timm and torchaudio beside a CPU build of torch, and mistral_common.

    python tests/parity/extras.py DEST

Their wheels want a CUDA build, and torchvision's Python two of its compiled operators to exist.
Fetched without what they depend on, with these declared (they stay without a kernel) and without
torchaudio's library, all that transformers' processors ask of them runs: `PYTHONPATH=DEST`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

WHEELS = (
    *("torchvision==0.28.0", "torchaudio==2.11.0", "timm==1.0.31"),
    # What is not among the tests' own packages of what this wants.
    *("mistral-common==1.13.1", "tiktoken==0.14.0", "pydantic-extra-types==2.11.1"),
    "pycountry==26.2.16",
)
DECLARED = '''"""Declares the operators that torchvision's Python asks for at its import."""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            torch._torchvision_declared = library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                arguments = "Tensor dets, Tensor scores, float iou_threshold"
                library.define(f"{operator}({arguments}) -> Tensor")


sys.meta_path.insert(0, _Declare())
'''


def main(destination: Path) -> None:
    """Fill the folder, once."""
    if not (destination / "mistral_common").exists():
        shutil.rmtree(destination, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, destination, *WHEELS], check=True)
        shutil.rmtree(destination / "torchaudio" / "lib")
        (destination / "sitecustomize.py").write_text(DECLARED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
