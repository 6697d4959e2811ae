"""The demo model's parts: tokenizer, processor and an untrained network, all Hugging Face classes.

The text form is the same whether it comes from the chat template or is typed by hand:

    <s>USER: <image>
    Describe the picture. ASSISTANT:A large red star at the top.</s>
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

IMAGE_PX = 84
PATCH_PX = 14
GRID = IMAGE_PX // PATCH_PX
IMAGE_TOKENS = GRID * GRID

PAD, BOS, EOS, IMAGE = "<pad>", "<s>", "</s>", "<image>"
PAD_ID, BOS_ID, EOS_ID, IMAGE_ID = range(4)
MAX_VOCABULARY = 1024

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set parts = [{'type': 'text', 'text': message['content']}] -%}
{%- else -%}
{%- set parts = message['content'] -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}{{- 'USER: ' -}}
{%- elif message['role'] == 'assistant' -%}{{- ' ASSISTANT:' -}}{%- endif -%}
{%- for part in parts if part['type'] == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in parts if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}
{%- elif message['role'] != 'user' -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ' ASSISTANT:' -}}{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE on ``texts``; any UTF-8 text survives encoding and decoding."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True) for text in (PAD, BOS, EOS, IMAGE)]
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens={"image_token": IMAGE},
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Pairs the tokenizer with a Pillow image processor that squeezes to IMAGE_PX squared."""
    square = {"height": IMAGE_PX, "width": IMAGE_PX}
    image_processor = SiglipImageProcessorPil(
        size=square, crop_size=square, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=PATCH_PX,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(vocabulary: int) -> LlavaForConditionalGeneration:
    """A fresh network: SigLIP tower, two-layer projector, Llama decoder, about 2 M parameters."""
    vision = SiglipVisionConfig(
        image_size=IMAGE_PX,
        patch_size=PATCH_PX,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=5,
        num_attention_heads=5,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_ID,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = LlavaForConditionalGeneration(config)
    set_generation_defaults(model)
    return model


def set_generation_defaults(model: LlavaForConditionalGeneration) -> None:
    """Greedy decoding, and enough new tokens for the longest description."""
    generation = model.generation_config
    assert generation is not None
    generation.bos_token_id = BOS_ID
    generation.eos_token_id = EOS_ID
    generation.pad_token_id = PAD_ID
    generation.do_sample = False
    generation.max_new_tokens = 64


def save(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Writes the whole model folder: weights in float32, configs, tokenizer and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.float32).save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)
