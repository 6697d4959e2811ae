"""vLLM on the same GPU, where it is installed: decoding with random weights of the same shapes.

    python benchmarks/gpu_vllm.py

A step's time is that of 64 more tokens of each request, divided by 64. Last line: JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from null_device import MODELS
from transformers import AutoConfig

CONTEXT = 300
FEW, MANY = 16, 80


def measure(name: str) -> list[dict[str, Any]]:
    """Milliseconds of a decode step, by the number of requests."""
    vllm = import_module("vllm")
    architecture, kind, sizes = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        config = AutoConfig.for_model(kind, architectures=[architecture], **sizes)
        config.dtype = "bfloat16"
        config.save_pretrained(Path(scratch))
        engine = vllm.LLM(
            scratch, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            enable_prefix_caching=False, gpu_memory_utilization=0.8,
        )  # fmt: skip
        rows = []
        for requests in (1, 8, 32, 128):
            prompts = [
                {"prompt_token_ids": [(i * 7 + number) % 1000 for i in range(CONTEXT)]}
                for number in range(requests)
            ]
            times = []
            for count in (FEW, FEW, MANY):
                params = vllm.SamplingParams(
                    temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
                )
                begin = time.perf_counter()
                engine.generate(prompts, params, use_tqdm=False)
                times.append(time.perf_counter() - begin)
            step = (times[2] - times[1]) / (MANY - FEW)
            rows.append({"vllm": name, "requests": requests, "ms": round(step * 1e3, 2)})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    print(json.dumps({"vllm": measure("qwen2-7b")}))


if __name__ == "__main__":
    main()
