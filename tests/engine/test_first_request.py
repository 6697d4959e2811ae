"""What a first request finds ready: an import would hold the loop while others stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.tiny import save_tiny_llava

CODE = """
import asyncio, io, sys
from PIL import Image
from aioengine import AsyncEngine, EngineConfig, SamplingParams

async def main():
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=256)
    params = SamplingParams(max_tokens=2)
    encoded = io.BytesIO()
    Image.new("RGB", (40, 30)).save(encoded, "WEBP")
    async with AsyncEngine.from_pretrained(sys.argv[1], config=config) as engine:
        before = set(sys.modules)
        await engine.generate("what? <image>", params, images=[encoded.getvalue()])
        print(sorted(set(sys.modules) - before))

asyncio.run(main())
"""

READERS = """
import sys
from aioengine.config import MediaConfig
from aioengine.processors.media.open import load_readers
load_readers(["audio", "video", "smell"], MediaConfig())
print([name for name in ("soundfile", "soxr", "av", "PIL.WebPImagePlugin") if name in sys.modules])
"""


def printed(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_nothing_is_left_to_import(tmp_path: Path) -> None:
    save_tiny_llava(tmp_path)
    assert printed(CODE, str(tmp_path)) == "[]"


def test_only_what_opens_such_items_is_imported() -> None:
    assert printed(READERS) == "['soundfile', 'soxr', 'av']"
