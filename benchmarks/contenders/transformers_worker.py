"""transformers' `generate` as a contender: one padded batch, or one request after the other."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from lag_probe import Lag, probe, settle, summary
from protocol import Answer, Contender, decode, read_images, serve


class Transformers(Contender):
    async def load(self, model: str, dtype: str, threads: int, kind: str, **_: Any) -> Answer:
        begin = time.perf_counter()
        import torch
        import transformers

        torch.set_num_threads(threads)
        is_speech = kind == "whisper"
        cls = (
            transformers.WhisperForConditionalGeneration
            if is_speech
            else transformers.AutoModelForImageTextToText
        )
        self.torch = torch
        self.model = cls.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.processor = self._load_processor(transformers, model)
        if not is_speech:
            self.processor.tokenizer.padding_side = "left"
        self.pool = ThreadPoolExecutor(threads)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"ready_s": time.perf_counter() - begin, "versions": versions}

    def _load_processor(self, transformers: Any, model: str) -> Any:
        """The HF processor, where torchvision is missing with our video part in place of its."""
        try:
            return transformers.AutoProcessor.from_pretrained(model)
        except (ImportError, ValueError):
            from aioengine.processors.hf.smolvlm import load_smolvlm_processor
            from aioengine.processors.hf.substitutes import load_processor

            if self.model.config.model_type == "smolvlm":
                return load_smolvlm_processor(model, {})
            return load_processor(model, self.model.config, {})

    def _generate(
        self, texts: list[str], images: list[list[Any]], max_tokens: int, **options: Any
    ) -> tuple[list[int], list[list[int]]]:
        """Prompt lengths and new tokens of one padded batch."""
        inputs = self.processor(
            text=texts,
            images=images if any(images) else None,
            return_tensors="pt",
            padding=True,
        )
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        with self.torch.inference_mode():
            output = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                **options,
            )
        new = output[:, inputs["input_ids"].shape[1] :]
        return inputs["attention_mask"].sum(1).tolist(), new.tolist()

    async def batch(
        self,
        requests: list[dict[str, Any]],
        max_tokens: int,
        is_one_by_one: bool = False,
        **_: Any,
    ) -> Answer:
        encoded = read_images(requests)
        texts = [each["text"] for each in requests]
        begin = time.perf_counter()
        if is_one_by_one:
            prompt_tokens, tokens = [], []
            for text, images in zip(texts, encoded, strict=True):
                lengths, new = self._generate([text], decode(self.pool, [images]), max_tokens)
                prompt_tokens += lengths
                tokens += new
        else:
            images = decode(self.pool, encoded)
            prompt_tokens, tokens = self._generate(texts, images, max_tokens)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "prompt_tokens": prompt_tokens, "tokens": tokens}

    async def lag(
        self, streams: list[str], requests: list[dict[str, Any]], max_tokens: int, **_: Any
    ) -> Answer:
        """Two threads: one generates for the streams as a batch, the other for the images."""
        encoded = read_images(requests)
        is_over = Event()
        counts: list[int] = []

        class Stop:
            """A streamer hears of every token; here it also stops the generation."""

            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                counts.append(len(input_ids))
                return input_ids.new_full((len(input_ids),), is_over.is_set()).bool()

        def stream() -> None:
            while not is_over.is_set():
                self._generate(streams, [[]], 512, stopping_criteria=[Stop()])

        def answer() -> None:
            for each, images in zip(requests, encoded, strict=True):
                self._generate([each["text"]], decode(self.pool, [images]), max_tokens)

        running = asyncio.create_task(asyncio.to_thread(stream))
        await asyncio.sleep(0.5)
        settle()
        counts.clear()
        lags: list[Lag] = []
        watch = asyncio.create_task(probe(lags))
        begin = time.perf_counter()
        await asyncio.to_thread(answer)
        seconds = time.perf_counter() - begin
        watch.cancel()
        is_over.set()
        await running
        return {**summary(lags), "seconds": seconds, "streamed_tokens": sum(counts)}

    async def clips(
        self,
        paths: list[str],
        max_tokens: int,
        rate: int,
        is_one_by_one: bool = False,
        is_exact: bool = False,
        **_: Any,
    ) -> Answer:
        import numpy as np

        least = {"min_new_tokens": max_tokens} if is_exact else {}
        tokens: list[list[int]] = []

        samples = [np.load(path) for path in paths]
        begin = time.perf_counter()
        texts: list[str] = []
        for some in [[each] for each in samples] if is_one_by_one else [samples]:
            inputs = self.processor.feature_extractor(some, sampling_rate=rate, return_tensors="pt")
            features = inputs["input_features"].to(self.model.dtype)
            with self.torch.inference_mode():
                output = self.model.generate(
                    features, do_sample=False, max_new_tokens=max_tokens, **least
                )
            tokens += [each[-max_tokens:] for each in output.tolist()]
            texts += self.processor.batch_decode(output, skip_special_tokens=True)
        return {"seconds": time.perf_counter() - begin, "texts": texts, "tokens": tokens}


if __name__ == "__main__":
    serve(Transformers)
