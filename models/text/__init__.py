"""Decoders without media that the generic adapter runs as they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.by_cache.model import ByCache
from aioengine.models.fusion.trial import is_near, random_rows
from aioengine.models.runtime.hf_loading import padding_of
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.whole_pass import run_head

__all__ = ["GptOss", "TextModel"]

_NUM_TRIED = 4


class TextModel(ByCache):
    """A causal language model: token ids in, logits out."""

    has_own_head: bool = False
    """Whether logits take more than the output embeddings, as BERT's do."""

    @cached_property
    def padding_id(self) -> int | None:
        """The id of padding, where the decoder gives it a position of its own."""
        return padding_of(self.decoder())

    @property
    def first_position(self) -> int:
        """The position of a sequence's first token: a decoder may count from another than 0."""
        return 0 if self.padding_id is None else self.padding_id + 1

    @property
    def max_position_embeddings(self) -> int | None:
        """See the base class."""
        limit = super().max_position_embeddings
        return None if limit is None else limit - self.first_position

    def patch(self) -> None:
        """See the base class."""
        self.has_own_head = self._finds_own_head()
        super().patch()

    @torch.no_grad()
    def _finds_own_head(self) -> bool:
        """Try whether the class makes logits in another way than its output embeddings do."""
        if not self.generates:
            return False
        table = self.model.get_input_embeddings().weight
        width = int(getattr(self.text_config, "hidden_size", table.shape[1]))
        hidden = random_rows(_NUM_TRIED, width, like=table)
        try:
            own = run_head(self.model, self.decoder(), hidden)
        except Exception:  # it reads more of its decoder than hidden states
            return False
        try:
            return not is_near(self.logits(hidden), own)
        except RuntimeError:  # its table is of another width
            return True

    def logits(self, hidden: Tensor) -> Tensor:
        """See the base class."""
        if self.has_own_head:
            return run_head(self.model, self.decoder(), hidden)
        return super().logits(hidden)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int] | None:
        """See the base class. Raises InvalidRequestError for padding, of which only the module's
        own forward on ids knows the position."""
        if self.padding_id is not None and self.padding_id in token_ids:
            raise InvalidRequestError(
                f"the prompt has the padding token {self.padding_id}, which has no place among the "
                "model's positions; leave it out",
                parameter="prompt",
                value=self.padding_id,
            )
        return None

    def position_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        """See the base class."""
        shifted = positions + self.first_position if self.first_position else positions
        return super().position_arguments(shifted)

    def layers(self) -> tuple[LayerSpec, ...]:
        """See the base class. Raises ModelLoadError where tokens see later ones."""
        decoder, found = self.decoder(), super().layers()
        attends = {each.name: decoder.get_submodule(each.name) for each in found}
        both = [name for name, each in attends.items() if not getattr(each, "is_causal", True)]
        if both and getattr(decoder.config, "is_decoder", False):
            return self.layers_by_cache()  # it is causal by its own masks
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
