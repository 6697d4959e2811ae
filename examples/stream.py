"""The text of an answer as it comes, then what it cost."""

import asyncio

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model


async def main() -> None:
    prompt = "USER: <image>\nDescribe the picture. ASSISTANT:"
    params = SamplingParams(temperature=0, max_tokens=96)
    async with (
        AsyncEngine.from_pretrained(demo_model()) as engine,
        engine.stream(prompt, params, images=[demo_images()[0]]) as stream,
    ):
        async for delta in stream:
            print(delta.text, end="", flush=True)
        output = await stream.result()
    print(f"\n{output.usage.prompt_tokens} tokens in, {output.usage.completion_tokens} out")
    print(f"first token after {output.timings.first_token:.3f} s")


if __name__ == "__main__":
    asyncio.run(main())
