"""A request that takes too long is cancelled like any coroutine, and leaves nothing behind."""

import asyncio

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model


async def main() -> None:
    prompt = "USER: <image>\nDescribe the picture. ASSISTANT:"
    image = demo_images()[0]
    async with AsyncEngine.from_pretrained(demo_model()) as engine:
        try:
            async with asyncio.timeout(0.05):
                endless = SamplingParams(max_tokens=None, ignore_eos=True)
                await engine.generate(prompt, endless, images=[image])
        except TimeoutError:
            print("cancelled")

        short = SamplingParams(temperature=0, max_tokens=4)
        output = await engine.generate(prompt, short, images=[image])
        print(f"the next request got {len(output.token_ids)} tokens")
        statistics = engine.statistics()
        print(f"{statistics.running} running, {statistics.waiting} waiting")
        print(f"{statistics.kv_blocks_free} of {statistics.kv_blocks_total} KV blocks free")
        print(f"{statistics.encoder_cache_referenced} encoder outputs in use")


if __name__ == "__main__":
    asyncio.run(main())
