"""Perplexity of a text by GGUF files, beside llama.cpp's with the same files.

    PYTHONPATH=. HF_HUB_OFFLINE=1 python benchmarks/perplexity.py A.gguf B.gguf --llama BIN \
        [--text README.md] [--full-inputs] [--kv-cache-dtype int8]
    PYTHONPATH=. HF_HUB_OFFLINE=1 python benchmarks/perplexity.py FOLDER --quantization int4

BIN holds `llama-perplexity` (docs/benchmarks.md says how it is built). As it does, ours cuts the
text into pieces of 512 tokens and counts the second half of each; both get the same tokens. Ours
goes through `AsyncEngine.generate`, in bfloat16 unless `--dtype` says otherwise. The last line is
JSON: for each file both perplexities and ours over llama.cpp's. Keys and values in 8 bits are in
both (llama.cpp's q8_0). Without `--llama` it is ours alone, and a FILE may be a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, SamplingParams

PIECE = 512


async def own(file: Path, text: str, options: dict[str, Any]) -> float:
    """Perplexity by the engine."""
    async with AsyncEngine.from_pretrained(file, max_model_len=2 * PIECE, **options) as engine:
        ids = engine.tokenizer(text).input_ids
        pieces = [ids[i : i + PIECE] for i in range(0, len(ids) - PIECE + 1, PIECE)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        outputs = await asyncio.gather(*(engine.generate(each, params) for each in pieces))
    found = []
    for output in outputs:
        known = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        found += [each[i].logprob for i, each in list(known)[PIECE // 2 :] if each is not None]
    return math.exp(-sum(found) / len(found))


def theirs(program: Path, file: Path, text: Path, kv_cache_dtype: str) -> float:
    """Perplexity by llama.cpp."""
    line = [str(program), "-m", str(file), "-f", str(text), "-c", str(PIECE), "-b", str(PIECE)]
    if kv_cache_dtype == "int8":
        line += ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    match = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    assert match is not None, done.stderr[-1000:]
    return float(match[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of a folder's weights")
    parser.add_argument("--full-inputs", action="store_true", help="inputs are not rounded")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    options = {
        "device": "cpu",
        "dtype": args.dtype,
        "quantization": args.quantization,
        "quantize_activations": not args.full_inputs,
        "kv_cache_dtype": args.kv_cache_dtype,
        "enable_prefix_caching": False,
    }
    results = []
    for file in args.files:
        ours = asyncio.run(own(file, args.text.read_text(), options))
        result: dict[str, Any] = {"file": file.name, "ours": ours}
        if args.llama is not None:
            program = args.llama / "llama-perplexity"
            other = theirs(program, file, args.text, args.kv_cache_dtype)
            result |= {"llama.cpp": other, "ratio": ours / other}
        print(", ".join(f"{name} {value:.4f}" for name, value in list(result.items())[1:]), file)
        results.append(result)
    names = ("dtype", "quantization", "full_inputs", "kv_cache_dtype")
    settings = {name: getattr(args, name) for name in names}
    print(json.dumps({**settings, "files": results}))


if __name__ == "__main__":
    main()
