"""Transcribe audio files: `python transcribe.py MODEL FILE...`."""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from aioengine import AsyncEngine, SamplingParams


async def main(model: str, *files: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=224)
    async with AsyncEngine.from_pretrained(model) as engine, AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(engine.stream("", params, audios=[Path(file)]))
            for file in files
        ]
        for file, stream in zip(files, streams, strict=True):
            print(f"{file}:", end="", flush=True)
            async for delta in stream:
                print(delta.text, end="", flush=True)
            print()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python transcribe.py MODEL FILE...")
    asyncio.run(main(*sys.argv[1:]))
