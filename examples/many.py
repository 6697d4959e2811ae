"""Many images at once: one batch on the device, one `await` here."""

import asyncio
from pathlib import Path

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model


async def ask(engine: AsyncEngine, image: Path, question: str) -> str:
    output = await engine.generate(
        f"USER: <image>\n{question} ASSISTANT:",
        SamplingParams(temperature=0, max_tokens=96),
        images=[image],
    )
    return output.text


async def main() -> None:
    image_paths = demo_images()
    async with AsyncEngine.from_pretrained(demo_model()) as engine:
        for question in ("Describe the picture.", "How many objects are there?"):
            answers = await asyncio.gather(*(ask(engine, path, question) for path in image_paths))
            for image, answer in zip(image_paths, answers, strict=True):
                print(f"{image.name}: {answer}")
        print(f"{engine.statistics().encoder_items_run} images were encoded")


if __name__ == "__main__":
    asyncio.run(main())
