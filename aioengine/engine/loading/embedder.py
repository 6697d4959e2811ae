"""Abilities of a loaded model beside text: embeddings, and scores of pairs."""

from __future__ import annotations

from typing import Any

from aioengine.errors import InvalidRequestError, shown
from aioengine.models.runtime.interfaces import SupportsEncoderDecoder
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import is_classifier
from aioengine.models.text.embedders import EmbedderSettings
from aioengine.sampling.pooling import POOLINGS, Pooling

__all__ = ["Embedder"]


class Embedder:
    """One model's poolings. `settings`: what its checkpoint says; None where it says nothing."""

    def __init__(self, model: TransformersModel, settings: EmbedderSettings | None) -> None:
        self._settings = settings or EmbedderSettings()
        self._generates = model.generates
        self._is_causal = model.is_causal
        self._has_memory = isinstance(model, SupportsEncoderDecoder)
        config: Any = model.hf_config
        self.width = max(model.hidden_size, getattr(model.text_config, "hidden_size", None) or 0)
        """Numbers of an embedding at most; few models have fewer than their config says."""
        self._num_labels = int(config.num_labels) if is_classifier(model.model) else 0
        self._head_kind = "last"
        if not model.is_causal:
            self._head_kind = getattr(config, "classifier_pooling", None) or "cls"

    def check_generates(self) -> None:
        """Raise InvalidRequestError where the model gives no text."""
        if not self._generates:
            message = (
                "this model has no output head and gives no text; ask it for embeddings or scores"
            )
            raise InvalidRequestError(message, parameter="prompt")

    def pooling(self, kind: str | None) -> tuple[Pooling, bool]:
        """Choose how a prompt is embedded, by default or as `kind` says, and whether to length 1.

        Raises InvalidRequestError where the model cannot.
        """
        if kind is not None and kind not in POOLINGS:
            message = f"pooling must be one of {', '.join(POOLINGS)}, not {shown(kind, 40)}"
            raise InvalidRequestError(message, parameter="pooling", value=shown(kind, 40))
        if self._has_memory:
            message = "an encoder-decoder model gives no embeddings; take a decoder or an encoder"
            raise InvalidRequestError(message, parameter="prompt")
        settings = self._settings
        if settings.obstacle and kind is None:
            message = (
                f"the checkpoint's embeddings are not computed here: {settings.obstacle}; give "
                "pooling to have hidden states without that"
            )
            raise InvalidRequestError(message, parameter="pooling")
        if kind == "cls" and self._is_causal:
            message = (
                "pooling 'cls' takes the first token, which sees no other one in this model; take "
                "'last' or 'mean'"
            )
            raise InvalidRequestError(message, parameter="pooling", value=kind)
        kind = kind or settings.pooling or ("last" if self._is_causal else "mean")
        return Pooling(kind), settings.normalizes is not False

    @property
    def scores(self) -> bool:
        """Return whether a head scores pairs of texts; else their embeddings' cosine does.

        Raises InvalidRequestError where neither can be.
        """
        if self._num_labels > 1:
            message = (
                f"this model's head has {self._num_labels} labels, and a score needs one; take a "
                "cross-encoder of one label, or ask for embeddings"
            )
            raise InvalidRequestError(message, parameter="query", value=self._num_labels)
        return self._num_labels == 1

    def head(self, second_text: int) -> Pooling:
        """Build the pooling of the head, for a pair of texts whose second begins there."""
        return Pooling(self._head_kind, is_scored=True, second_text=second_text)
