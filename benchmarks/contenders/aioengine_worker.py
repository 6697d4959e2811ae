"""aioengine as a contender."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from lag_probe import Lag, probe, summary
from protocol import Answer, Contender, read_images, serve

KV_CACHE_BYTES = 2 << 30  # as the peers get


class OurEngine(Contender):
    async def load(self, model: str, dtype: str, threads: int, kind: str, **_: Any) -> Answer:
        begin = time.perf_counter()
        import aioengine

        self.library = aioengine
        self.engine = aioengine.AsyncEngine.from_pretrained(
            model, dtype=dtype, kv_cache_bytes=KV_CACHE_BYTES
        )
        await self.engine.start()
        ready_s = time.perf_counter() - begin
        import torch

        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        versions = {"aioengine": aioengine.__version__, "torch": torch.__version__}
        return {"ready_s": ready_s, "versions": versions}

    async def batch(
        self, requests: list[dict[str, Any]], max_tokens: int, is_cold: bool, **_: Any
    ) -> Answer:
        encoded = read_images(requests)
        params = self.params(max_tokens)
        if is_cold:
            await self.engine.reset_caches()
        before = self.engine.statistics().stages
        begin = time.perf_counter()
        outputs = await asyncio.gather(
            *(
                self.engine.generate(each["text"], params, images=images)
                for each, images in zip(requests, encoded, strict=True)
            )
        )
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "first_token_s": min(output.timings.first_token for output in outputs),
            "prompt_tokens": [output.usage.prompt_tokens for output in outputs],
            "tokens": [list(output.token_ids) for output in outputs],
            "stages_s": self._stages_since(before),
        }

    def _stages_since(self, before: Any) -> dict[str, float]:
        """Seconds that each stage has taken since then."""
        return {
            name: round(stage.total_s - (before[name].total_s if name in before else 0), 3)
            for name, stage in self.engine.statistics().stages.items()
        }

    def params(self, max_tokens: int, *, is_exact: bool = True) -> Any:
        return self.library.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=is_exact
        )

    async def lag(
        self, streams: list[str], requests: list[dict[str, Any]], max_tokens: int, **_: Any
    ) -> Answer:
        encoded = read_images(requests)
        await self.engine.reset_caches()
        running = [asyncio.create_task(self._stream(text)) for text in streams]
        await asyncio.sleep(0.5)
        lags: list[Lag] = []
        watch = asyncio.create_task(probe(lags))
        params = self.params(max_tokens)
        begin = time.perf_counter()
        await asyncio.gather(
            *(
                self.engine.generate(each["text"], params, images=images)
                for each, images in zip(requests, encoded, strict=True)
            )
        )
        seconds = time.perf_counter() - begin
        watch.cancel()
        for task in running:
            task.cancel()
        counts = await asyncio.gather(*running)
        return {**summary(lags), "seconds": seconds, "streamed_tokens": sum(counts)}

    async def _stream(self, text: str) -> int:
        """Tokens streamed until the task is cancelled, one stream after the other."""
        count = 0
        try:
            while True:
                async with self.engine.stream(text, self.params(512)) as stream:
                    async for delta in stream:
                        count += len(delta.token_ids)
        except asyncio.CancelledError:
            return count

    async def clips(
        self,
        paths: list[str],
        max_tokens: int,
        rate: int,
        is_exact: bool = False,
        is_cold: bool = True,
        **_: Any,
    ) -> Answer:
        import numpy as np

        samples = [np.load(path) for path in paths]
        params = self.params(max_tokens, is_exact=is_exact)
        if is_cold:
            await self.engine.reset_caches()
        before = self.engine.statistics().stages
        begin = time.perf_counter()
        outputs = await asyncio.gather(
            *(self.engine.generate("", params, audios=[(each, rate)]) for each in samples)
        )
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "texts": [output.text for output in outputs],
            "tokens": [list(output.token_ids) for output in outputs],
            "stages_s": self._stages_since(before),
        }

    async def close(self) -> Answer:
        await self.engine.aclose()
        return {}


if __name__ == "__main__":
    serve(OurEngine)
