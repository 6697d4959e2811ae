"""Routed experts: a layer of ours, beside transformers' own ways to run it.

    PYTHONPATH=. python benchmarks/experts.py [--rounds 5] [--experts 32] [--size 1024]
                                              [--chosen 4] [--device cuda]

One feed-forward layer of Qwen3-MoE's in bfloat16, whose router gives each token 4 experts
(`--chosen`): an expert after the other ("eager"), PyTorch's grouped matmul ("grouped_mm"), and
ours: on a CPU one operator, with weights in bfloat16, 8 and 4 bits; on a GPU blocks of rows.
All are run in turns in each round; what is printed are medians over the rounds, in milliseconds,
and ratios within a round. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from aioengine.models.fusion.routed_experts import (
    fuse_routed_layers,
    pack_expert_layers,
    route_experts,
)
from aioengine.models.quantization.rounding import Rounding, round_weights

ROWS = (1, 16, 512)
OURS = ("bf16", "int8", "int4")


def make_layer(size: int, num_experts: int, chosen: int) -> Any:
    """Draw the layer's weights."""
    config = Qwen3MoeConfig(
        hidden_size=size,
        moe_intermediate_size=size // 2,
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    layer = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).eval().requires_grad_(False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    return layer


def contenders(layer: Any) -> dict[str, Any]:
    """The layer as it is run by each."""
    found = {"eager": layer}
    grouped = found["grouped_mm"] = copy.deepcopy(layer)
    grouped.experts.config._experts_implementation = "grouped_mm"
    if layer.gate.weight.is_cuda:
        ours = found["bf16"] = copy.deepcopy(layer)
        assert route_experts(ours) == 1
        return found
    for name in OURS:
        ours = found[name] = copy.deepcopy(layer)
        if name != "bf16":
            holder = _Holder(ours)
            round_weights(holder, holder, [], [], Rounding(bits=int(name[3:])), keep=False)
        assert pack_expert_layers(ours) == fuse_routed_layers(ours) == 1
    return found


class _Holder(nn.Module):
    """A model of one layer, without embeddings."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def get_input_embeddings(self) -> None:
        return None

    def get_output_embeddings(self) -> None:
        return None


def seconds(run: Callable[[], Tensor]) -> float:
    """Of one call, at least a tenth of a second long all told."""
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < 0.1:
        if run().is_cuda:
            torch.cuda.synchronize()
        count += 1
    return spent / count


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.device(args.device):
        layers = contenders(make_layer(args.size, args.experts, args.chosen))
    results: dict[str, Any] = {}
    for count in ROWS:
        hidden = torch.randn(1, count, args.size).to(args.device, torch.bfloat16)
        rounds = []
        for number in range(args.rounds + 1):
            times = {
                name: seconds(lambda layer=layer, hidden=hidden: layer(hidden))  # type: ignore[misc]
                for name, layer in layers.items()
            }
            if number:  # the first one warms up
                rounds.append(times)
        found = {name: round(1e3 * median(each[name] for each in rounds), 3) for name in layers}
        best = [min(each["eager"], each["grouped_mm"]) for each in rounds]
        ratios = {
            name: round(median(b / each[name] for b, each in zip(best, rounds, strict=True)), 2)
            for name in OURS
            if name in layers
        }
        print(f"{count} rows, ms: {found}; over the best of transformers': {ratios}")
        results[str(count)] = {"ms": found, "over_transformers": ratios}
    print(json.dumps({"experts": args.experts, "size": args.size, "rows": results}))


if __name__ == "__main__":
    main()
