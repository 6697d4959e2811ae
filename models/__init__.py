"""Models: transformers' own modules run on a flattened batch over paged attention.

`adapter` is the generic wrapper; a family is a subclass that overrides what differs. `attention`
is the seam between transformers' attention and `aioengine.kernels`, `probe` finds a model's
attention layers without its weights, `registry` maps architectures to classes.

Importing this package imports neither torch nor transformers; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine.models.adapter import TransformersModel as TransformersModel
    from aioengine.models.attention import Attention as Attention
    from aioengine.models.attention import AttentionType as AttentionType
    from aioengine.models.defined import DefinedModel as DefinedModel
    from aioengine.models.interfaces import MultiModalEmbeddings as MultiModalEmbeddings
    from aioengine.models.interfaces import NestedTensors as NestedTensors
    from aioengine.models.interfaces import SupportsEncoderDecoder as SupportsEncoderDecoder
    from aioengine.models.interfaces import SupportsMultiModal as SupportsMultiModal
    from aioengine.models.interfaces import (
        merge_multimodal_embeddings as merge_multimodal_embeddings,
    )
    from aioengine.models.registry import register_model as register_model
    from aioengine.models.registry import resolve as resolve

_HOMES = {
    "Attention": "aioengine.models.attention",
    "AttentionType": "aioengine.models.attention",
    "DefinedModel": "aioengine.models.defined",
    "MultiModalEmbeddings": "aioengine.models.interfaces",
    "NestedTensors": "aioengine.models.interfaces",
    "SupportsEncoderDecoder": "aioengine.models.interfaces",
    "SupportsMultiModal": "aioengine.models.interfaces",
    "TransformersModel": "aioengine.models.adapter",
    "merge_multimodal_embeddings": "aioengine.models.interfaces",
    "register_model": "aioengine.models.registry",
    "resolve": "aioengine.models.registry",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
