"""The `openai` package's own client in this process: no server, no port, no key."""

import asyncio
import base64
from typing import Any

from aioengine import AsyncEngine, demo_images, demo_model


async def main() -> None:
    image = base64.b64encode(demo_images()[0].read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "Describe the picture."},
    ]
    messages: list[Any] = [{"role": "user", "content": content}]
    async with (
        AsyncEngine.from_pretrained(demo_model()) as engine,
        engine.openai_client() as client,
        await client.chat.completions.create(
            model=engine.model_name, messages=messages, temperature=0, max_tokens=96, stream=True
        ) as stream,
    ):
        async for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main())
