"""Memory that the largest encoder run and the largest step take, found by running them.

The items are the worst that a family's dummy inputs name; the step has as many tokens and sequences
as one can have, each at the end of the longest context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from aioengine.core.plan import EncodePlan, Limits, SequencePlan, StepPlan
from aioengine.errors import ModelLoadError
from aioengine.execution.graphs import Capture
from aioengine.execution.model_runner import ModelRunner
from aioengine.execution.warm_steps import WRITTEN
from aioengine.kernels.attention import AttentionBackend
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.items import PROCESSOR_ITEMS, MultiModalDataItems
from aioengine.processors.processor import BaseMultiModalProcessor, MultiModalInputs
from aioengine.sampling.logits_processors import Adjustments
from aioengine.sampling.sampler import Sampling

__all__ = ["apply_dummy", "largest_items", "measure_activations", "peak_bytes"]

TOKENS_CPU = (64, 256)
"""Tokens that are tried on a CPU, where a full step takes long; what they add is scaled up."""
CONTEXT_CPU = 4096
"""Tokens of context that are tried there at most."""


def measure_activations(
    model: TransformersModel,
    processor: BaseMultiModalProcessor,
    limits: Limits,
    backend: AttentionBackend | None = None,
    *,
    capture: Capture | None = None,
) -> int:
    """Bytes beside weights, KV blocks and encoder rows that the engine needs at its worst.

    With a `capture`, steps are captured too, in memory that no others use. Raises ModelLoadError
    where the device cannot run a step or an encoder run of that size.
    """
    is_cpu = model.device.type == "cpu"
    num_blocks = (limits.num_groups + limits.num_cross_groups) * 4
    runner = ModelRunner(model, replace(limits, num_blocks=num_blocks), backend)
    if limits.max_encoder_len:
        size = (limits.max_encoder_len, model.row_size)
        runner.keep(WRITTEN, torch.zeros(size, dtype=model.dtype, device=model.device))

    def step_bytes(num_tokens: int, *, is_plain: bool = False) -> int:
        context = CONTEXT_CPU if is_cpu else None
        step = _worst_step(limits, model.vocab_size, num_tokens, num_blocks, context)
        if is_plain:
            plain = [replace(s, sampling=Sampling()) for s in step.sequences]
            step = replace(step, sequences=tuple(plain))
        return peak_bytes(model.device, lambda: runner.step(step).read())

    most = limits.max_num_batched_tokens
    try:
        # Steps first: what the allocator keeps of an encoder run would hide what they take.
        if is_cpu and most > TOKENS_CPU[-1]:
            few, many = TOKENS_CPU
            less, more = step_bytes(few), step_bytes(many)
            needed = less + max(0, more - less) * (most - few) // (many - few)
        else:
            needed = step_bytes(most)
        if capture is not None:
            rows = most * sum({model.row_size, model.hidden_size}) * model.dtype.itemsize
            logits = 4 * limits.max_num_seqs * model.vocab_size
            needed += step_bytes(most, is_plain=True) + rows + logits
        runs = _worst_encodes(processor, limits)
        encode_bytes = max(
            (peak_bytes(model.device, partial(run, runner)) for run in runs), default=0
        )
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        raise ModelLoadError(
            f"a step of {most} tokens, or an encoder run of {limits.max_num_encoder_input_tokens} "
            f"rows, does not fit the device beside the weights; lower max_num_batched_tokens, "
            f"max_num_encoder_input_tokens or max_num_seqs"
        ) from error
    # On a CPU the two take turns.
    return max(encode_bytes, needed) if is_cpu else encode_bytes + needed


def apply_dummy(
    processor: BaseMultiModalProcessor, modality: str, seq_len: int
) -> MultiModalInputs:
    """Apply a processor to the largest item of a modality that its dummy inputs make.

    Raises ModelLoadError for whatever goes wrong, which is its cause.
    """
    builder = processor.dummy_inputs
    try:
        dummy = builder.get_dummy_processor_inputs(seq_len, {modality: 1})
        items = PROCESSOR_ITEMS[modality](dummy.mm_data[modality])
        with processor.own_media():
            return processor.apply(dummy.prompt_text, MultiModalDataItems({modality: items}))
    except Exception as error:  # a family from outside may raise anything
        cause = error.__cause__ or error
        names = f"{type(processor).__name__} failed on the dummy {modality} of "
        names += type(builder).__name__
        if processor.info.ctx.bounds_size(modality):
            names += f" (its size is that of limit_mm_per_prompt[{modality!r}])"
        raise ModelLoadError(f"{names}: {type(cause).__name__}: {cause!s:.300}") from cause


def largest_items(processor: BaseMultiModalProcessor, seq_len: int) -> Mapping[str, int]:
    """Modality -> encoder rows of its largest item: as the family says, or found by a trial.

    By a trial too where `limit_mm_per_prompt` sets a size, which the dummies keep to. Modalities
    of which it allows none are left out. Raises ModelLoadError where a dummy fails.
    """
    info = processor.info
    allowed = [name for name, limit in info.get_allowed_mm_limits().items() if limit != 0]
    said = info.get_mm_max_tokens_per_item(seq_len, dict.fromkeys(allowed, 1))
    found = {}
    for modality in allowed:
        if said is None or info.ctx.bounds_size(modality):
            (placed,) = apply_dummy(processor, modality, seq_len).placeholders[modality]
            found[modality] = placed.num_embeds
        elif modality in said:
            found[modality] = said[modality]
    return found


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Measure how much memory in use grows, at its highest, while `work()` runs.

    What the process's allocator has kept for reuse counts as in use.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        # Reserved, not allocated: what lies unused between tensors is taken from others too.
        before = torch.cuda.memory_reserved(device)
        work()
        torch.cuda.synchronize(device)
        grown = torch.cuda.max_memory_reserved(device) - before
        torch.cuda.empty_cache()
        return max(0, grown)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = _resident("VmRSS:")
        work()
        return max(0, _resident("VmHWM:") - before)
    except OSError:  # not Linux: nothing is known
        return 0


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _worst_encodes(
    processor: BaseMultiModalProcessor, limits: Limits
) -> list[Callable[[ModelRunner], object]]:
    """Encoder runs over as many of the largest items of each modality as one may have."""
    runs: list[Callable[[ModelRunner], object]] = []
    # What cross-attention reads is encoded with the text around it.
    text = {"input_ids": torch.zeros(limits.max_encoder_len, dtype=torch.int64)}
    if limits.max_encoder_len and not processor.info.get_supported_mm_limits():
        runs.append(partial(_encode, "text", [text] * limits.max_encode_items))
    for modality, most in largest_items(processor, limits.max_model_len).items():
        if modality not in PROCESSOR_ITEMS:
            continue
        rows = max(1, most)
        count = min(limits.max_encode_items, max(1, limits.max_num_encoder_input_tokens // rows))
        (item,) = apply_dummy(processor, modality, limits.max_model_len).items[modality]
        features = {**item, **text} if limits.max_encoder_len else item
        runs.append(partial(_encode, modality, [features] * count))
    return runs


def _encode(modality: str, items: Sequence[Mapping[str, Tensor]], runner: ModelRunner) -> None:
    keys = tuple(str(number) for number in range(len(items)))
    # The rows' number is not known here: what does not match is kept nowhere, and that is fine.
    outcomes = runner.encode(EncodePlan(modality, keys, (0,) * len(keys), ()), items)
    runner.drop(keys)
    for _, error in outcomes:
        if error is not None and _is_shortage(error):
            raise error


class _AnyToken:
    """A grammar that allows all."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor:
        return self._mask


def _is_shortage(error: BaseException) -> bool:
    """Return whether memory ran out: torch has a class of its own for that on a GPU only."""
    is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_known or "DefaultCPUAllocator" in str(error)


def _worst_step(
    limits: Limits, vocab_size: int, num_tokens: int, num_blocks: int, max_context: int | None
) -> StepPlan:
    """Single tokens and one long chunk, or several where one request cannot be as long."""
    longest = min(limits.max_model_len, max_context or limits.max_model_len)
    sizes = [1] * (min(limits.max_num_seqs, num_tokens) - 1)
    rest = num_tokens - len(sizes)
    while rest:
        sizes.append(min(rest, longest))
        rest -= sizes[-1]
    width = -(-longest // limits.block_size)
    table = tuple(block % num_blocks for block in range(width))
    rows = -(-limits.max_encoder_len // limits.block_size)
    memory = tuple(block % num_blocks for block in range(rows))
    # As many new rows as a step may write the keys and values of, or one request's.
    num_written = limits.max_num_encoder_input_tokens // max(1, limits.max_encoder_len)
    num_written = max(1, num_written) if limits.max_encoder_len else 0
    adjustments = Adjustments(repetition_penalty=1.1, frequency_penalty=0.1, bias=((0, 1.0),))
    sampling = Sampling(
        temperature=1.0,
        top_p=0.9,
        logprobs=20,
        prompt_logprobs=20,
        prompt_token_ids=(0,) * longest,
        adjustments=adjustments,
        constraint=_AnyToken(vocab_size),
    )
    sequences = [
        SequencePlan(
            request_id=str(number),
            epoch=0,
            start=longest - size,
            end=longest,
            token_ids=(0,) * size,
            block_tables=(table,) * limits.num_groups,
            rows=(),
            samples=number < limits.max_num_seqs,
            output_index=0,
            sampling=sampling,
            cross_tables=(memory,) * limits.num_cross_groups,
            num_encoder_rows=limits.max_encoder_len,
            encoder_key=WRITTEN if number < num_written else None,
            state=number % max(1, limits.num_states),
        )
        for number, size in enumerate(sizes)
    ]
    return StepPlan(0, tuple(sequences))
