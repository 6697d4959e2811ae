"""A short trial of a freshly loaded model against its own module, run whole.

Unequal prompts, one with a media span for each modality that the model takes, go through the
engine's own steps: two chunks each, then one decode step, every other prompt a step later. The
logits of these must agree with those of the module's own forward over each whole prompt, taken
before anything of it was rerouted, fused, packed or quantized. What a model may be off by is
measured on the model itself: its own logits once more, with rounding noise on every matmul with
weights (`with_rounding_noise`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.core.plan import EncodePlan, Limits, RowSlice, SequencePlan, StepPlan
from aioengine.errors import ModelLoadError
from aioengine.execution.model_runner import ModelRunner
from aioengine.execution.trial_prompts import LONG, UNEQUAL, TrialPrompt, make_prompts, shortened
from aioengine.kernels.attention import AttentionBackend
from aioengine.models.fusion.decoder_plan import layer_by_layer
from aioengine.models.runtime.hf_loading import pin_rotary
from aioengine.models.runtime.interfaces import PromptInputs
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import (
    WholePrompt,
    spare_layers,
    with_rounding_noise,
    without_layers,
)
from aioengine.processors.processor import BaseMultiModalProcessor

__all__ = ["Comparison", "Trial"]

TOLERANCE = 3.0
"""How many times the effect of rounding noise a distance may be."""
LEAST_NOISE = 2e-6
"""Of a relative distance: what sums in float32 differ by, also in a float64 model."""
BLIND = 0.7
"""A tolerance that lets everything pass: two unrelated outputs are 1.4 apart."""
MASKED = -1e30
"""Below it a logit is not one: its token is never next."""
HEAVY_BYTES = 64 << 20
"""Of layers that are like others: from which on no prompt goes through all of them."""
QUANTIZED_NOISE = 0.02
"""What a matmul is off by whose inputs are rounded to 8 bits, as a part of itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Result of the module's own forward over a prompt.

    `bounds`: where the steps' chunks begin and end; two that are equal are a step without any.
    `logits` [n, vocab]: of each chunk's last position. `noise` [n]: by how much rounding moves
    them, as a relative distance.
    """

    prompt: TrialPrompt
    inputs: PromptInputs | None
    bounds: tuple[int, ...]
    logits: Tensor
    noise: Tensor

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The positions [start, end) of each step."""
        return list(pairwise(self.bounds))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of logits of a prompt with `what`: its distance from the reference's, as a part of the
    reference's spread, and the most that rounding explains."""

    what: str
    distance: float
    tolerance: float

    @property
    def share(self) -> float:
        """Distance as a part of the tolerance."""
        return self.distance / self.tolerance


class Trial:
    """One trial: the reference is taken when it is made, of a module that is as it was loaded."""

    def __init__(
        self,
        model_class: type[TransformersModel],
        module: Any,
        specs: Sequence[LayerSpec],
        processor: BaseMultiModalProcessor,
        *,
        max_model_len: int | None,
        is_quantized: bool,
        seed: int,
    ) -> None:
        """`is_quantized`: the module has rounded weights, and what is compared with it may round
        inputs as well."""
        shell = model_class.around(module)
        pin_rotary(shell.decoder(), max_model_len)
        table = int(module.get_input_embeddings().weight.shape[0])
        prompts, self._unseen = make_prompts(
            processor,
            min(table, shell.vocab_size),
            max_model_len or shell.max_position_embeddings,
            seed,
        )
        refer = partial(_refer, shell, is_quantized=is_quantized)
        self._spared = _spared(module, shell.decoder(), specs)
        is_heavy = _num_bytes(module, self._spared) > HEAVY_BYTES
        if not is_heavy and all(len(prompt.whole.token_ids) <= LONG for prompt in prompts):
            # A decoder that has few tokens, and is small, is run whole; of encoders a few layers.
            attends = _paths(module, shell.decoder(), specs).values()
            self._spared = spare_layers(module, {}, needed=attends)
        self._cut: list[Reference] = []
        if is_heavy or any(prompt.is_long for prompt in prompts):
            with without_layers(module, self._spared):
                longest_first = sorted(prompts, key=lambda prompt: not prompt.is_long)
                self._cut, _ = _refer_all(refer, longest_first)
        done = [each.prompt for each in self._cut if is_heavy or each.prompt.is_long]
        self._whole, refused = _refer_all(refer, [each for each in prompts if each not in done])
        references = [*self._whole, *self._cut]
        _check_numbers(references, shell.dtype)
        # A model that takes media only has nothing to say to text alone.
        takes_media = any(each.prompt.modality != "text" for each in references)
        self._unseen += [each for each in refused if not (takes_media and each.startswith("text "))]
        self._is_function = self._answers_alike(shell)
        tried = max((each.bounds[-1] for each in references), default=0)
        windows = {spec.window for spec in specs if spec.window is not None}
        self._windows = [f"a window of {each} tokens" for each in sorted(windows) if each >= tried]

    def _answers_alike(self, shell: TransformersModel) -> bool:
        """Return whether the module still says of a short prompt what it said: it has seen others
        since.

        Else it keeps something between calls, and noise would measure that.
        """
        references = self._whole or self._cut
        if not references:
            return True
        first = min(references, key=lambda each: each.bounds[-1])
        spared = () if self._whole else self._spared
        with torch.no_grad(), without_layers(shell.model, spared):
            again = shell.reference_logits(first.prompt.whole, _rows(first.bounds)).to(
                torch.float64
            )
        least = max(LEAST_NOISE, torch.finfo(shell.dtype).eps)
        return bool((_distances(again, first.logits) <= least).all())

    @property
    def is_thorough(self) -> bool:
        """Return whether all that the model takes was compared; windows may be longer than
        prompts."""
        return bool(self._whole or self._cut) and not self._unseen

    @property
    def reservations(self) -> str:
        """Describe what of the model the trial does not show, for a log's line; empty if it shows
        all."""
        unseen = [*self._unseen, *self._windows]
        if not (self._whole or self._cut):
            unseen.append("any prompt")
        return f", as far as was seen; not seen: {'; '.join(unseen)}" if unseen else ""

    def compare(
        self, model: TransformersModel, *, block_size: int, backend: AttentionBackend | None
    ) -> list[Comparison]:
        """Measure how far each chunk's last logits are from the module's own.

        Raises ModelLoadError where the model cannot compute a prompt that its module could.
        """
        references = [*self._whole, *self._cut]
        try:
            found = _run(model, self._whole, block_size, backend)
            with without_layers(model.model, self._spared), layer_by_layer(model.model):
                found += _run(model, self._cut, block_size, backend)
        except Exception as error:
            raise ModelLoadError(
                f"a short trial of the model failed, which its own module stood: "
                f"{type(error).__name__}: {error!s:.300}"
            ) from error
        return [
            Comparison(each.prompt.what, distance, TOLERANCE * max(noise, LEAST_NOISE))
            for each, logits in zip(references, found, strict=True)
            for distance, noise in zip(
                _distances(logits.to(torch.float64), each.logits).tolist(),
                each.noise.tolist(),
                strict=True,
            )
        ]

    def find_fault(
        self, model: TransformersModel, *, block_size: int, backend: AttentionBackend | None
    ) -> str | None:
        """Describe what the model computes otherwise than its module did, in words; None if
        nothing.

        Raises ModelLoadError where the model cannot compute a prompt that its module could.
        """
        if not self._is_function:
            return "the module answers a prompt otherwise after other prompts, so it keeps state"
        compared = self.compare(model, block_size=block_size, backend=backend)
        seen = [each for each in compared if each.tolerance <= BLIND]
        blind = {each.what for each in compared} - {each.what for each in seen}
        self._unseen += [f"{what} (rounding alone changes its logits)" for what in sorted(blind)]
        worst = max(seen, key=lambda each: each.share, default=None)
        if worst is None or worst.share <= 1:
            return None
        return (
            f"logits of a prompt with {worst.what} are off by {worst.distance:.2g} of their "
            f"spread, where rounding explains {worst.tolerance:.2g}"
        )


def _spared(module: nn.Module, decoder: nn.Module, specs: Sequence[LayerSpec]) -> list[str]:
    """The layers that a trial of few layers does without."""
    inside = _paths(module, decoder, specs)
    alike = {inside[spec.name]: replace(spec, name="", shares=None) for spec in specs}
    sources = {inside[spec.shares] for spec in specs if spec.shares is not None}
    sharing = {inside[spec.name] for spec in specs if spec.shares is not None}
    kinds = {path: (spec, path in sharing, path in sources) for path, spec in alike.items()}
    return spare_layers(module, kinds, needed=sources)


def _paths(module: nn.Module, decoder: nn.Module, specs: Sequence[LayerSpec]) -> dict[str, str]:
    """Name of an attention layer -> its path in `module`."""
    paths = {id(each): path for path, each in module.named_modules()}
    return {spec.name: paths[id(decoder.get_submodule(spec.name))] for spec in specs}


def _num_bytes(module: nn.Module, paths: Sequence[str]) -> int:
    """Sum the bytes of the weights of these layers."""
    layers = map(module.get_submodule, paths)
    return sum(weight.nbytes for layer in layers for weight in layer.parameters())


def _refer_all(
    refer: Callable[[TrialPrompt], Reference], prompts: Sequence[TrialPrompt]
) -> tuple[list[Reference], list[str]]:
    """The references of the prompts that the module takes, two at least, and what it refused."""
    found: list[Reference] = []
    refused: list[str] = []
    for prompt in prompts:
        try:
            found.append(refer(prompt))
        # Whatever transformers raises of a prompt that it does not take.
        except Exception as error:
            refused.append(f"{prompt.what} ({type(error).__name__}: {error!s:.120})")
    if len(found) == 1:
        (only,) = found
        found.append(refer(shortened(only.prompt, only.bounds[-1] - UNEQUAL)))
    return found, refused


@torch.no_grad()  # in inference mode, what a module keeps of a call could not be used outside
def _refer(shell: TransformersModel, prompt: TrialPrompt, *, is_quantized: bool) -> Reference:
    """The reference for one prompt, by a module that is as it was loaded."""
    whole = prompt.whole
    inputs = None
    if whole.encoder is None:
        inputs = shell.prompt_inputs(whole.token_ids[:-1], whole.items)
    length = len(whole.token_ids)
    bounds = (0, _find_cut(whole, inputs), length - 1, length)
    rows = _rows(bounds)
    logits = shell.reference_logits(whole, rows).to(torch.float64)
    least = torch.finfo(torch.float32).eps
    size = max(torch.finfo(shell.dtype).eps, least)
    with with_rounding_noise(shell.model, QUANTIZED_NOISE if is_quantized else size):
        moved = shell.reference_logits(whole, rows).to(torch.float64)
    noise = _distances(moved, logits)
    if size == least and not is_quantized:
        # A sum in float32 is off by more than its result's rounding, and one draw may happen to
        # leave a row alone. In 16 bits the result's rounding is most of it.
        noise = noise.max().expand_as(noise)
    return Reference(prompt, inputs, bounds, logits, noise)


def _check_numbers(references: Sequence[Reference], dtype: torch.dtype) -> None:
    """Raise ModelLoadError where a module's own logits are no numbers, as nothing can be compared
    with these."""
    lost = [each.prompt.what for each in references if not (each.logits < torch.inf).all()]
    if lost:
        raise ModelLoadError(
            f"the checkpoint's own module gives no numbers (NaN or infinity) for a prompt with "
            f"{lost[0]}: its weights are damaged, or too large for {dtype}. Fetch them again or "
            "choose another dtype, or set check_model=False to use it all the same"
        )


def _rows(bounds: Sequence[int]) -> list[int]:
    """The last position of each chunk between these bounds."""
    return [end - 1 for start, end in pairwise(bounds) if start < end]


def _find_cut(whole: WholePrompt, inputs: PromptInputs | None) -> int:
    """Choose where the first chunk ends: inside a media span, unless it cannot be split; 0 for
    nowhere."""
    length = len(whole.token_ids) - 1
    cut = length // 2
    if whole.items:
        span = whole.items[0].span
        cut = (span.first_row_position + span.last_row_position + 1) // 2
    for start, stop in () if inputs is None else inputs.bidirectional:
        if start < cut < stop:
            cut = start if start > 0 else stop
    return cut if 0 < cut < length else 0


def _distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Measure how far each row [vocab] is off, relative to the other's row."""
    masked = ~(theirs > MASKED)
    kept = (~masked).sum(-1, keepdim=True).clamp_min(1)
    mine, other = ours.masked_fill(masked, 0), theirs.masked_fill(masked, 0)
    mean = other.sum(-1, keepdim=True) / kept
    spread = (other - mean).masked_fill(masked, 0).norm(dim=-1)
    distance = (mine - other).norm(dim=-1) / spread.clamp_min(1e-30)
    return torch.nan_to_num(distance, nan=torch.inf).cpu()


def _run(
    model: TransformersModel,
    references: Sequence[Reference],
    block_size: int,
    backend: AttentionBackend | None,
) -> list[Tensor]:
    """Each prompt's logits at its reference's rows, by steps as the engine's own."""
    if not references:
        return []
    tables = _Tables(model, references, block_size)
    runner = ModelRunner(model, tables.limits, backend)
    for number, reference in enumerate(references):
        _encode(runner, reference, str(number))
    found: list[list[Tensor]] = [[] for _ in references]
    # Every other prompt begins a step later: one decodes while another's second chunk runs.
    nothing = (0, 0)
    staggered = [
        [nothing, *each.chunks] if number % 2 else [*each.chunks, nothing]
        for number, each in enumerate(references)
    ]
    for step, chunks in enumerate(zip(*staggered, strict=True)):
        parts = [(number, *chunk) for number, chunk in enumerate(chunks) if chunk[0] < chunk[1]]
        if parts:
            plan = StepPlan(step, tuple(tables.sequence(*part) for part in parts))
            for (number, _, _), row in zip(parts, runner.logits(plan), strict=True):
                found[number].append(row)
    return [torch.stack(rows) for rows in found]


def _encode(runner: ModelRunner, reference: Reference, name: str) -> None:
    """Have the encoder's rows of a prompt made; raises what goes wrong."""
    prompt, whole = reference.prompt, reference.prompt.whole
    work: list[tuple[int, Any]] = [(item.span.num_rows, item.features) for item in whole.items]
    if whole.encoder is not None:
        work = [(prompt.num_encoder_rows, whole.encoder)]
    for num_rows, features in work:
        plan = EncodePlan(prompt.modality, (name,), (num_rows,), ())
        ((_, error),) = runner.encode(plan, [features])
        if error is not None:
            raise error


class _Tables:
    """Pages for the prompts: blocks of their own, in no order, of one pool."""

    def __init__(
        self, model: TransformersModel, references: Sequence[Reference], block_size: int
    ) -> None:
        self._references = references
        num_cross = sum(group.kind == "cross" for group in model.kv_groups)
        num_own = len(model.kv_groups) - num_cross
        own = [-(-each.bounds[-1] // block_size) for each in references]
        cross = [-(-each.prompt.num_encoder_rows // block_size) for each in references]
        total = sum(own) * num_own + sum(cross) * num_cross
        blocks = iter(random.Random(0).sample(range(total), total))

        def draw(counts: list[int], num_groups: int) -> list[tuple[tuple[int, ...], ...]]:
            groups = range(num_groups)
            return [tuple(tuple(islice(blocks, count)) for _ in groups) for count in counts]

        self._own, self._cross = draw(own, num_own), draw(cross, num_cross)
        longest = max(reference.bounds[-1] for reference in references)
        self.limits = Limits(
            max_num_seqs=len(references),
            max_num_batched_tokens=longest * len(references),
            max_model_len=longest,
            block_size=block_size,
            num_blocks=total,
            num_groups=num_own,
            num_cross_groups=num_cross,
            num_states=len(references),
            max_encoder_len=max(reference.prompt.num_encoder_rows for reference in references),
        )

    def sequence(self, number: int, start: int, end: int) -> SequencePlan:
        """The part [start, end) of a prompt."""
        reference = self._references[number]
        whole = reference.prompt.whole
        rows = tuple(
            RowSlice(str(number), position - start, row, length)
            for item in whole.items
            for position, row, length in item.span.row_runs(start, end)
        )
        is_first = start == 0 and whole.encoder is not None
        return SequencePlan(
            request_id=str(number),
            epoch=0,
            start=start,
            end=end,
            token_ids=whole.token_ids[start:end],
            block_tables=self._own[number],
            rows=rows,
            samples=True,
            output_index=0,
            inputs=reference.inputs,
            cross_tables=self._cross[number],
            num_encoder_rows=reference.prompt.num_encoder_rows,
            encoder_key=str(number) if is_first else None,
            state=number,
        )
