"""Decoders that compute attention in code of their own, run over transformers' cache interface.

Some modules spell out their attention and ask no `AttentionInterface`, or build masks and biases
for whole sequences: they cannot run on a flat batch of many requests' tokens. All of them put keys
and values into a cache, though. Such a decoder keeps its own forward, attention, masks and
positions, and is called with a cache of ours, which writes a step's keys and values into the pages
and gives back those of the whole context: once for each chunk, and once for all requests with one
token, which are padded on the left as `generate` pads a batch, or only for those of one length
where the module takes no padding.

This is right and slow; what runs on a flat batch never comes here.
"""

from __future__ import annotations

import logging
from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.models.by_cache.caches import CacheSpecs, check_state, find_layers
from aioengine.models.by_cache.calls import attach_cache
from aioengine.models.runtime.hf_loading import build_on_meta
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["ByCache"]

logger = logging.getLogger(__name__)


class ByCache(TransformersModel):
    """A model whose decoder is run by its own cache interface where it cannot run flattened."""

    def layers(self) -> tuple[LayerSpec, ...]:
        """See the base class. Raises its error where the decoder cannot run either way."""
        modules: Any = self.decoder().modules()  # not all have what the config is for
        if any(getattr(each, "attention_type", None) == "block_sparse" for each in modules):
            raise ModelLoadError(
                f"{type(self.model).__name__} attends in blocks to long prompts only, to tokens "
                "behind them too, and a short one turns that off for all later ones; set "
                "attention_type to 'original_full' in config.json"
            )
        try:
            return super().layers()
        except ModelLoadError as error:
            try:
                return self.layers_by_cache()
            except ModelLoadError as other:
                reason = str(error).rstrip(".")
                raise ModelLoadError(f"{reason}. Nor by its cache: {other}") from other

    @classmethod
    def probe_by_cache(cls, hf_config: Any) -> CacheSpecs | None:
        """The layers by what they put into a cache, of a model that fails its trial on a flat
        batch; None if it cannot be run so."""
        try:
            return cls.around(build_on_meta(cls.hf_class(hf_config), hf_config)).layers_by_cache()
        except ModelLoadError:
            return None

    def layers_by_cache(self) -> CacheSpecs:
        """The layers by what they put into a cache. Raises ModelLoadError."""
        check_state(self.decoder())
        # A decoder that was probed in another way has been used up.
        shell = self.around(build_on_meta(self.hf_class(self.hf_config), self.hf_config))
        return find_layers(shell.decoder(), self.hidden_size)

    def patch(self) -> None:
        """Have the decoder run by its cache, if that is how its layers were found."""
        if not isinstance(self.specs, CacheSpecs):
            super().patch()
            return
        table = self.model.get_input_embeddings().weight
        logger.info(
            "%s computes attention in code of its own: it is run by its cache, a call for each "
            "chunk, which is slower than a flat batch",
            type(self.model).__name__,
        )
        attach_cache(self.decoder(), self.specs, self._holder, self.layer_groups, table)
