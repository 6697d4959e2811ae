"""Two engines in one event loop: the same model in two precisions, asked the same at once."""

import asyncio

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model


async def describe(engine: AsyncEngine) -> str:
    output = await engine.generate(
        "USER: <image>\nDescribe the picture. ASSISTANT:",
        SamplingParams(temperature=0, max_tokens=96),
        images=[demo_images()[0]],
    )
    return output.text


async def main() -> None:
    async with (
        AsyncEngine.from_pretrained(demo_model(), dtype="float32") as precise,
        AsyncEngine.from_pretrained(demo_model(), dtype="bfloat16") as small,
    ):
        texts = await asyncio.gather(describe(precise), describe(small))
    for dtype, text in zip(("float32", "bfloat16"), texts, strict=True):
        print(f"{dtype}: {text}")


if __name__ == "__main__":
    asyncio.run(main())
