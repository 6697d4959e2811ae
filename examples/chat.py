"""A conversation of two turns about one image; the second turn computes only what is new."""

import asyncio
from typing import Any

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model


async def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=96)
    image = {"type": "image", "image": demo_images()[0]}
    question = {"type": "text", "text": "Describe the picture."}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image, question]}]
    async with AsyncEngine.from_pretrained(demo_model()) as engine:
        first = await engine.generate(messages, params)
        print(first.text)

        messages.append({"role": "assistant", "content": first.text})
        messages.append({"role": "user", "content": "How many objects are there?"})
        second = await engine.generate(messages, params)
        print(second.text)
        print(f"{second.usage.cached_tokens} of {second.usage.prompt_tokens} prompt tokens cached")


if __name__ == "__main__":
    asyncio.run(main())
