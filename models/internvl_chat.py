"""InternVL as OpenGVLab publishes it (`InternVLChatModel`), without the code beside its weights.

Chen et al., "How Far Are We to GPT-4V?" (2024) and "Expanding Performance Boundaries of Open-Source
Multimodal Models with Model, Data, and Test-Time Scaling" (2024). The modules are transformers' own
for InternVL: the config is read into theirs, and weights are renamed and cut apart on their way,
InternLM2's to Llama's, whose arithmetic is the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import InternVLConfig, InternVLForConditionalGeneration, PreTrainedConfig
from transformers.utils import cached_file

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.runtime.defined_model import DefinedModel
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.weights import copy_weights
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.hf.substitutes import merge_image_options
from aioengine.processors.inputs import MultiModalKwargs
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from aioengine.processors.prompt.updates import PromptUpdate
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "InternVLChat",
    "InternVLChatConfig",
    "InternVLChatModule",
    "InternVLChatMultiModalProcessor",
    "InternVLChatProcessingInfo",
]

# The language models, and transformers' model type for each.
_TEXT_TYPES = {
    "InternLM2ForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_TEXT_SETTINGS = (
    "attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size "
    "initializer_range intermediate_size layer_types max_position_embeddings max_window_layers "
    "num_attention_heads num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps "
    "rope_scaling rope_theta sliding_window use_sliding_window vocab_size"
)
# What the published config class says where a config.json does not.
_TOP_DEFAULTS = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": False,
    "max_dynamic_patch": 6,
    "min_dynamic_patch": 1,
    "pad2square": False,
    "ps_version": "v1",
    "select_layer": -1,
    "use_thumbnail": False,
}
_VISION_DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_size": 3200,
    "image_size": 224,
    "intermediate_size": 12800,
    "layer_norm_eps": 1e-6,
    "norm_type": "rms_norm",
    "num_attention_heads": 25,
    "num_channels": 3,
    "num_hidden_layers": 48,
    "patch_size": 14,
    "qk_normalization": True,
    "qkv_bias": False,
}
_MOST_TILES = 1024
_ROW, _TURN_END = "<IMG_CONTEXT>", "<|im_end|>"


class InternVLChatConfig(InternVLConfig):  # type: ignore[misc]
    """transformers' config for InternVL, read from an original config.json.

    The settings of the published class that say how images are cut up keep their names.
    """

    turn_end_id: int | None = None
    """Of the token at which the published code ends an answer."""

    @classmethod
    def from_pretrained(cls, source: Any, *, revision: str | None = None, **options: Any) -> Self:
        """Raises ModelLoadError for parts that are not built, and for a config of another shape."""
        settings, _ = PreTrainedConfig.get_config_dict(source, revision=revision, **options)
        try:
            arguments = _converted(settings)
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(
                f"config.json of {Path(source).name!r} is not InternVL's: {type(error).__name__}"
            ) from error
        added = _added_tokens(source, revision)
        if _ROW in added:
            arguments["image_token_id"] = added[_ROW]
        return cls(**arguments, turn_end_id=added.get(_TURN_END))


def _converted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of transformers' InternVLConfig."""
    top = {name: settings.get(name, default) for name, default in _TOP_DEFAULTS.items()}
    text, vision = dict(settings["llm_config"]), {**_VISION_DEFAULTS, **settings["vision_config"]}
    architecture = text["architectures"][0]
    side, patch = vision["image_size"], vision["patch_size"]
    if architecture not in _TEXT_TYPES:
        raise ModelLoadError(
            f"InternVL with {architecture} is not supported; supported language models: "
            f"{', '.join(sorted(_TEXT_TYPES))}"
        )
    if (settings.get("force_image_size") or side) != side:
        raise ModelLoadError(
            f"force_image_size {settings['force_image_size']} differs from the vision model's own "
            f"size, {side}, which is not supported"
        )
    if top.pop("ps_version") != "v2" or top.pop("pad2square"):
        raise ModelLoadError("InternVL before version 1.5 (ps_version v1, pad2square) is not built")
    layer, num_layers = top.pop("select_layer"), vision["num_hidden_layers"]
    ratio = top["downsample_ratio"]
    is_tied = bool(text.get("tie_word_embeddings", False))
    return {
        **top,
        "architectures": ["InternVLChatModel"],
        "dtype": settings.get("dtype", settings.get("torch_dtype")),
        "text_config": {**_text_settings(text, architecture), "tie_word_embeddings": is_tied},
        "tie_word_embeddings": is_tied,
        "image_seq_length": int((side // patch) ** 2 * ratio**2),
        "vision_config": {
            name: vision[name]
            for name in _VISION_DEFAULTS
            if name not in ("qk_normalization", "qkv_bias")
        }
        | {
            "use_qk_norm": vision["qk_normalization"],
            "attention_bias": vision["qkv_bias"],
            # The rows of a layer before the last are its output: what follows it is left out.
            "num_hidden_layers": layer if layer >= 0 else num_layers + 1 + layer,
            "image_size": [side, side],
            "patch_size": [patch, patch],
        },
    }


def _text_settings(text: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    known = {name: text[name] for name in _TEXT_SETTINGS.split() if text.get(name) is not None}
    if architecture == "InternLM2ForCausalLM":
        known["attention_bias"] = text.get("bias", True)
    return {"model_type": _TEXT_TYPES[architecture], "architectures": [architecture], **known}


_NAMES = (
    ("vision_model.", "model.vision_tower."),
    (".encoder.layers.", ".encoder.layer."),
    (".class_embedding", ".cls_token"),
    (".position_embedding", ".position_embeddings"),
    (".patch_embedding.", ".patch_embeddings.projection."),
    (".ls1", ".lambda_1"),
    (".ls2", ".lambda_2"),
    (".attn.proj.", ".attention.projection_layer."),
    (".attn.", ".attention."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    ("mlp1.0.", "model.multi_modal_projector.layer_norm."),
    ("mlp1.1.", "model.multi_modal_projector.linear_1."),
    ("mlp1.3.", "model.multi_modal_projector.linear_2."),
    ("language_model.lm_head.", "lm_head."),
    # InternLM2
    ("language_model.output.", "lm_head."),
    (".tok_embeddings.", ".embed_tokens."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("language_model.model.", "model.language_model."),
)


class InternVLChatModule(InternVLForConditionalGeneration):  # type: ignore[misc]
    """transformers' module, which loads weights by their original names."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tie_weights()
        for layer in self.model.vision_tower.encoder.layer:
            for norm in (layer.attention.q_norm, layer.attention.k_norm):
                if not isinstance(norm, nn.Identity):
                    # transformers fixes it here, and the published class takes the config's.
                    norm.variance_epsilon = config.vision_config.layer_norm_eps

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Names of what was loaded; see `DefinedModel`."""
        return copy_weights(self, self._renamed(weights))

    def _renamed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        num_layers = self.config.vision_config.num_hidden_layers
        for original, tensor in weights:
            layer = re.match(r"vision_model\.encoder\.layers\.(\d+)\.", original)
            is_left_out = layer is not None and int(layer[1]) >= num_layers
            if is_left_out or original.endswith("rotary_emb.inv_freq"):
                continue
            name = original
            for old, new in _NAMES:
                name = name.replace(old, new)
            yield from self._cut(name, tensor)

    def _cut(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Queries, keys and values, which lie in one tensor, each for itself."""
        if ".attention.qkv." in name:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace(".qkv.", f".{letter}_proj."), part
        elif ".attention.wqkv." in name:
            # For each key head its queries', then its own, then its value's.
            text = self.config.text_config
            num_groups = text.num_attention_heads // text.num_key_value_heads
            shape = (text.num_key_value_heads, num_groups + 2, -1, *tensor.shape[1:])
            parts = torch.split(tensor.reshape(shape), [num_groups, 1, 1], dim=1)
            for letter, part in zip("qkv", parts, strict=True):
                own = name.replace(".attention.wqkv.", f".self_attn.{letter}_proj.")
                yield own, part.flatten(0, 2)
        else:
            yield name, tensor


class InternVLChatProcessingInfo(GenericProcessingInfo):
    """An HF processor made of the model's config, and how images are cut up."""

    placeholders_are_text = True

    @classmethod
    def load_tokenizer(cls, source: str, hf_config: Any, options: Mapping[str, Any]) -> Any:
        if hf_config.text_config.architectures == ["InternLM2ForCausalLM"]:
            from aioengine.processors.hf.sentencepiece import load_internlm2_tokenizer

            return load_internlm2_tokenizer(source, options.get("revision"))
        return super().load_tokenizer(source, hf_config, options)

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        from aioengine.processors.hf.internvl_chat import (
            InternVLChatImageProcessor,
            InternVLChatProcessor,
        )

        height, width = hf_config.vision_config.image_size
        image_processor = InternVLChatImageProcessor(
            size={"height": height, "width": width},
            dynamic_image_size=hf_config.dynamic_image_size,
            use_thumbnail=hf_config.use_thumbnail,
            min_dynamic_patch=hf_config.min_dynamic_patch,
            max_dynamic_patch=hf_config.max_dynamic_patch,
        )
        tokenizer = cls.load_tokenizer(source, hf_config, options)
        unknown = [
            token
            for token in ("<img>", _ROW, "</img>")
            if len(tokenizer.encode(token, add_special_tokens=False)) != 1
        ]
        if unknown:
            raise ModelLoadError(f"the tokenizer has no token {unknown[0]}")
        return InternVLChatProcessor(
            image_processor, tokenizer, num_image_token=hf_config.image_seq_length, **kwargs
        )

    def get_embed_token_id(self, modality: str, token_ids: Sequence[int]) -> int:
        return int(self.get_hf_config().image_token_id)

    def get_largest_item(self, modality: str) -> tuple[Any, int]:
        """An image of as many tiles as there may be, and its encoder rows."""
        from aioengine.processors.hf.internvl_chat import grids

        processor = self.get_hf_processor()
        image_processor, options = (
            processor.image_processor,
            self._options(self.ctx.mm_processor_kwargs),
        )
        fewest, most = (
            options.get(name, getattr(image_processor, name))
            for name in ("min_dynamic_patch", "max_dynamic_patch")
        )
        columns, rows = grids(fewest, most)[-1] if grids(fewest, most) else (1, 1)
        (image,) = GenericDummyInputsBuilder(self)._get_dummy_images(
            width=image_processor.size["width"] * columns,
            height=image_processor.size["height"] * rows,
            num_images=1,
        )
        return image, image_processor.count_tiles(*image.size, options) * processor.num_image_token

    def expand(self, width: int, height: int, mm_kwargs: Mapping[str, Any]) -> str:
        """Build what stands in a prompt for an image of this size.

        Raises InvalidRequestError for options that the model cannot take.
        """
        processor, options = self.get_hf_processor(), self._options(mm_kwargs)
        own = dict(processor.image_processor.size)
        if options.get("size") is not None and dict(options["size"]) != own:
            raise InvalidRequestError(
                f"the model takes tiles of {own['width']} x {own['height']} pixels only; leave "
                "size in mm_processor_kwargs as it is",
                parameter="mm_processor_kwargs",
            )
        num_tiles = processor.image_processor.count_tiles(width, height, options)
        return str(processor.expand(num_tiles))

    def _options(self, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        options = merge_image_options(self.get_hf_processor(), mm_kwargs)
        for name in ("min_dynamic_patch", "max_dynamic_patch"):
            value = options.get(name, 1)
            if not isinstance(value, int) or not 1 <= value <= _MOST_TILES:
                raise InvalidRequestError(
                    f"{name} in mm_processor_kwargs must be a number from 1 to {_MOST_TILES}",
                    parameter="mm_processor_kwargs",
                )
        return options


class InternVLChatMultiModalProcessor(GenericMultiModalProcessor):
    """An image's tiles follow from its size, so that prompts are laid out from headers."""

    layout_needs_hf_outputs = False

    info: InternVLChatProcessingInfo

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        images = mm_items.get("image")
        if images is None or isinstance(images, EmbeddingItems):
            return super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        assert isinstance(images, ImageProcessorItems)
        sizes = [images.get_image_size(index) for index in range(len(images))]
        texts = [self.info.expand(*size, hf_processor_mm_kwargs) for size in sizes]
        return self._updates_of("image", texts, [self.info.encode(text) for text in texts])


@MULTIMODAL_REGISTRY.register_processor(
    InternVLChatMultiModalProcessor,
    info=InternVLChatProcessingInfo,
    dummy_inputs=GenericDummyInputsBuilder,
)
class InternVLChat(DefinedModel):
    """transformers' module and decoder, weights and config from the original files."""

    config_class = InternVLChatConfig
    definition = InternVLChatModule

    @classmethod
    def load_module(cls, path: str | os.PathLike[str], *, hf_config: Any, **options: Any) -> Any:
        """See the base class.

        An answer also ends at the token that ends a turn in the published conversation templates,
        whether or not generation_config.json says so: the published code stops there.
        """
        found = super().load_module(path, hf_config=hf_config, **options)
        generation = found.generation_config
        known = generation.eos_token_id
        if known is None:
            known = hf_config.text_config.eos_token_id
        ids = [known] if isinstance(known, int) else list(known or ())
        if hf_config.turn_end_id is not None:
            ids.append(hf_config.turn_end_id)
        generation.eos_token_id = list(dict.fromkeys(ids)) or None
        return found

    call_decoder = TransformersModel.call_decoder
    logits = TransformersModel.logits


def _added_tokens(path: str | os.PathLike[str], revision: str | None) -> dict[str, int]:
    """The tokens that a tokenizer's own files add to its vocabulary, as far as they say."""
    found: dict[str, int] = {}
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        file = cached_file(
            os.fspath(path), name, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if file is None:
            continue
        content = json.loads(Path(file).read_text())
        if name == "added_tokens.json":
            found.update(content)
        elif name == "tokenizer.json":
            found.update({each["content"]: each["id"] for each in content["added_tokens"]})
        else:
            added = content.get("added_tokens_decoder", {})
            found.update({each["content"]: int(index) for index, each in added.items()})
    return found
