"""What 8-bit linear layers change in a model's logits, and how fast they are.

    PYTHONPATH=. python benchmarks/quantization.py FOLDER [--tokens 300] [--text README.md]

Runs a text through a causal language model of transformers in float32, plain and with its
decoder's linear layers in 8 bits, and multiplies one weight at 1, 16 and 256 rows in packed float32
and in 8 bits, on one thread, in CPU time: with the weights alone quantised, and with the inputs
too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aioengine.kernels.int8 import dynamic, weight_only
from aioengine.kernels.linear import Way, pack_linear
from aioengine.models.fusion.packed_linear import pack_layers

ROOT = Path(__file__).resolve().parents[1]
OUT, IN = 2816, 1024
WAYS: dict[str, Way] = {"weight_only": weight_only, "dynamic": dynamic}


@torch.inference_mode()
def difference(folder: Path, text: str, num_tokens: int, way: Way) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :num_tokens]
    plain = model(input_ids=ids).logits[0]
    pack_layers(model, way, without=(model.get_output_embeddings(),))
    other = model(input_ids=ids).logits[0]
    error = (other - plain).abs()
    log_p, log_q = plain.log_softmax(-1), other.log_softmax(-1)
    return {
        "tokens": ids.shape[1],
        "largest_logit": float(plain.abs().max()),
        "max_error_share": float(error.max() / plain.abs().max()),
        "mean_error_share": float(error.mean() / plain.abs().max()),
        "same_top_1": float((plain.argmax(-1) == other.argmax(-1)).float().mean()),
        "mean_kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
    }


def fastest_s(work: Callable[[], object], budget_s: float = 0.3) -> float:
    work()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < budget_s:
        before = time.thread_time()
        work()
        times.append(time.thread_time() - before)
    return min(times)


@torch.inference_mode()
def speeds() -> dict[str, dict[int, float]]:
    """Milliseconds of a matmul by number of rows."""
    weights = [torch.randn(OUT, IN) for _ in range(8)]  # more than caches hold
    found: dict[str, dict[int, float]] = {}
    for name, pack in (("float32", pack_linear), *WAYS.items()):
        packed = [each for each in map(pack, weights) if each is not None]
        found[name] = {}
        for rows in (1, 16, 256):
            x = torch.randn(rows, IN)
            taken = fastest_s(lambda x=x, packed=packed: [each(x) for each in packed])
            found[name][rows] = round(taken / len(packed) * 1e3, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--text", type=Path, default=ROOT / "README.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = args.text.read_text()
    logits = {name: difference(args.folder, text, args.tokens, way) for name, way in WAYS.items()}
    print(json.dumps(logits), flush=True)
    print(json.dumps({"logits": logits, "ms": speeds()}))


if __name__ == "__main__":
    main()
