"""Describe one image."""

import asyncio

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model


async def main() -> None:
    async with AsyncEngine.from_pretrained(demo_model()) as engine:
        output = await engine.generate(
            "USER: <image>\nDescribe the picture. ASSISTANT:",
            SamplingParams(temperature=0, max_tokens=96),
            images=[demo_images()[0]],
        )
    print(output.text)


if __name__ == "__main__":
    asyncio.run(main())
