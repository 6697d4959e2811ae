"""Decoders without media that the generic adapter runs as they are."""

from __future__ import annotations

from aioengine.errors import ModelLoadError
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["GptOss", "TextModel"]


class TextModel(TransformersModel):
    """A causal language model: token ids in, logits out."""

    def layers(self) -> tuple[LayerSpec, ...]:
        """See the base class. Raises ModelLoadError where tokens see later ones."""
        decoder, found = self.decoder(), super().layers()
        attends = {each.name: decoder.get_submodule(each.name) for each in found}
        both = [name for name, each in attends.items() if not getattr(each, "is_causal", True)]
        if both:
            raise ModelLoadError(
                f"{type(self.model).__name__} does not generate text as it is configured: tokens "
                f"see later ones in {', '.join(both[:3])}"
            )
        return found


class GptOss(TextModel):
    """Experts that are published in MXFP4 stay so on a CPU, 4.5 bits a weight.

    Elsewhere they are unpacked to the engine's dtype: transformers could compute on the packed
    ones, with kernels that it fetches from a hub.
    """
