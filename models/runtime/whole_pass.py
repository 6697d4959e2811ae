"""The forward pass of a model's own module over one whole prompt: the reference for ours.

Nothing of ours is in it that could hide a mistake of ours: neither pages nor chunks, and for
transformers' modules neither our masks, nor our positions, nor our merging of encoder rows. It runs
on the module as it was loaded, before anything of it is rerouted, fused, packed or quantized.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
)

from aioengine.errors import EngineError
from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.layer_slot import attach_slot
from aioengine.kernels.reference import attend_dense, visible_mask
from aioengine.models.runtime.attention import Attention, AttentionType
from aioengine.models.runtime.encoding import batch_items, frames_as_images, place
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.state.probe import settings_of

__all__ = [
    "WholePrompt",
    "attending_whole",
    "embeddings_of",
    "find_logit_scale",
    "given_to",
    "is_classifier",
    "narrowed",
    "run_classifier",
    "run_head",
    "run_whole",
    "spare_layers",
    "with_rounding_noise",
    "without_layers",
]

_KINDS = {"image": 1, "video": 2, "audio": 3}
"""How transformers numbers the kinds of tokens; text is 0."""
_COUNTS = (
    *("num_hidden_layers", "num_layers", "depth", "encoder_layers", "decoder_layers"),
    "speech_encoder_layers",
)
"""How configs call the number of their layers."""
_LOGIT_SCALES = ("logit_scale", "logits_scaling", "output_multiplier")
"""What configs call a number that logits are multiplied or divided by, as the class has it."""
_KIND_ARGUMENTS = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WholePrompt:
    """One prompt as a module takes it in one call.

    `token_ids`: the decoder's. `items`: its media, in the order of their places. `encoder`: what
    the encoder of an encoder-decoder model is given, without a batch dimension; None for others.
    """

    token_ids: tuple[int, ...]
    items: tuple[PromptMedia, ...] = ()
    encoder: Mapping[str, Tensor] | None = None

    def kinds(self) -> Tensor:
        """The kind of each token [L], by what takes encoder rows."""
        found = torch.zeros(len(self.token_ids), dtype=torch.int64)
        for item in self.items:
            for start, stop in item.runs:
                found[start:stop] = _KINDS[item.modality]
        return found


def run_whole(module: Any, prompt: WholePrompt, rows: Sequence[int], **extra: Tensor) -> Tensor:
    """Logits [n, vocab] at the positions `rows` of a prompt, by transformers' own forward; hidden
    states of a module without an output head.

    `extra`: further arguments, [1, L] where they go by token. Raises TypeError where the module
    takes nothing of an item's, and whatever the module raises.
    """
    embeddings = module.get_input_embeddings().weight
    if is_classifier(module):
        module = module.base_model
    names = inspect.signature(module.forward).parameters
    groups = [
        batch_items([item.features for item in prompt.items if item.modality == modality])
        for modality in dict.fromkeys(item.modality for item in prompt.items)
    ]
    if prompt.encoder is not None:
        groups.append(batch_items([prompt.encoder]))
    given: dict[str, Any] = {}
    for group in groups:
        is_renamed = "pixel_values_videos" in group and "pixel_values_videos" not in names
        taken = frames_as_images(group) if is_renamed else group
        if names.keys().isdisjoint([*taken, *extra]):
            raise TypeError(f"forward of {type(module).__name__} takes none of {', '.join(taken)}")
        given |= {name: value for name, value in taken.items() if name in names}
    ids = torch.tensor([prompt.token_ids])
    given["input_ids" if prompt.encoder is None else "decoder_input_ids"] = ids
    if prompt.items:
        given |= {name: prompt.kinds()[None] for name in _KIND_ARGUMENTS if name in names}
    given |= extra
    placed = {n: place(value, embeddings.dtype, embeddings.device) for n, value in given.items()}
    if "logits_to_keep" in names and type(module).__module__.startswith("transformers."):
        places = torch.tensor(list(rows), device=embeddings.device)
        kept: Tensor = module(**placed, use_cache=False, logits_to_keep=places).logits
        return kept[0]
    output = module(**placed, use_cache=False)
    logits: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return logits[0, list(rows)]


def is_classifier(module: Any) -> bool:
    """Return whether a module's head gives a sequence the scores of labels."""
    return type(module).__name__.endswith("ForSequenceClassification")


def run_classifier(module: Any, pooled: Tensor) -> Tensor:
    """Scores [n, labels] that a classifier's own forward makes of the hidden states [n, hidden] to
    which it pools what its backbone computes, which is not run."""
    backbone = module.base_model
    pooler = getattr(backbone, "pooler", None)

    def score(row: Tensor) -> Tensor:
        hidden = row[None, None]  # of one sequence of one token
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=None if pooler is None else pooler(hidden)
        )
        return _logits_with(module, backbone, lambda *_, **__: output, 1)

    return torch.stack([score(row) for row in pooled])


def find_logit_scale(module: Any, decoder: Any, config: Any, others: Sequence[float] = ()) -> float:
    """The factor of logits in the module's own forward, behind its head: 1, or as `config` says.

    `config`: the text's; `others`: numbers that it may be beside those. A number may divide or
    multiply, by the class; the module tells, with a hidden state in the place of what `decoder`
    computes.
    """
    found = [*others, *(getattr(config, name, None) for name in _LOGIT_SCALES)]
    scales = [float(each) for each in found if isinstance(each, int | float) and each not in (0, 1)]
    if not scales or module.get_output_embeddings() is None:
        return 1.0
    weight = module.get_input_embeddings().weight
    hidden = torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    forward = decoder.forward

    def give_hidden(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)  # which may hold more that the module reads
        output.last_hidden_state = hidden[None]
        return output

    logits = _logits_with(module, decoder, give_hidden, 1)[-1].double()
    with torch.inference_mode():
        plain = module.get_output_embeddings()(hidden)[-1].double()
    ratio = float((logits * plain).sum() / (plain * plain).sum())
    scales += [1 / each for each in scales]
    return min([1.0, *scales], key=lambda scale: abs(scale - ratio))


def run_head(module: Any, decoder: Any, hidden: Tensor) -> Tensor:
    """Logits [n, vocab] that the module's own forward makes of hidden states [n, hidden] of its
    `decoder`, which is not run."""
    output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden[None])
    return _logits_with(module, decoder, lambda *_, **__: output, len(hidden))


def _logits_with(module: Any, decoder: Any, forward: Callable[..., Any], length: int) -> Tensor:
    """Logits [length, vocab] by the module's own forward, with `forward` for its decoder's."""
    device = module.get_input_embeddings().weight.device
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    names = ["input_ids"]
    if getattr(module.config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    decoder.forward = forward
    try:
        with torch.inference_mode():
            logits: Tensor = module(**dict.fromkeys(names, ids), use_cache=False).logits[0]
    finally:
        del decoder.forward
    return logits


def spare_layers(
    root: nn.Module, kinds: Mapping[str, Hashable], needed: Collection[str] = ()
) -> list[str]:
    """Paths of the layers in `root` that show nothing which others do not show.

    Of each stack the first layer of each kind is kept, and the last. `kinds`: what more tells
    layers apart, by the path of a module in them; `needed`: modules whose layers are kept too.
    """
    found: list[str] = []
    stacks: list[str] = []
    for path, module in root.named_modules():
        is_inner = any(path.startswith(f"{outer}.") for outer in stacks)
        if is_inner or not _is_stack(root, path, module):
            continue
        stacks.append(path)
        layers = [f"{path}.{index}" for index in range(len(module))]
        signatures = _signatures(module, layers, kinds)
        kept = {layers[signatures.index(each)] for each in signatures} | {layers[-1]}
        kept |= {layer for layer in layers if any(each.startswith(f"{layer}.") for each in needed)}
        found += [layer for layer in layers if layer not in kept]
    return found


def _is_stack(root: nn.Module, path: str, module: nn.Module) -> TypeGuard[nn.ModuleList]:
    """Return whether a module's config counts these as its layers."""
    if not isinstance(module, nn.ModuleList):
        return False
    config = getattr(root.get_submodule(path.rpartition(".")[0]), "config", None)
    return len(module) > 2 and len(module) in [getattr(config, name, None) for name in _COUNTS]


def _signatures(
    stack: nn.ModuleList, paths: Sequence[str], kinds: Mapping[str, Hashable]
) -> list[Hashable]:
    """Describe what tells each layer of a stack from others, but for its place in the stack."""
    settings = [settings_of(layer) for layer in stack]
    places = {
        name
        for name in settings[0]
        if all(each.get(name) == place for place, each in enumerate(settings))
    }
    return [
        (
            tuple((name, tuple(each.shape)) for name, each in layer.named_parameters()),
            tuple((name, type(each)) for name, each in layer.named_modules()),
            frozenset((name, value) for name, value in mine.items() if name not in places),
            tuple(kinds[name] for name in kinds if name.startswith(f"{path}.")),
        )
        for layer, mine, path in zip(stack, settings, paths, strict=True)
    ]


@contextmanager
def without_layers(
    root: nn.Module, paths: Sequence[str], *, on_meta: bool = False
) -> Iterator[None]:
    """Meanwhile, these layers hand on what they are given, in the form of the layer before them.

    They stay in their places: what counts layers, or collects what comes out of them, finds all.
    What layers hand on beside hidden states is missing, so that nobody goes on who reads it (a bias
    that the first one makes for all); `on_meta`: it is None, where nothing is computed.
    """
    forms: dict[str, tuple[None, ...] | None] = {}
    hooks = ExitStack()
    for stack in dict.fromkeys(path.rpartition(".")[0] for path in paths):

        def note(_module: nn.Module, _args: Any, output: Any, stack: str = stack) -> None:
            num_others = len(output) - 1 if on_meta and isinstance(output, tuple) else 0
            forms[stack] = (None,) * num_others if isinstance(output, tuple) else None

        hooks.enter_context(root.get_submodule(f"{stack}.0").register_forward_hook(note))
    layers = [root.get_submodule(path) for path in paths]
    before = [vars(layer).get("forward") for layer in layers]
    for path, layer in zip(paths, layers, strict=True):

        def hand_on(hidden_states: Any, *_: Any, path: str = path, **__: Any) -> Any:
            others = forms[path.rpartition(".")[0]]
            return hidden_states if others is None else (hidden_states, *others)

        vars(layer)["forward"] = hand_on
    try:
        yield
    finally:
        hooks.close()
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = forward


@contextmanager
def narrowed(root: nn.Module, windows: Collection[int], size: int) -> Iterator[None]:
    """Meanwhile, what modules and their configs call a window, or a chunk of attention, of one of
    these is `size` tokens."""
    configs: list[Any] = [module.config for module in root.modules() if hasattr(module, "config")]
    for config in configs:  # which grows: a config may hold others
        inner = [each for each in vars(config).values() if isinstance(each, PreTrainedConfig)]
        configs += [each for each in inner if not any(each is known for known in configs)]
    places = [
        (vars(holder), name, value)
        for holder in (*root.modules(), *configs)
        for name, value in vars(holder).items()
        if ("window" in name or name == "attention_chunk_size")
        and (type(value) is int and value in windows)
    ]
    for settings, name, _ in places:
        settings[name] = size
    try:
        yield
    finally:
        for settings, name, value in places:
            settings[name] = value


class _CalledError(Exception):
    """Ends a forward at one of its modules, with what that was called with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the module was called")
        self.given = args, kwargs


class _Listener(nn.Module):
    """Stands where a module does."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.config = getattr(module, "config", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _CalledError(args, kwargs)


def given_to(
    model: Any, part: nn.Module, inputs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a part of `model`, or the first of a list, is given by its forward.

    The model is left as it is: another thread may run this part meanwhile. Nothing if its forward
    ends without a call of it.
    """
    path = next(path for path, module in model.named_modules() if module is part)
    *owners, name = path.split(".")
    whole = owner = _copied(model)
    for each in owners:
        # The copy is put into its owner's list before it becomes the owner.
        owner._modules[each] = owner = _copied(owner._modules[each])
    is_list = isinstance(part, nn.ModuleList)
    owner._modules[name] = nn.ModuleList([_Listener(None)]) if is_list else _Listener(part)
    try:
        whole(**inputs, use_cache=False)
    except _CalledError as error:
        return error.given
    return (), {}


def _copied(module: Any) -> Any:
    """The module with a list of children that may be changed; the children are the same."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


def embeddings_of(
    model: Any, layers: nn.Module, token_ids: Tensor, features: Mapping[str, Any]
) -> Tensor:
    """The embeddings [L, hidden] that the first of a decoder's `layers` is given for `token_ids`
    [L] and these features, as forward takes them. Raises EngineError where there are none."""
    args, given = given_to(model, layers, {**features, "input_ids": token_ids[None]})
    found = args[0] if args else given.get("hidden_states")
    if isinstance(found, Tensor) and found.shape[:-1] == (1, len(token_ids)):
        return found[0]
    raise EngineError(f"forward of {type(model).__name__} gives its layers other embeddings")


class _WholeSlot:
    """Attention over the tokens of one call."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        mask = visible_mask(0, len(query), 0, args.window, query.device)
        return attend_dense(query, key, value, mask, args)


@contextmanager
def attending_whole(root: nn.Module) -> Iterator[None]:
    """Meanwhile, the decoder layers of a module that is defined here need no pages."""
    layers = [
        module
        for module in root.modules()
        if isinstance(module, Attention) and module.attn_type is AttentionType.DECODER
    ]
    for layer in layers:
        attach_slot(layer, _WholeSlot())
    try:
        yield
    finally:
        for layer in layers:
            attach_slot(layer, None)


@contextmanager
def with_rounding_noise(root: nn.Module, size: float, seed: int = 0) -> Iterator[None]:
    """Meanwhile, every matmul of `root` with weights is off by up to `size` of itself, at random.

    What this does to the logits is what another order of the same sums may do to them: it follows
    depth and dtype, and how sensitive the weights are.
    """
    generator = torch.Generator().manual_seed(seed)

    def disturb(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        noise = (
            torch.rand(output.shape[-1], generator=generator, dtype=torch.float32)
            .mul_(2 * size)
            .sub_(size)
        )
        return output * (1 + noise).to(output)

    with ExitStack() as hooks:
        for module in root.modules():
            if any(weight.dim() > 1 for weight in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_hook(disturb))
        yield
