"""How far the engine's logits are from a reference's: writes docs/parity.json.

    PYTHONPATH=. HF_HUB_OFFLINE=1 .venv/bin/python -m tests.parity.measure

A row of measured_rows.py names a fixture of a parity test, which saves a tiny model and asks the
reference for its greedy tokens: transformers' `generate`, or where transformers has no class for it
a plain forward of our own definition, in float64 (where a family runs in nothing wider, in
float32). Its logits are noted on the way, and those of a copy in float32, which show how much
rounding alone does. Then the engine is asked the same in float32, two prompts at a time in small
chunks over small pages, and made to choose the reference's tokens, so that every position can be
compared.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import GenerationMixin

from aioengine import AsyncEngine, SamplingParams
from aioengine.execution.model_runner import ModelRunner
from tests.parity.measured_rows import ROWS, SAME, Ask, Row

FILE = Path(__file__).parents[2] / "docs" / "parity.json"
MASKED = -1e30
"""Below it a logit is not one: its token is never next."""
BOUND = 1e-4
"""Of an error, as a part of the largest logit, or of 1 where all are smaller."""


@dataclass(frozen=True)
class Reference:
    """Greedy tokens, and the logits [n, vocab] that each was chosen by.

    `narrow`: the same reference's in float32, up to the first other token; none where not asked.
    """

    tokens: Sequence[int]
    logits: Tensor
    narrow: Tensor | None = None


@dataclass(frozen=True)
class Figure:
    """Of one row: the largest difference of logits, and the largest logit of the reference.

    `float32`: the largest difference of the reference in float32 from itself;
    `takes`: modality -> items in a prompt (None: any number), as the engine says;
    `measured`: the modalities of each kind of prompt that was asked;
    `against`: whose logits, and their type: float32 where one prompt's are.
    """

    architecture: str
    error: float
    scale: float
    float32: float | None
    takes: Mapping[str, int | None]
    measured: frozenset[frozenset[str]]
    against: tuple[str, str]

    @property
    def share(self) -> float:
        """What is bounded."""
        return self.error / max(1.0, self.scale)


# ---- the reference


@contextmanager
def noted_generate() -> Iterator[list[Reference]]:
    """What transformers' `generate` answers while this lasts, call by call.

    Its own `output_logits` would be rounded to float32.
    """
    found: list[Reference] = []
    generate = GenerationMixin.generate

    def run(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Reference]:
        rows: list[Tensor] = []
        hook = model.register_forward_hook(lambda *call: rows.append(call[-1].logits[0, -1]))
        try:
            output = generate(model, *args, **kwargs)
        finally:
            hook.remove()
        sequences = output if isinstance(output, Tensor) else output.sequences
        return output, Reference(sequences[0, -len(rows) :].tolist(), torch.stack(rows))

    def noting(model: Any, *args: Any, **kwargs: Any) -> Any:
        output, answer = run(model, *args, **kwargs)
        if model.dtype == torch.float64:
            given = (_narrowed(args), _narrowed(kwargs))
            _, other = run(copy.deepcopy(model).float(), *given[0], **given[1])
            pairs = zip(answer.tokens, other.tokens, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            answer = replace(answer, narrow=other.logits[: same + 1])
        found.append(answer)
        return output

    with patch.object(GenerationMixin, "generate", noting):
        yield found


def _narrowed(value: Any) -> Any:
    """Arguments of `generate` for a model in float32."""
    if isinstance(value, tuple):
        return tuple(_narrowed(each) for each in value)
    if isinstance(value, dict):
        return {name: _narrowed(each) for name, each in value.items()}
    is_wide = isinstance(value, Tensor) and value.dtype == torch.float64
    return value.float() if is_wide else value


@contextmanager
def noted_definition(module: str, name: str) -> Iterator[list[Tensor]]:
    """The rows of logits that a definition computes while this lasts."""
    found: list[Tensor] = []
    definition = getattr(import_module(module), name)
    compute = definition.compute_logits

    def noting(model: Any, hidden: Tensor) -> Tensor:
        logits: Tensor = compute(model, hidden)
        found.append(logits[-1])
        return logits

    with patch.object(definition, "compute_logits", noting):
        yield found


def asks_of(row: Row, folder: Path) -> list[Ask]:
    """The row's model in `folder`, and what it is asked."""
    module = import_module(f"tests.parity.{row.module}")
    # What pytest would give to the fixture.
    given = {
        "request": SimpleNamespace(param=row.param),
        "tmp_path_factory": SimpleNamespace(mktemp=lambda _: folder),
    }
    fixture = inspect.unwrap(getattr(module, row.fixture))
    taken = {name: given[name] for name in inspect.signature(fixture).parameters}
    return row.asks(module, fixture(**taken))


def make(row: Row, folder: Path) -> list[tuple[Ask, Reference]]:
    """The row's model in `folder`, what it is asked, and the reference's answers."""
    if row.definition is None:
        with noted_generate() as answers:
            asked = asks_of(row, folder)
        return [(ask, _aligned(ask, each)) for ask, each in zip(asked, answers, strict=True)]
    with noted_definition(*row.definition) as rows:
        asked = asks_of(row, folder)
    left = iter(rows)
    found = [
        (ask, Reference(ask.expected, torch.stack([next(left) for _ in ask.expected])))
        for ask in asked
    ]
    assert next(left, None) is None, "more was computed than was asked"
    return found


def _aligned(ask: Ask, answer: Reference) -> Reference:
    """Without a forced first token, which the engine takes as a part of the prompt."""
    count = len(ask.expected)
    for skip in (0, 1):
        if list(answer.tokens[skip : skip + count]) == list(ask.expected):
            narrow = None if answer.narrow is None else answer.narrow[skip:]
            return Reference(answer.tokens[skip:], answer.logits[skip:], narrow)
    raise AssertionError(f"{answer.tokens} are not {ask.expected}")


# ---- the engine


@contextmanager
def taught(answers: Mapping[str, Reference]) -> Iterator[Mapping[str, list[Tensor]]]:
    """While this lasts, engines choose the answers' tokens; their own logits are noted.

    By request id, as the answers are.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)
    step = ModelRunner.step

    def noting(runner: Any, plan: Any) -> Any:
        names = [(s.request_id, s.output_index) for s in plan.sequences if s.samples]
        compute = runner.model.compute_logits

        def compute_logits(hidden: Tensor) -> Tensor:
            logits = compute(hidden).clone()
            assert len(logits) == len(names)
            for row, (name, index) in zip(logits, names, strict=True):
                if name in answers:
                    assert len(found[name]) == index
                    found[name].append(row.double())
                    row[answers[name].tokens[index]] = row.max() + 1000
            return logits

        with patch.object(runner.model, "compute_logits", compute_logits):
            return step(runner, plan)

    # Steps that need no Python choose their own tokens; the trial at load holds them to the bit.
    with (
        patch.object(ModelRunner, "step", noting),
        patch.object(ModelRunner, "find_decode_steps", lambda runner: None),
    ):
        yield found


async def ask_engine(
    row: Row, folder: Path, asked: Sequence[tuple[Ask, Reference]]
) -> tuple[Mapping[str, list[Tensor]], Mapping[str, int | None]]:
    """The engine's logits in float32 by the number of the ask, and the media that it takes."""
    sizes = {"device": "cpu", "dtype": "float32", "block_size": 4, "kv_cache_bytes": 8 << 20}
    options = {**sizes, "max_num_batched_tokens": row.budget, **row.options}
    answers = {str(number): answer for number, (_, answer) in enumerate(asked)}
    with taught(answers) as found:
        async with AsyncEngine.from_pretrained(folder, **options) as engine:

            async def generate(number: int) -> None:
                ask, answer = asked[number]
                count = len(answer.tokens)
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                output = await engine.generate(
                    ask.prompt, params, **ask.media, request_id=str(number)
                )
                assert list(output.token_ids) == list(answer.tokens)

            for first in range(0, len(asked), 2):
                pair = range(first, min(first + 2, len(asked)))
                await asyncio.gather(*(generate(number) for number in pair))
            return found, engine.processor.info.get_supported_mm_limits()


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest between logits, which have to be masked in the same places."""
    masked = theirs < MASKED
    assert torch.equal(masked, mine < MASKED), "other tokens are masked"
    return float((mine - theirs).masked_fill(masked, 0).abs().max())


def measure(row: Row) -> Figure:
    """Makes the row's model and both sides' logits, and compares these."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        asked = make(row, folder)
        found, takes = asyncio.run(ask_engine(row, folder, asked))
        (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    error = scale = 0.0
    narrow: list[float] = []
    for number, (_, answer) in enumerate(asked):
        theirs = answer.logits.double()
        error = max(error, difference(torch.stack(found[str(number)]), theirs))
        scale = max(scale, float(theirs.masked_fill(theirs < MASKED, 0).abs().max()))
        if answer.narrow is not None:
            narrow.append(difference(answer.narrow.double(), theirs[: len(answer.narrow)]))
    kinds = (frozenset(kind for kind, items in ask.media.items() if len(items)) for ask, _ in asked)
    own = "definition" if row.definition else "transformers"
    is_wide = all(answer.logits.dtype == torch.float64 for _, answer in asked)
    against = (own, "float64" if is_wide else "float32")
    itself = max(narrow, default=None)
    return Figure(architecture, error, scale, itself, dict(takes), frozenset(kinds), against)


# ---- the file

KINDS = {"images": "images", "videos": "videos", "audios": "audio"}


def entry(figures: Sequence[Figure]) -> dict[str, Any]:
    """Of an architecture's rows: the worst one's figures, and all that were measured."""
    worst = max(figures, key=lambda figure: figure.share)
    measured = frozenset[frozenset[str]]().union(*(figure.measured for figure in figures))
    kinds = {KINDS[kind] for each in measured for kind in each}
    kinds |= {"text"} if frozenset() in measured else set()
    kinds |= {"mixed"} if any(len(each) > 1 for each in measured) else set()
    takes: dict[str, int | None] = {}
    for figure in figures:
        takes |= figure.takes
    return {
        "error": float(f"{worst.error:.1e}"),
        "scale": float(f"{worst.scale:.2e}"),
        "float32": None if worst.float32 is None else float(f"{worst.float32:.1e}"),
        "against": f"{worst.against[0]}, {min(figure.against[1] for figure in figures)}",
        "takes": dict(sorted(takes.items())),
        "measured": sorted(kinds),
    }


def main() -> None:
    """Measures every row and writes the file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    figures = defaultdict(list)
    for row in ROWS:
        figure = measure(row)
        figures[figure.architecture].append(figure)
        itself = "" if figure.float32 is None else f", float32 itself {figure.float32:.1e}"
        print(f"{row.name:44} {figure.error:.1e} of {figure.scale:.1f}{itself}", flush=True)  # noqa: T201
    found: dict[str, Any] = {name: entry(each) for name, each in figures.items()}
    found |= {name: {"same_as": other} for name, other in SAME.items()}
    lines = (f'"{name}": {json.dumps(found[name])}' for name in sorted(found))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
