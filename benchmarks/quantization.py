"""What weights of few bits change in a model's logits, and how fast they are.

    PYTHONPATH=. python benchmarks/quantization.py FOLDER [--tokens 600] [--text README.md]

Runs a text through a causal language model of transformers in float32, plain and with its weights
in 8 and 4 bits, with inputs that are rounded to 8 bits and with full ones; and multiplies one
weight at 1, 16 and 256 rows, packed in bfloat16 and in few bits, on one thread, in CPU time. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from aioengine.kernels.grouped import pack_grouped, round_weight
from aioengine.kernels.linear import PackedLinear, pack_linear
from aioengine.models.fusion.packed_linear import own_layers, pack_layers
from aioengine.models.fusion.tied_head import pack_tables
from aioengine.models.quantization.rounding import Rounding, round_weights

ROOT = Path(__file__).resolve().parents[1]
OUT, IN = 2816, 1024
FORMS = {
    f"int{bits}{', full inputs' if is_full else ''}": Rounding(bits=bits, has_full_inputs=is_full)
    for bits in (8, 4)
    for is_full in (False, True)
}


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """Of each token by those before it."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).exp())


@torch.inference_mode()
def differences(folder: Path, text: str, num_tokens: int) -> dict[str, dict[str, float]]:
    """Of a model's logits, by form."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    model = load()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :num_tokens]
    plain = model(input_ids=ids).logits[0]
    log_p, largest = plain.log_softmax(-1), float(plain.abs().max())
    found = {"float32": {"perplexity": perplexity(plain, ids[0]), "largest_logit": largest}}
    for name, form in FORMS.items():
        model = load()
        layers = own_layers(model, torch.nn.Linear).values()
        round_weights(model, model.base_model, layers, form, keep=False)
        pack_layers(model)
        pack_tables(model)
        other = model(input_ids=ids).logits[0]
        error, log_q = (other - plain).abs() / largest, other.log_softmax(-1)
        found[name] = {
            "perplexity": perplexity(other, ids[0]),
            "max_error_share": float(error.max()),
            "mean_error_share": float(error.mean()),
            "same_top_1": float((plain.argmax(-1) == other.argmax(-1)).float().mean()),
            "mean_kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        }
    return found


def fastest_s(work: Callable[[], object], budget_s: float = 0.3) -> float:
    """Seconds of CPU time."""
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
    weights = [torch.randn(OUT, IN).bfloat16() for _ in range(16)]  # more than caches hold

    def pack(form: Rounding, weight: Tensor) -> PackedLinear:
        grouped = round_weight(weight, form.bits)
        return pack_grouped(replace(grouped, has_full_inputs=form.has_full_inputs))

    packed = {"bfloat16": [each for each in map(pack_linear, weights) if each is not None]}
    packed |= {name: [pack(form, each) for each in weights] for name, form in FORMS.items()}
    found: dict[str, dict[int, float]] = {}
    for name, matmuls in packed.items():
        found[name] = {}
        for rows in (1, 16, 256):
            x = torch.randn(rows, IN).bfloat16()
            taken = fastest_s(lambda x=x, matmuls=matmuls: [each(x) for each in matmuls])
            found[name][rows] = round(taken / len(matmuls) * 1e3, 3)
    return found


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--text", type=Path, default=ROOT / "README.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logits = differences(args.folder, args.text.read_text(), args.tokens)
    print(json.dumps(logits), flush=True)
    print(json.dumps({"logits": logits, "ms": speeds()}))


if __name__ == "__main__":
    main()
