"""Models: transformers' own modules run on a flattened batch over paged attention.

`adapter` is the generic wrapper; a family is a subclass that overrides what differs. `attention`
is the seam between transformers' attention and `aioengine.kernels`, `probe` finds a model's
attention layers without its weights, `registry` maps architectures to classes.

Importing this package imports neither torch nor transformers; the names below load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.types import lazy_exports

if TYPE_CHECKING:
    from aioengine.models.runtime.attention import Attention as Attention
    from aioengine.models.runtime.attention import AttentionType as AttentionType
    from aioengine.models.runtime.defined_model import DefinedModel as DefinedModel
    from aioengine.models.runtime.interfaces import MultiModalEmbeddings as MultiModalEmbeddings
    from aioengine.models.runtime.interfaces import NestedTensors as NestedTensors
    from aioengine.models.runtime.interfaces import SupportsEncoderDecoder as SupportsEncoderDecoder
    from aioengine.models.runtime.interfaces import SupportsMultiModal as SupportsMultiModal
    from aioengine.models.runtime.interfaces import (
        merge_multimodal_embeddings as merge_multimodal_embeddings,
    )
    from aioengine.models.runtime.registry import register_model as register_model
    from aioengine.models.runtime.registry import resolve as resolve
    from aioengine.models.runtime.transformers_model import TransformersModel as TransformersModel

_HOMES = {
    "Attention": "aioengine.models.runtime.attention",
    "AttentionType": "aioengine.models.runtime.attention",
    "DefinedModel": "aioengine.models.runtime.defined_model",
    "MultiModalEmbeddings": "aioengine.models.runtime.interfaces",
    "NestedTensors": "aioengine.models.runtime.interfaces",
    "SupportsEncoderDecoder": "aioengine.models.runtime.interfaces",
    "SupportsMultiModal": "aioengine.models.runtime.interfaces",
    "TransformersModel": "aioengine.models.runtime.transformers_model",
    "merge_multimodal_embeddings": "aioengine.models.runtime.interfaces",
    "register_model": "aioengine.models.runtime.registry",
    "resolve": "aioengine.models.runtime.registry",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
