"""OpenVINO GenAI's pipeline with continuous batching as a contender."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol import Answer, Contender, decode, read_images, serve


class OpenVino(Contender):
    async def load(self, model: str, dtype: str, threads: int, kind: str, **_: Any) -> Answer:
        begin = time.perf_counter()
        import numpy as np
        import openvino
        import openvino_genai as genai

        self.genai, self.tensor, self.np = genai, openvino.Tensor, np
        precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        versions = {"openvino-genai": genai.__version__}
        self.pool = ThreadPoolExecutor(threads)
        if kind == "whisper":
            self.pipeline = genai.WhisperPipeline(Path(model), "CPU", **options)
            return {"ready_s": time.perf_counter() - begin, "versions": versions}
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(Path(model), scheduler, "CPU", options)
        return {"ready_s": time.perf_counter() - begin, "versions": versions}

    async def batch(self, requests: list[dict[str, Any]], max_tokens: int, **_: Any) -> Answer:
        encoded = read_images(requests)
        config = self.genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        begin = time.perf_counter()
        tensors = [
            [self.tensor(self.np.asarray(image)[None]) for image in each]
            for each in decode(self.pool, encoded)
        ]
        if any(tensors):
            outputs = self.pipeline.generate(
                [each["text"] for each in requests],
                images=tensors,
                generation_config=[config] * len(requests),
            )
        else:
            outputs = self.pipeline.generate(
                [each["text"] for each in requests], [config] * len(requests)
            )
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, **self._counts(outputs)}

    async def clips(
        self, paths: list[str], max_tokens: int, is_exact: bool = False, **_: Any
    ) -> Answer:
        """One clip after the other: the pipeline takes no batch."""
        config = self.pipeline.get_generation_config()
        config.max_new_tokens = max_tokens
        if is_exact:
            config.min_new_tokens, config.ignore_eos = max_tokens, True
        samples = [self.np.load(path) for path in paths]
        begin = time.perf_counter()
        outputs = [self.pipeline.generate(each.tolist(), config) for each in samples]
        seconds = time.perf_counter() - begin
        counts = [output.perf_metrics.get_num_generated_tokens() for output in outputs]
        texts = [text for output in outputs for text in output.texts]
        return {"seconds": seconds, "texts": texts, "num_tokens": counts}

    def _counts(self, outputs: list[Any]) -> Answer:
        """How long prompts and outputs were. It tells no token ids, and each output's metrics count
        what the whole batch generated."""
        metrics = [output.perf_metrics for output in outputs if hasattr(output, "perf_metrics")]
        if not metrics:
            return {}
        return {
            "prompt_tokens": [each.get_num_input_tokens() for each in metrics],
            "num_tokens": [metrics[0].get_num_generated_tokens()],
        }


if __name__ == "__main__":
    serve(OpenVino)
