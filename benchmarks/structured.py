"""How long grammars take to compile, and the mask of each token: llguidance, and xgrammar if it is
installed and asked for.

A set of JSON schemas from small to large, compiled cold; then a text that follows each is taken
token by token, with the mask before each. The tokenizer is the demo model's unless a folder is
given. In turns within each round, medians. Last line: JSON.

    python benchmarks/structured.py [--tokenizer FOLDER] [--against xgrammar] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from aioengine import demo_model


def schemas() -> dict[str, tuple[dict[str, Any], str]]:
    """Name -> schema and a text that follows it."""

    def record(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
        fields: dict[str, Any] = {
            f"field_{i}": {"type": "string", "maxLength": 40} if i % 2 else {"type": "integer"}
            for i in range(count)
        }
        value = {name: "some text" if i % 2 else i * 37 for i, name in enumerate(fields)}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        return {**schema, "additionalProperties": False}, value

    found: dict[str, Any] = {}
    for name, count in (("2 fields", 2), ("20 fields", 20), ("200 fields", 200)):
        found[name] = record(count)
    inner, value = record(3)
    found["list of records"] = ({"type": "array", "items": inner}, [value] * 10)
    names = [f"name {i}" for i in range(500)]
    found["choice of 500"] = ({"enum": names}, names[250])
    found["any object"] = ({"type": "object"}, {"a": [1, {"b": None}], "c": "text"})
    return {name: (schema, json.dumps(text)) for name, (schema, text) in found.items()}


class Library(Protocol):
    def compile(self, schema: str) -> Any: ...

    def mask(self, matcher: Any) -> None: ...

    def take(self, matcher: Any, token_id: int) -> bool: ...


class Llguidance:
    def __init__(self, tokenizer: Any, vocab: int) -> None:
        from llguidance import hf

        self._tokenizer = hf.from_tokenizer(tokenizer, n_vocab=vocab)

    def compile(self, schema: str) -> Any:
        from llguidance import LLMatcher

        style: Any = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=style)
        return LLMatcher(self._tokenizer, grammar, log_level=0)

    def mask(self, matcher: Any) -> None:
        matcher.compute_bitmask()

    def take(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.consume_token(token_id))


class Xgrammar:
    def __init__(self, tokenizer: Any, vocab: int) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab)
        self._make_matcher = xgrammar.GrammarMatcher

    def compile(self, schema: str) -> Any:
        compiled = self._compiler.compile_json_schema(
            schema, any_whitespace=False, separators=(", ", ": ")
        )
        return self._make_matcher(compiled)

    def mask(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._bitmask)

    def take(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id))


def measure(library: Library, schema: str, token_ids: list[int]) -> dict[str, float]:
    """Milliseconds to compile, and microseconds of the masks: the median and the worst."""
    begin = time.perf_counter()
    matcher = library.compile(schema)
    library.mask(matcher)
    compiled = time.perf_counter() - begin
    masks = []
    for token_id in token_ids:
        begin = time.perf_counter()
        library.mask(matcher)
        masks.append(time.perf_counter() - begin)
        assert library.take(matcher, token_id), "a token of a text that follows was refused"
    return {
        "compile_ms": compiled * 1e3,
        "mask_us": statistics.median(masks) * 1e6,
        "worst_mask_us": max(masks) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, default=demo_model())
    parser.add_argument("--against", choices=["xgrammar"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    vocab = -(-len(tokenizer) // 32) * 32
    setup: dict[str, float] = {}
    libraries: dict[str, Library] = {}
    kinds: dict[str, Any] = {"llguidance": Llguidance}
    if args.against:
        kinds["xgrammar"] = Xgrammar
    for name, kind in kinds.items():
        begin = time.perf_counter()
        libraries[name] = kind(tokenizer, vocab)
        setup[name] = round((time.perf_counter() - begin) * 1e3, 1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for case, (schema, text) in schemas().items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in libraries}
        for _ in range(args.rounds):
            for name, library in libraries.items():
                rounds[name].append(measure(library, json.dumps(schema), ids))
        results[case] = {
            name: {
                key: round(statistics.median(found[key] for found in all_found), 2)
                for key in all_found[0]
            }
            for name, all_found in rounds.items()
        }
        print(case, f"({len(ids)} tokens)", results[case])
    settings = {"tokenizer": args.tokenizer.name, "vocab": vocab, "torch": torch.__version__}
    print(json.dumps({"settings": settings, "setup_ms": setup, "results": results}))


if __name__ == "__main__":
    main()
