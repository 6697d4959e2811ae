"""vLLM's asynchronous engine as a contender: the front end here, the engine in its own process."""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lag_probe import Lag, probe, settle, summary
from protocol import Answer, Contender, decode_one, read_images, serve


class Vllm(Contender):
    async def load(self, model: str, dtype: str, threads: int, kind: str, **_: Any) -> Answer:
        begin = time.perf_counter()
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.library = vllm
        is_speech = kind == "whisper"
        limits = {"audio": 1} if is_speech else {"image": 8 if kind == "llava" else 1}
        if kind == "family":  # else it profiles videos too, for those that take them
            limits["video"] = 0
        arguments = AsyncEngineArgs(
            model=model,
            dtype=dtype,
            max_model_len=448 if is_speech else 4096,
            max_num_seqs=64,
            limit_mm_per_prompt=limits,
            enable_prefix_caching=not is_speech,
        )
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.pool = ThreadPoolExecutor(threads)
        if not is_speech:
            await self._generate("user: hello\nassistant:", [], 1)
        versions = {"vllm": vllm.__version__}
        return {"ready_s": time.perf_counter() - begin, "versions": versions}

    def _params(self, max_tokens: int, **options: Any) -> Any:
        from vllm.sampling_params import RequestOutputKind

        kinds = RequestOutputKind
        return self.library.SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            output_kind=kinds.DELTA if options.pop("is_streamed", False) else kinds.FINAL_ONLY,
            **options,
        )

    async def _generate(
        self, text: str, images: list[Any], max_tokens: int, *, is_exact: bool = True, **media: Any
    ) -> Any:
        params = self._params(max_tokens, ignore_eos=is_exact)
        ask = await self._render(text, images, **media)
        async for output in self.engine.generate(ask, params, str(uuid.uuid4())):
            last = output
        return last

    async def _render(self, text: str, images: list[Any], **media: Any) -> Any:
        """Tokenised and processed on the renderer's own threads, as vLLM's server does it."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        ask: Any = {"prompt": text}
        if images or media:
            ask["multi_modal_data"] = {"image": images} if images else media
        parsed = parse_model_prompt(self.engine.model_config, ask)
        (rendered,) = await self.engine.renderer.render_cmpl_async([parsed])
        return rendered

    async def _answer(self, text: str, encoded: list[bytes], max_tokens: int) -> Any:
        """Decoded on a thread, as vLLM's own server does it."""
        loop = asyncio.get_running_loop()
        images = await asyncio.gather(
            *(loop.run_in_executor(self.pool, decode_one, each) for each in encoded)
        )
        return await self._generate(text, list(images), max_tokens)

    async def _forget(self) -> None:
        await self.engine.reset_mm_cache()
        await self.engine.reset_prefix_cache()
        await self.engine.reset_encoder_cache()

    async def batch(
        self, requests: list[dict[str, Any]], max_tokens: int, is_cold: bool, **_: Any
    ) -> Answer:
        encoded = read_images(requests)
        if is_cold:
            await self._forget()
        begin = time.perf_counter()
        outputs = await asyncio.gather(
            *(
                self._answer(each["text"], images, max_tokens)
                for each, images in zip(requests, encoded, strict=True)
            )
        )
        return {
            "seconds": time.perf_counter() - begin,
            "prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

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
        if is_cold:
            await self._forget()
        text = "<|startoftranscript|><|notimestamps|>"
        begin = time.perf_counter()
        outputs = await asyncio.gather(
            *(
                self._generate(text, [], max_tokens, is_exact=is_exact, audio=(each, rate))
                for each in samples
            )
        )
        return {
            "seconds": time.perf_counter() - begin,
            "texts": [output.outputs[0].text for output in outputs],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

    async def lag(
        self, streams: list[str], requests: list[dict[str, Any]], max_tokens: int, **_: Any
    ) -> Answer:
        encoded = read_images(requests)
        await self._forget()  # it may have been asked the same just before
        running = [asyncio.create_task(self._stream(text)) for text in streams]
        await asyncio.sleep(0.5)
        settle()
        lags: list[Lag] = []
        watch = asyncio.create_task(probe(lags))
        begin = time.perf_counter()
        await asyncio.gather(
            *(
                self._answer(each["text"], images, max_tokens)
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
        count = 0
        params = self._params(512, ignore_eos=True, is_streamed=True)
        try:
            while True:
                ask = await self._render(text, [])
                async for output in self.engine.generate(ask, params, str(uuid.uuid4())):
                    count += len(output.outputs[0].token_ids)
        except asyncio.CancelledError:
            return count

    async def close(self) -> Answer:
        if hasattr(self, "engine"):  # else it did not start
            self.engine.shutdown()
        return {}


if __name__ == "__main__":
    serve(Vllm)
