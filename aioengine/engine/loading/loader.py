"""Loading of a model from its folder: everything that needs torch before the first request.

Runs on the device's launch thread. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aioengine.config import EngineConfig
from aioengine.core.plan import Limits
from aioengine.engine.loading.embedder import Embedder
from aioengine.engine.loading.special_tokens import eos_token_ids, suppressed, token_ids
from aioengine.errors import ModelLoadError
from aioengine.execution.graphs import capture_on
from aioengine.execution.load_trial import Trial
from aioengine.execution.memory_budget import ModelSizes, find_device, resolve_limits
from aioengine.execution.memory_profiler import largest_items, measure_activations
from aioengine.execution.model_runner import ModelRunner
from aioengine.execution.trial_verdicts import is_kept, keep, settings_of, verdict_name
from aioengine.kernels.attention import AttentionBackend, select_backend
from aioengine.kernels.cpu.library import end_load, end_team
from aioengine.kernels.grouped import can_group
from aioengine.kernels.pool import BYTES, PageFormat
from aioengine.models.by_cache.caches import CacheSpecs
from aioengine.models.by_cache.model import ByCache
from aioengine.models.quantization.gguf_weights import kinds_of
from aioengine.models.quantization.grouped_layers import forget, keep_inputs, rounds_inputs
from aioengine.models.quantization.rounding import Rounding
from aioengine.models.runtime.checkpoint import check_files, find_source, read_config
from aioengine.models.runtime.gguf_folder import GgufFolder, open_gguf
from aioengine.models.runtime.hf_loading import Held, bounded_builds
from aioengine.models.runtime.interfaces import ReadsMedia, SupportsEncoderDecoder
from aioengine.models.runtime.load_progress import stage
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.registry import choose
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.state.memory import state_bytes
from aioengine.models.text.embedders import read_embedder
from aioengine.processors.checkpoint_errors import check_placeholders
from aioengine.processors.encdec import EncDecMultiModalProcessor
from aioengine.processors.info import ProcessingContext, load_context
from aioengine.processors.media.open import load_readers
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.sampling.structured_output import Grammars

__all__ = ["Loaded", "load"]

TRIALS = 3
"""Of a model that does not compute what its module does, before it is refused."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Parts of a loaded engine.

    Tokenizers and HF processors must not be shared between threads, so there are several:
    `processors` for the media threads (none, if there are no media or they have processes),
    `layout_processor` for the thread that tokenises and lays out, `loop_processor` for the event
    loop's own thread, which detokenises and lends it to the application.
    `suppress`, `begin_suppress`: tokens that the model must not say, always or at first;
    `row_bytes`: of one encoder row; `num_embeddings`: token ids that the embedding table knows;
    `longest_token`: in characters; a text of n has at least n / longest_token tokens; `grammars`:
    compiles structured outputs for the vocabulary; `folder`: made for a GGUF file; `source`: what
    all was read from; `model_impl`: "native" or "transformers", as `EngineConfig` means it;
    `embedder`: what the model can be asked for beside text.
    """

    runner: ModelRunner
    limits: Limits
    layout_processor: BaseMultiModalProcessor
    loop_processor: BaseMultiModalProcessor
    processors: tuple[BaseMultiModalProcessor, ...]
    eos_token_ids: frozenset[int]
    suppress: tuple[int, ...]
    begin_suppress: tuple[int, ...]
    row_bytes: int
    num_embeddings: int
    longest_token: int
    grammars: Grammars
    folder: GgufFolder | None
    source: str | os.PathLike[str]
    model_impl: str
    embedder: Embedder


def load(path: str | os.PathLike[str], config: EngineConfig) -> Loaded:
    """Load weights, tokenizer and processors of a folder, hub id or GGUF file. Blocks for seconds.

    What is wrong with the files is found first, before anything that takes long.
    Raises ModelLoadError, and whatever else a checkpoint can make transformers raise.
    """
    with bounded_builds() as bound:
        return _load(path, config, bound)


def _load(
    path: str | os.PathLike[str], config: EngineConfig, bound: Callable[[Held | None], None]
) -> Loaded:
    """See `load`; `bound`: called with what the weights' files hold."""
    with stage("processor"):
        folder = open_gguf(path)
        path = find_source(path, revision=config.revision) if folder is None else folder.path
        hf_config = read_config(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        embeds = read_embedder(path, hf_config, revision=config.revision)
        model_class, model_impl = _choose(hf_config, config)
        bound(check_files(path, hf_config, revision=config.revision))
        device = find_device(config.device)
        context = load_context(
            path,
            hf_config=hf_config,
            info=MULTIMODAL_REGISTRY.find_info(model_class),
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            limit_mm_per_prompt=config.limit_mm_per_prompt,
            mm_processor_kwargs=config.mm_processor_kwargs,
        )
        specs, processor = _try_on_meta(model_class, context)
        taken = processor.info.get_allowed_mm_limits()
        load_readers([name for name, limit in taken.items() if limit != 0], config.media)
        num_threads = config.num_processor_workers if taken and not config.uses_processes else 0
    dtype = _dtype(config.dtype, hf_config)
    if config.quantization is not None:
        _check_quantization(config.quantization, device, dtype)
    backend = _attention_backend(config, device)
    with stage("weights"):
        options = {"dtype": dtype, "device": device, "revision": config.revision}
        read = partial(model_class.load_module, path, hf_config=hf_config, **options)
        name = _verdict_name(model_class, hf_config, config, device, path)
        load_with = partial(_load_model, model_class, config, processor, read, backend)
        by_kind = model_impl == "transformers"
        model = _load_either_way(load_with, model_class, hf_config, specs, name, by_kind=by_kind)
        end_load()  # weights move while the rest is loaded
    with stage("memory"):
        form = PageFormat(BYTES if config.kv_cache_dtype == "int8" else model.dtype)
        sizes = _sizes(model, processor, config, form)
        capture = capture_on(device) if model.generates and not config.enforce_eager else None
        by = partial(measure_activations, model, processor, backend=backend, capture=capture)
        limits = resolve_limits(config, sizes, device, by)
        context.max_model_len = limits.max_model_len
        runner = ModelRunner(model, limits, backend, form, capture)
        runner.find_decode_steps()
    end_team()
    ends = eos_token_ids(model)
    loaded = Loaded(
        runner=runner,
        limits=limits,
        layout_processor=processor,
        loop_processor=_clone(model_class, context),
        processors=tuple(_clone(model_class, context) for _ in range(num_threads)),
        eos_token_ids=ends,
        suppress=suppressed(model, ends),
        begin_suppress=token_ids(model, "begin_suppress_tokens"),
        row_bytes=model.row_size * model.dtype.itemsize,
        num_embeddings=_num_embeddings(model),
        longest_token=max(map(len, context.tokenizer.get_vocab()), default=1),
        grammars=Grammars(context.tokenizer, model.vocab_size, ends),
        folder=folder,
        source=path,
        model_impl=model_impl,
        embedder=Embedder(model, embeds),
    )
    end_load()  # what has been used since
    return loaded


def _choose(hf_config: Any, config: EngineConfig) -> tuple[type[TransformersModel], str]:
    choice = choose(hf_config, config.model_impl)
    names = ", ".join(hf_config.architectures)
    logger.info("%s runs as %s (%s)", names, choice.model_class.__name__, choice.model_impl)
    if choice.model_impl == "transformers" and not config.check_model:
        logger.warning(
            "%s has no class of its own here and is run untried (check_model=False): nothing shows "
            "that it computes what its own module does",
            names,
        )
    return choice.model_class, choice.model_impl


def _load_either_way(
    load_with: Callable[[Sequence[LayerSpec], str | None], TransformersModel | str],
    model_class: type[TransformersModel],
    hf_config: Any,
    specs: Sequence[LayerSpec],
    name: str | None,
    *,
    by_kind: bool,
) -> TransformersModel:
    """The model on a flat batch, or, where one chosen by its kind fails its trial so, by its cache:
    each way has a verdict. A class of an architecture's own is right as it is, or wrong. `specs`:
    its layers on a flat batch. Raises ModelLoadError.
    """
    can_change = by_kind and not isinstance(specs, CacheSpecs)
    other_name = None if name is None else f"{name}-by-cache"

    def load_by_cache() -> TransformersModel | str | None:
        other = model_class.probe_by_cache(hf_config) if issubclass(model_class, ByCache) else None
        return None if other is None else load_with(other, other_name)

    found = None
    if can_change and other_name is not None and is_kept(other_name):
        found = load_by_cache()
    found = found or load_with(specs, name)
    if isinstance(found, str) and can_change:
        logger.info("it disagrees with its module on a flat batch; by its cache it may not")
        with suppress(ModelLoadError):
            other = load_by_cache()
            found = found if other is None or isinstance(other, str) else other
    if isinstance(found, str):
        raise ModelLoadError(
            f"{model_class.__name__} does not compute what the checkpoint's own module does: "
            f"{found}. Run this model with transformers, or set check_model=False to use it all "
            "the same"
        )
    return found


def _load_model(
    model_class: type[TransformersModel],
    config: EngineConfig,
    processor: BaseMultiModalProcessor,
    read: Callable[[], Any],
    backend: AttentionBackend,
    specs: Sequence[LayerSpec],
    name: str | None,
) -> TransformersModel | str:
    """The model around the module that `read` loads, packed, and tried unless it has been before;
    or, in words, what it computes otherwise than its module does.

    `specs`: its layers; `name`: of the verdict on it; None: every load is tried.

    Rounding can send a token to other experts, now and then; so what fails a trial has another one,
    with other prompts. Raises ModelLoadError.
    """
    _check_block_size(config.block_size, specs)
    rounding = _rounding(config)
    is_tried = not config.check_model or (name is not None and is_kept(name))
    fault = ""
    for seed in range(TRIALS):
        module = read()
        if rounding is not None:
            model_class.around(module).round_weights(rounding, keep=not is_tried)
        is_packed = config.packed_layers or rounding is not None
        if not is_packed:
            for each in module.modules():
                forget(each)
        if not config.quantize_activations:
            keep_inputs(module)
        trial = None
        if not is_tried:
            trial = Trial(
                model_class,
                module,
                specs,
                processor,
                max_model_len=config.max_model_len,
                is_quantized=any(map(rounds_inputs, module.modules())),
                seed=seed,
            )
        model = model_class(module, specs=specs, max_model_len=config.max_model_len)
        del module
        block_size, found = config.block_size, None
        if trial is not None:
            found = trial.find_window_fault(model, block_size=block_size, backend=backend)
        if is_packed:
            model.pack()
        if trial is None:
            return model
        found = found or trial.find_fault(model, block_size=block_size, backend=backend)
        if found is None:
            logger.info("the model computes what its own module does%s", trial.reservations)
            if name is not None and trial.is_thorough:
                keep(name)
            return model
        fault = found
        del model, trial
    return fault


def _check_block_size(block_size: int, specs: Sequence[LayerSpec]) -> None:
    """Raise ModelLoadError where a block would lie in two chunks of a layer's attention."""
    chunk = next((s.chunk for s in specs if s.chunk is not None and s.chunk % block_size), None)
    if chunk is not None:
        raise ModelLoadError(
            f"block_size is {block_size}, and must divide the {chunk} tokens of a chunk, which the "
            "model's attention does not leave (attention_chunk_size)"
        )


def _verdict_name(
    model_class: type[TransformersModel],
    hf_config: Any,
    config: EngineConfig,
    device: torch.device,
    path: str | os.PathLike[str],
) -> str | None:
    names = ("attention_backend", "packed_layers", "block_size", "max_model_len")
    bits = ("quantization", "quantize_activations")
    media = ("mm_processor_kwargs", "limit_mm_per_prompt")
    settings = {name: getattr(config, name) for name in (*names, *bits, *media)}
    chip = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    dtype = str(_dtype(config.dtype, hf_config))
    files = [settings_of(path), kinds_of(Path(path))]
    return verdict_name(model_class, hf_config, [settings, dtype, chip, *files])


def _rounding(config: EngineConfig) -> Rounding | None:
    if config.quantization is None:
        return None
    bits = {"int8": 8, "int4": 4}[config.quantization]
    return Rounding(bits=bits, has_full_inputs=not config.quantize_activations)


def _check_quantization(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Before weights are read."""
    if device.type != "cpu" or not can_group(dtype):
        raise ModelLoadError(
            f"quantization {name!r} does not run on {device.type} in {dtype}: it needs a CPU, and "
            "float32, bfloat16 or float16; leave quantization out"
        )


def _attention_backend(config: EngineConfig, device: torch.device) -> AttentionBackend:
    """Made before weights are read: a name may be wrong, or not go with what is kept."""
    name = config.attention_backend
    try:
        backend = select_backend(name, device)
    except (ValueError, RuntimeError) as error:
        message = f"attention_backend {name!r:.40} does not run here: {error}"
        raise ModelLoadError(message) from error
    if config.kv_cache_dtype == "int8" and not getattr(backend, "takes_bytes", False):
        raise ModelLoadError(
            f"kv_cache_dtype 'int8' does not run with attention_backend {name!r:.40}, which does "
            "not say takes_bytes = True; leave kv_cache_dtype out"
        )
    return backend


def _try_on_meta(
    model_class: type[TransformersModel], context: ProcessingContext
) -> tuple[Sequence[LayerSpec], BaseMultiModalProcessor]:
    """The decoder's layers, then the first processor, which may run the encoder to count rows."""
    check_placeholders(MULTIMODAL_REGISTRY.find_info(model_class)(context))
    specs = model_class.probe(context.hf_config)
    processor = MULTIMODAL_REGISTRY.create_processor(model_class, context)
    if isinstance(processor, EncDecMultiModalProcessor):
        _check_start(processor)
    return specs, processor


def _sizes(
    model: TransformersModel,
    processor: BaseMultiModalProcessor,
    config: EngineConfig,
    form: PageFormat,
) -> ModelSizes:
    largest = max(largest_items(processor, config.max_model_len or 0).values(), default=0)
    max_encoder_len = model.max_encoder_len if isinstance(model, SupportsEncoderDecoder) else 0
    if isinstance(processor, EncDecMultiModalProcessor) and processor.prompt_half == "decoder":
        max_encoder_len = largest or max_encoder_len  # its encoder reads nothing but media
    if isinstance(model, ReadsMedia):
        most = processor.info.get_allowed_mm_limits().values()
        max_encoder_len = model.most_memory_rows(max(each or 0 for each in most), config.block_size)
    return ModelSizes(
        kv_groups=model.kv_groups,
        itemsize=model.dtype.itemsize,
        kv_row_bytes=form.row_bytes,
        row_size=model.row_size,
        max_position_embeddings=model.max_position_embeddings,
        max_item_rows=max_encoder_len or largest,
        max_encoder_len=max_encoder_len,
        state_bytes=state_bytes(model.states, model.dtype),
    )


def _clone(
    model_class: type[TransformersModel], context: ProcessingContext
) -> BaseMultiModalProcessor:
    return MULTIMODAL_REGISTRY.create_processor(model_class, context.clone())


def _dtype(name: str, hf_config: Any) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    for config in (hf_config, hf_config.get_text_config()):
        found = getattr(config, "dtype", None)
        if isinstance(found, str):
            found = getattr(torch, found, None)
        if isinstance(found, torch.dtype):
            return found
    return torch.float32


def _num_embeddings(model: TransformersModel) -> int:
    """Token ids that have an embedding; of some, those of added tokens are a table of their own."""
    table = model.model.get_input_embeddings()
    return int(table.weight.shape[0]) + int(getattr(table, "num_additional_embeddings", 0))


def _check_start(processor: EncDecMultiModalProcessor) -> None:
    """Check that the decoder has tokens to begin with, before a request asks for them."""
    config = processor.info.get_hf_config().get_text_config(decoder=True)
    known = max(len(processor.info.get_tokenizer()), int(config.vocab_size))
    outside = [i for i in processor.default_decoder_prompt() if not 0 <= i < known]
    if outside:
        raise ModelLoadError(
            f"the decoder is to begin with the token {outside[0]}, but there are {known}; mend "
            "decoder_start_token_id and the forced tokens in generation_config.json"
        )
