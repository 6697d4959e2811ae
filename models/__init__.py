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

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "aioengine.models.runtime.attention": "Attention AttentionType",
        "aioengine.models.runtime.defined_model": "DefinedModel",
        "aioengine.models.runtime.interfaces": (
            "MultiModalEmbeddings NestedTensors SupportsEncoderDecoder SupportsMultiModal "
            "merge_multimodal_embeddings"
        ),
        "aioengine.models.runtime.registry": "register_model resolve",
        "aioengine.models.runtime.transformers_model": "TransformersModel",
    },
)
