"""Every architecture of transformers' generating models, tiny and random: what becomes of it here.

    HF_HUB_OFFLINE=1 PYTHONPATH=. python -m tests.parity.sweep [--mapping NAME] [--jobs N]
        [--json FILE] [--table FILE] [ARCHITECTURE ...]

Each is tried in a process of its own, with a time limit. A line of JSON for each: `equal`: it has
the tokens of transformers' `generate`, in chunks of 64, 13 and 5 tokens, with caches cold and warm;
`differs`: it has not; `refused`: by a ModelLoadError, in the engine's words; `unbuilt`: no tiny
model of this script's is one that transformers makes and runs, or its answers do not depend on its
inputs, which proves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers.models.auto import modeling_auto

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import InvalidRequestError, ModelLoadError, UnsupportedModalityError
from aioengine.models.by_cache.caches import CacheSpecs
from aioengine.models.runtime.registry import choose
from tests.parity.families import MAX_TOKENS, save_folder, vocabulary
from tests.parity.shrink import shrink
from tests.parity.sweep_models import (
    OPTIONS,
    OWN_TESTS,
    RECIPES,
    Prompt,
    Unproven,
    answer,
    draw,
    media_of,
    prompts_of,
)
from tests.parity.sweep_processors import (
    NeedsTorchvision,
    build_processor,
    fit_counts,
    ids_of,
    processor_class_of,
)
from tests.processors.conftest import make_tokenizer

MAPPINGS: Mapping[str, str] = {
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT",
    "multimodal": "MULTIMODAL_LM",
    "causal": "CAUSAL_LM",
    "speech": "SPEECH_SEQ_2_SEQ",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
}
BUDGETS = (64, 13, 5)
VERDICTS = ("equal", "refused", "unbuilt", "differs")
MOST_WEIGHTS = 1 << 25
LIMIT_S = 240
SPREADS = (0.15, 0.3, 0.5)
"""Of weights, the first at which answers depend on inputs."""


@dataclass(frozen=True)
class Row:
    """What became of one architecture."""

    architecture: str
    verdict: str
    reason: str
    impl: str = ""
    way: str = ""
    """"native": by a class of its own, "flat": on a flat batch, "by cache": a call a chunk."""
    mappings: Sequence[str] = field(default=())


def architectures(mapping: str) -> list[str]:
    """The classes of a mapping, each once."""
    groups = getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[mapping]}_MAPPING_NAMES").values()
    names = {name for group in groups for name in ([group] if isinstance(group, str) else group)}
    return sorted(names)


def make(architecture: str) -> tuple[Any, Any, str]:
    """The tiny model, its processor (else its tokenizer), and the medium that it takes."""
    if architecture in RECIPES:
        processor = RECIPES[architecture].processor()
        with torch.random.fork_rng(devices=[]):
            return RECIPES[architecture].model(processor.tokenizer), processor, "image"
    model_class, options = getattr(hf, architecture), OPTIONS.get(architecture, {})
    config = model_class.config_class(**options.get("config", {}))
    processor_class = processor_class_of(options.get("model_type", config.model_type))
    medium = media_of(model_class, config, processor_class)
    if medium == "text":
        processor = tokenizer = make_tokenizer("bytes")
        ids: dict[str, int] = {}
    else:
        vision = getattr(config, "vision_config", None)
        patch = getattr(vision, "patch_size", 14)
        patch = min(patch if isinstance(patch, int) else 14, 16)
        made = options.get("make")
        processor = made() if made else build_processor(processor_class, config, patch, options)
        tokenizer = processor.tokenizer
        ids = ids_of(config, processor, options.get("words", {}))
    small = shrink(model_class, config, vocabulary(tokenizer), ids)
    with torch.device("meta"):
        if sum(each.numel() for each in model_class(small).parameters()) > MOST_WEIGHTS:
            raise ValueError("parts of it are not small")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(small)
    return model, processor, medium


def engine_options(takes_media: bool) -> dict[str, Any]:
    """Small blocks, so that few tokens make many; some models know few positions."""
    longest = 1024 if takes_media else 200
    return {
        "device": "cpu", "block_size": 4, "kv_cache_bytes": 64 << 20, "max_model_len": longest,
    }  # fmt: skip


async def serve(
    folder: Path, prompts: Sequence[Prompt], budget: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], str, str]:
    """The tokens that the engine generates, at first and again; whose class it runs, and how."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    found = []
    options = engine_options(any(each.media for each in prompts))
    async with AsyncEngine.from_pretrained(
        folder, max_num_batched_tokens=budget, **options
    ) as engine:
        for _ in range(2):
            outputs = await asyncio.gather(
                *(engine.generate(each.text, params, **each.media) for each in prompts)
            )
            found.append([output.token_ids for output in outputs])
        impl = engine.statistics().model_impl
        assert engine._core is not None
        is_cached = isinstance(engine._core.loaded.runner.model.specs, CacheSpecs)
        way = "native" if impl == "native" else "flat"
        return found[0], found[1], impl, "by cache" if is_cached else way


async def processor_in(folder: Path, medium: str) -> Any:
    """What the engine uses of HF's. Raises ModelLoadError where it does not start."""
    options = engine_options(medium != "text")
    async with AsyncEngine.from_pretrained(folder, **options) as engine:
        info = engine.processor.info
        return info.get_tokenizer() if medium == "text" else info.get_hf_processor()


def judge(architecture: str) -> Row:
    """Try one architecture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model, processor, medium = make(architecture)
            draw(model, SPREADS[0])
            if medium == "image" and architecture not in RECIPES:
                fit_counts(model, processor)
            save_folder(model, processor, folder)
        except LookupError as error:  # nothing processes its media here; may be it is no matter
            refusal = _refused_anyway(architecture, isinstance(error, NeedsTorchvision))
            return Row(architecture, "refused" if refusal else "unbuilt", refusal or str(error))
        except Exception as error:  # whatever a class raises that is given small sizes
            return Row(architecture, "unbuilt", _said(error))
        try:
            theirs = asyncio.run(processor_in(folder, medium))
        except ModelLoadError as error:
            return Row(architecture, "refused", _refusal(error, name))
        except Exception as error:
            return Row(architecture, "differs", _said(error))
        try:
            prompts = expected_of(model, theirs, architecture, medium, folder)
        except Exception as error:
            return Row(architecture, "unbuilt", f"transformers: {_said(error)}")
        return compare(architecture, folder, prompts, medium)


def expected_of(
    model: Any, processor: Any, architecture: str, medium: str, folder: Path
) -> list[Prompt]:
    """Prompts with transformers' tokens, at the first spread where these depend on the inputs."""
    for spread in SPREADS:
        draw(model, spread)
        model.save_pretrained(folder)
        if getattr(model, "_keys_to_ignore_on_save", None):  # tables that are made, not read
            model = type(model).from_pretrained(folder, dtype=model.dtype).eval()
        heard = medium == "audio" and model.config.is_encoder_decoder
        asked = prompts_of(processor, architecture, medium, heard=heard)
        prompts = answer(model, processor, asked, architecture)
        told = {each.expected for each in prompts if each.expected}
        seen = {each.expected for each in prompts if each.text == prompts[0].text}
        if len(told) * 2 > len(prompts) and (medium == "text" or len(seen) > 1):
            return prompts
    raise Unproven(f"its answers do not depend on its {medium}: {len(told)} of {len(prompts)}")


def compare(architecture: str, folder: Path, prompts: Sequence[Prompt], medium: str) -> Row:
    """The engine's tokens beside transformers', for every budget."""
    tried = []
    impl = way = ""
    for budget in BUDGETS:
        try:
            *both, impl, way = asyncio.run(serve(folder, prompts, budget))
        except ModelLoadError as error:
            return Row(architecture, "refused", f"{error!s:.400}", impl, way)
        except UnsupportedModalityError:
            fewer = [each for each in prompts if all(len(v) < 2 for v in each.media.values())]
            if len(fewer) == len(prompts):
                raise
            return compare(architecture, folder, fewer, medium)
        except InvalidRequestError as error:
            if "max_num_batched_tokens" in str(error) and tried:
                continue  # a span that no step of so few tokens holds
            return Row(architecture, "differs", _said(error), impl, way)
        except Exception as error:
            return Row(architecture, "differs", _said(error), impl, way)
        for found in both:
            for prompt, tokens in zip(prompts, found, strict=True):
                if tuple(tokens[: len(prompt.expected)]) != prompt.expected:
                    what = f"{list(tokens)} and not {list(prompt.expected)}, budget {budget}"
                    return Row(architecture, "differs", f"{what}, {prompt.text!r:.40}", impl, way)
        tried.append(budget)
    different = len({each.expected for each in prompts})
    what = f"{medium}, {len(prompts)} prompts, {different} answers, chunks {tried}"
    return Row(architecture, "equal", what, impl, way)


def _refused_anyway(architecture: str, is_unbuilt: bool) -> str:
    """Why the engine refuses it before anything is read but its config; else nothing.

    `is_unbuilt`: it would be built elsewhere, and only its kind is looked at.
    """
    model_class = getattr(hf, architecture)
    try:
        config = shrink(model_class, model_class.config_class(), 400, {})
        config.architectures = [architecture]
        chosen = choose(config).model_class
        if not is_unbuilt:
            chosen.probe(config)
    except ModelLoadError as error:
        is_lacking = isinstance(error.__cause__, ImportError)  # a library that is not here
        return "" if is_lacking else f"{error!s:.400}"
    except Exception:  # the rules make no config of it
        return ""
    return ""


def _refusal(error: ModelLoadError, folder: str) -> str:
    return str(error).replace(folder, "a tiny model")[:400]


def _said(error: BaseException) -> str:
    cause = error.__cause__
    more = f" ({type(cause).__name__}: {cause!s:.200})" if cause is not None else ""
    return f"{type(error).__name__}: {error!s:.250}{more}"


def in_a_process(architecture: str) -> Row:
    """`judge` in a process of its own."""
    if architecture in OWN_TESTS:
        return Row(architecture, "equal", f"by tests/parity/{OWN_TESTS[architecture]}.py")
    if not hasattr(hf, architecture):
        return Row(architecture, "unbuilt", "no such class")
    command = [sys.executable, "-m", "tests.parity.sweep", "--one", architecture]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Row(architecture, "unbuilt", f"not done in {LIMIT_S} s")
    try:
        return Row(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return Row(architecture, "unbuilt", f"its process ended: {done.stderr[-200:]}")


def counts_by_mapping(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Counter[str]]]:
    """Verdicts of each mapping."""
    for mapping in MAPPINGS:
        counted = Counter(row["verdict"] for row in rows if mapping in row["mappings"])
        if counted:
            yield mapping, counted


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Counts, and a line for each architecture."""
    lines = [f"| mapping | {' | '.join(VERDICTS)} |", "|---" * (len(VERDICTS) + 1) + "|"]
    for mapping, counted in counts_by_mapping(rows):
        lines.append(f"| {mapping} | {' | '.join(str(counted[each]) for each in VERDICTS)} |")
    lines += ["", "| architecture | mappings | verdict | |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (VERDICTS.index(row["verdict"]), row["architecture"])):
        reason = " ".join(row["reason"].split()).replace("|", "\\|")
        cells = f"`{row['architecture']}` | {', '.join(row['mappings'])} | {row['verdict']}"
        lines.append(f"| {cells} | {reason} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Try what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--mapping", choices=MAPPINGS, action="append")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    if given.one:
        with contextlib.redirect_stdout(io.StringIO()):
            row = judge(given.one)
        print(json.dumps(vars(row)))  # noqa: T201
        return
    of = {mapping: set(architectures(mapping)) for mapping in MAPPINGS}
    names = given.names or sorted(set().union(*(of[each] for each in given.mapping or MAPPINGS)))
    rows = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for row in pool.map(in_a_process, names):
            found = [mapping for mapping, known in of.items() if row.architecture in known]
            rows.append({**vars(row), "mappings": found})
            print(json.dumps(rows[-1]), flush=True)  # noqa: T201
    if given.json:
        made = {
            "made": f"{date.today()}",
            "transformers": hf.__version__,
            "torch": torch.__version__,
        }
        if hf.utils.is_torchvision_available():
            made["torchvision"] = version("torchvision")
        lines = [made, *sorted(rows, key=lambda row: row["architecture"])]
        given.json.write_text("".join(json.dumps(each) + "\n" for each in lines))
    if given.table:
        given.table.write_text(table(rows))
    for mapping, counted in counts_by_mapping(rows):
        print(mapping, dict(counted))  # noqa: T201


if __name__ == "__main__":
    main()
