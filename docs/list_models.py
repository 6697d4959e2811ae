"""Writes docs/models.md from the registry: python docs/list_models.py [--check]."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from aioengine.models.registry import known_architectures, resolve
from aioengine.processors.processor import TextOnlyProcessor
from aioengine.processors.registry import MULTIMODAL_REGISTRY

PAGE = Path(__file__).parent / "models.md"
HEAD = """# Models

Made by `docs/list_models.py` from the registry. Each row runs transformers' own module and weights
over paged attention; its greedy tokens equal transformers' `generate` in float64 (`tests/parity/`),
with prompts cut anywhere that is allowed, mixed with others, with caches cold and warm. Aria runs
in nothing wider than float32: there tokens are compared up to the first close call.

Videos are tested for Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL and LLaVA-OneVision.

| architecture | processing | what is special |
|---|---|---|
"""
TAIL = """
## Not built yet

Named by the specification, each until it works: Fuyu, BLIP-2 with T5, Florence-2, Molmo (v1 and
Molmo2), DeepSeek-VL2, InternVL's original `InternVLChatModel` checkpoints, Qwen-VL, BART
(`BartModel` and `BartForConditionalGeneration`), mBART. As well: SmolVLM, T5, Whisper, Moonshine,
Qwen2-Audio, Voxtral. GLM-4V takes pictures; its videos are refused until they are shown to be
right.
"""


def first_line(text: str | None) -> str:
    """Of a docstring, without its full stop."""
    return (text or "").strip().splitlines()[0].rstrip(".")


def page() -> str:
    """The whole of docs/models.md."""
    rows = defaultdict(list)
    for name in known_architectures():
        model = resolve([name])
        if not model.__module__.startswith("aioengine."):
            continue
        processors = [
            MULTIMODAL_REGISTRY._entries[base][0]
            for base in model.__mro__
            if base in MULTIMODAL_REGISTRY._entries
        ]
        processor = processors[0] if processors else TextOnlyProcessor
        special = first_line(model.__doc__)
        rows[model.__module__, model.__name__].append(
            f"| `{name}` | `{processor.__name__}` | {special} |\n"
        )
    return HEAD + "".join(line for key in sorted(rows) for line in sorted(rows[key])) + TAIL


def main() -> None:
    """Write the page; with --check, fail if it would change."""
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/models.md is not what docs/list_models.py writes; run it")


if __name__ == "__main__":
    main()
