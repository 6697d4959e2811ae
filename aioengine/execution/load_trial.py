"""A short trial of a freshly loaded model against its own module, run whole.

Unequal prompts, one with a media span for each modality that the model takes, go through the
engine's own steps: two chunks each, then one decode step, every other prompt a step later, and one
begins anew, as if it had been preempted. The
logits of these must agree with those of the module's own forward over each whole prompt, taken
before anything of it was rerouted, fused, packed or quantized. What a model may be off by is
measured on the model itself: its own logits once more, with rounding noise on every matmul with
weights (`with_rounding_noise`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.execution.trial_prompts import LONG, UNEQUAL, TrialPrompt, make_prompts, shortened
from aioengine.execution.trial_steps import Reference, run_steps
from aioengine.kernels.attention import AttentionBackend
from aioengine.models.fusion.decoder_plan import layer_by_layer
from aioengine.models.runtime.hf_loading import pin_rotary
from aioengine.models.runtime.interfaces import PromptInputs
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import (
    WholePrompt,
    narrowed,
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
NARROW = 4
"""Tokens of a window that is shorter than any prompt of a trial."""
QUANTIZED_NOISE = 0.02
"""What a matmul is off by whose inputs are rounded to 8 bits, as a part of itself."""


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
        if refused and not (references or self._unseen):
            raise ModelLoadError(
                f"the checkpoint's own module takes no prompt of a short trial: {refused[0]}. "
                "Nothing is there to compare with: run this model with transformers, or set "
                "check_model=False to use it all the same"
            )
        _check_numbers(references, shell.dtype)
        # A model that takes media only has nothing to say to text alone.
        takes_media = any(each.prompt.modality != "text" for each in references)
        self._unseen += [each for each in refused if not (takes_media and each.startswith("text "))]
        self._is_function = self._answers_alike(shell)
        tried = max((each.bounds[-1] for each in references), default=0)
        windows = {each for spec in specs for each in (spec.window, spec.chunk)}
        self._windows = sorted(each for each in windows if each is not None and each >= tried)
        self._narrow = self._refer_narrow(refer, module) if self._windows else None

    def _refer_narrow(
        self, refer: Callable[[TrialPrompt], Reference], module: nn.Module
    ) -> Reference | None:
        """The reference for the shortest prompt, with windows that are shorter than it.

        None where the module answers as before: then these are not where its windows are.
        """
        plain = min(self._whole or self._cut, key=lambda each: each.bounds[-1], default=None)
        if plain is None:
            return None
        spared = () if self._whole else self._spared
        with without_layers(module, spared), narrowed(module, self._windows, NARROW):
            found = refer(plain.prompt)
        is_changed = _distances(found.logits, plain.logits) > 2 * TOLERANCE * plain.noise
        return found if is_changed.any() and (found.noise < BLIND / TOLERANCE).all() else None

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
        unseen = [*self._unseen, *(f"a window of {each} tokens" for each in self._windows)]
        if not (self._whole or self._cut):
            unseen.append("any prompt")
        return f", as far as was seen; not seen: {'; '.join(unseen)}" if unseen else ""

    def find_window_fault(
        self, model: TransformersModel, *, block_size: int, backend: AttentionBackend | None
    ) -> str | None:
        """Describe where the model's windows end otherwise than its module's, in words; None if
        they do not.

        Both are tried with windows that are shorter than prompts: those that models have are too
        long to be tried. To be called before layers are fused, which are made for their windows.
        """
        narrow = self._narrow
        if narrow is None:
            return None
        spared = () if self._whole else self._spared
        groups = model.kv_groups
        has_chunks = any(each.chunk is not None for each in groups)
        size = gcd(block_size, NARROW) if has_chunks else block_size

        def run() -> Tensor:
            (found,) = run_steps(model, [narrow], size, backend)
            return found.to(torch.float64)

        try:
            with without_layers(model.model, spared):
                plain = run()
                with narrowed(model.model, self._windows, NARROW):
                    model.kv_groups = tuple(
                        replace(each, chunk=NARROW) if each.chunk in self._windows else each
                        for each in groups
                    )
                    found = run()
        except Exception:  # which the trial of all prompts will see too
            return None
        finally:
            model.kv_groups = groups
        logits, noise = narrow.expects(len(found))
        distances = _distances(found, logits)
        if (distances <= TOLERANCE * noise.clamp_min(LEAST_NOISE)).all():
            self._windows = []
        elif not torch.equal(found, plain):  # else its windows are kept in another place
            off = float(distances.max())
            return f"logits of a prompt that is longer than its windows are off by {off:.2g}"
        return None

    def compare(
        self, model: TransformersModel, *, block_size: int, backend: AttentionBackend | None
    ) -> list[Comparison]:
        """Measure how far each chunk's last logits are from the module's own.

        Raises ModelLoadError where the model cannot compute a prompt that its module could.
        """
        references = [*self._whole, *self._cut]
        try:
            found = run_steps(model, self._whole, block_size, backend)
            with without_layers(model.model, self._spared), layer_by_layer(model.model):
                found += run_steps(model, self._cut, block_size, backend)
        except Exception as error:
            raise ModelLoadError(
                f"a short trial of the model failed, which its own module stood: "
                f"{type(error).__name__}: {error!s:.300}"
            ) from error
        compared = []
        for each, ours in zip(references, found, strict=True):
            logits, noise = each.expects(len(ours))
            allowed = TOLERANCE * noise.clamp_min(LEAST_NOISE)
            distances = _distances(ours.to(torch.float64), logits)
            pairs = zip(distances.tolist(), allowed.tolist(), strict=True)
            compared += [Comparison(each.prompt.what, *pair) for pair in pairs]
        return compared

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
    length = len(whole.token_ids)
    # What sees all of its prompt decodes nothing.
    num_prompt = length - 1 if shell.is_causal else length
    if whole.encoder is None:
        inputs = shell.prompt_inputs(whole.token_ids[:num_prompt], whole.items)
    bounds = (0, _find_cut(whole, inputs), num_prompt, length)
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
