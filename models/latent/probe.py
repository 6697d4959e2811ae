"""The layers whose keys and values are made of latents, as their own calls show it.

A module that expands latents is watched while its decoder runs on the meta device: what it makes
of them must be what it attends to. That a head's key is a linear function of the latent, with the
turned key of all heads behind it, and its value another one, is shown by a trial of its own code.
"""

from __future__ import annotations

import copy
import logging
from functools import partial

import torch
from torch import Tensor, nn

from aioengine.models.fusion.trial import agree, random_rows
from aioengine.models.latent.layers import LatentSizes, expand, expansion_of

__all__ = ["Expansions", "is_same_view"]

logger = logging.getLogger(__name__)

_ROWS = 3


class Expansions:
    """Notes what the modules of `decoder` expand, while it runs."""

    def __init__(self, decoder: nn.Module) -> None:
        self._made: dict[nn.Module, tuple[LatentSizes, Tensor, Tensor]] = {}
        self._tried: dict[tuple[type[nn.Module], LatentSizes], bool] = {}
        self._left: set[type[nn.Module]] = set()
        for module in decoder.modules():
            if expansion_of(module) is not None:
                module.expand_kv = partial(self._note, module)  # type: ignore[assignment]

    def sizes_of(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor
    ) -> LatentSizes | None:
        """Return what the keys and values [T, H, ...] that `module` attends to are made of; None
        where pages must hold them as they are."""
        if expansion_of(module) is None:
            return None
        if module in self._made:
            sizes, *made = self._made[module]
            is_all = is_same_view(key, made[0]) and is_same_view(value, made[1])
            if is_all and query.shape[1] == sizes.heads and self._is_by_heads(module, sizes):
                return sizes
        if type(module) not in self._left:
            self._left.add(type(module))
            logger.info(
                "the KV cache holds keys and values of all heads of %s, which makes them of latents"
                " in a way that is not known here",
                type(module).__name__,
            )
        return None

    def _note(self, module: nn.Module, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        key, value = expand(module, latent, turned)
        if latent.dim() == turned.dim() == 4 and latent.shape[:2] == turned.shape[:2] == (1, 1):
            width = turned.shape[-1]
            still = key.shape[-1] - width
            sizes = LatentSizes(key.shape[1], latent.shape[-1], width, still, value.shape[-1])
            self._made[module] = sizes, key[0].transpose(0, 1), value[0].transpose(0, 1)
        return key, value

    def _is_by_heads(self, module: nn.Module, sizes: LatentSizes) -> bool:
        name = type(module), sizes
        if name not in self._tried:
            self._tried[name] = _is_by_heads(module, sizes)
        return self._tried[name]


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Return whether both are the same view of one storage: on the meta device there are no
    addresses."""
    return (
        one.untyped_storage() is other.untyped_storage()
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _is_by_heads(module: nn.Module, sizes: LatentSizes) -> bool:
    """Return whether a copy of `module` expands random rows as `LatentSlot` takes it to do."""
    layer = expansion_of(module)
    outputs = sizes.heads * (sizes.still + sizes.value)
    if layer is None or sizes.still < 0 or layer._parameters.get("bias") is not None:
        return False
    if (layer.in_features, layer.out_features) != (sizes.latent, outputs):
        return False
    tried = nn.Linear(sizes.latent, outputs, bias=False, device="meta")
    weight = random_rows(outputs, sizes.latent, seed=1)
    tried.weight = nn.Parameter(weight, requires_grad=False)
    plain = copy.copy(module)
    plain.__dict__["_modules"] = {**module._modules, "kv_b_proj": tried}
    latent = random_rows(1, 1, _ROWS, sizes.latent, seed=2)
    turned = random_rows(1, 1, _ROWS, sizes.turned, seed=3)
    by_head = weight.view(sizes.heads, -1, sizes.latent)

    def wanted() -> tuple[Tensor, Tensor]:
        still, value = (latent @ by_head.mT).tensor_split([sizes.still], dim=-1)
        return torch.cat([still, turned.expand(-1, sizes.heads, -1, -1)], dim=-1), value

    def is_same(index: int) -> bool:
        return agree(lambda: expand(plain, latent, turned)[index], lambda: wanted()[index])

    with torch.no_grad():
        return is_same(0) and is_same(1)
