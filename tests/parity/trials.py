"""Trials of right models: how much of their tolerance they use, over families, dtypes and seeds.

    PYTHONPATH=. HF_HUB_OFFLINE=1 .venv/bin/python -m tests.parity.trials [--loads N] [--few-layers]

Each load draws the weights of a family's tiny model anew, narrow or wide, and loads it as an engine
does, packed and fused, in a dtype of its turn. The last line is JSON: how many were refused (none
may be), and the largest share of the tolerance by dtype.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from aioengine.execution import load_trial
from aioengine.execution.load_trial import BLIND, Comparison, Trial
from aioengine.kernels.attention import select_backend
from aioengine.models.quantization.rounding import Rounding
from aioengine.models.runtime.checkpoint import read_config
from aioengine.models.runtime.registry import resolve
from aioengine.processors.info import load_context
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from tests.parity import test_encdec, test_gemma_n4, test_text_families
from tests.parity.families import FAMILIES, TEXT, save, vocabulary
from tests.parity.listener_families import save_listener, tokenizer_for
from tests.processors.conftest import make_tokenizer
from tests.support.tiny import draw_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, "int8", "int4")
ROUNDINGS = {"int8": Rounding(bits=8), "int4": Rounding(bits=4)}
STDS = (0.15, 0.05, 0.25)


def save_text(build: Callable[[Mapping[str, Any]], Any], folder: Path) -> Any:
    """A decoder without media, and its tokenizer."""
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):
        model = build({**TEXT, "vocab_size": vocabulary(tokenizer)})
    model.config.architectures = [type(model).__name__]
    tokenizer.save_pretrained(folder)
    return model


def makers() -> dict[str, Callable[[Path], Any]]:
    """By name, what writes a family's folder and gives its transformers model."""
    found: dict[str, Callable[[Path], Any]] = {}
    found |= {name: partial(save, family) for name, family in FAMILIES.items()}
    found |= {
        f"text {name}": partial(save_text, build)
        for name, build in test_text_families.FAMILIES.items()
    }
    found |= {
        name: lambda folder, build=build: test_encdec.save(build, folder)[0]
        for name, build in test_encdec.FAMILIES.items()
    }
    found |= {
        f"text {name}": partial(test_gemma_n4.save_text, name) for name in test_gemma_n4.MODELS
    }
    found |= {
        name: lambda folder, name=name: save_listener(name, folder, tokenizer_for(name))[0]
        for name in ("whisper", "moonshine")
    }
    return found


def redraw(folder: Path, model: Any, seed: int, std: float) -> None:
    """Give the saved model other weights."""
    draw_weights(model, seed=seed, std=std)
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)


def compare(
    folder: Path, kind: torch.dtype | str, seed: int, backend: str = "auto"
) -> list[Comparison]:
    """One load of the model in `folder`, and its trial."""
    rounding = ROUNDINGS.get(kind)
    dtype = kind if rounding is None else torch.bfloat16
    assert isinstance(dtype, torch.dtype)
    hf_config = read_config(folder, revision=None, trust_remote_code=False)
    model_class = resolve(hf_config.architectures).chosen_for(hf_config)
    info = MULTIMODAL_REGISTRY.find_info(model_class)
    context = load_context(folder, hf_config=hf_config, info=info)
    front = MULTIMODAL_REGISTRY.create_processor(model_class, context)
    specs = model_class.probe(hf_config)
    module = model_class.load_module(folder, hf_config=hf_config, dtype=dtype, device="cpu")
    if rounding is not None:
        model_class.around(module).round_weights(rounding, keep=True)
    trial = Trial(
        model_class,
        module,
        specs,
        front,
        max_model_len=None,
        is_quantized=rounding is not None,
        seed=seed,
    )
    model = model_class(module, specs=specs)
    chosen = select_backend(backend, torch.device("cpu"))
    fault = trial.find_window_fault(model, block_size=16, backend=chosen)
    assert fault is None, fault
    model.pack()
    return trial.compare(model, block_size=16, backend=chosen)


def main() -> None:
    """Trials of many models."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loads", type=int, default=1000)
    parser.add_argument("--one", choices=makers())
    parser.add_argument("--few-layers", action="store_true", help="as of large models")
    arguments = parser.parse_args()
    if arguments.few_layers:
        load_trial.HEAVY_BYTES = -1
    torch.set_num_threads(1)
    chosen = {n: make for n, make in makers().items() if arguments.one in (None, n)}
    loads = failed = 0
    shares: dict[str, list[float]] = defaultdict(list)
    blind: Counter[str] = Counter()
    with TemporaryDirectory() as root:
        with redirect_stderr(io.StringIO()):
            models = {name: make(Path(root) / name) for name, make in chosen.items()}
        for seed in itertools.count(1):
            for name, model in models.items():
                std = STDS[seed % len(STDS)]
                redraw(Path(root) / name, model, seed, std)
                for kind in DTYPES:
                    compared = compare(Path(root) / name, kind, seed)
                    loads += 1
                    seen = [each for each in compared if each.tolerance <= BLIND]
                    blind[str(kind)] += len(compared) - len(seen)
                    share = max((each.share for each in seen), default=0.0)
                    shares[str(kind)].append(share)
                    if share > 0.6:
                        print(f"{name} {kind} seed {seed} std {std}: {share:.2f}", flush=True)  # noqa: T201
                    failed += share > 1
                    if loads == arguments.loads:
                        result = {
                            "loads": loads,
                            "over_once": failed,
                            "largest_share": {k: round(max(v), 3) for k, v in shares.items()},
                            "rows_not_judged": dict(blind),
                        }
                        print(json.dumps(result))  # noqa: T201
                        return


if __name__ == "__main__":
    main()
