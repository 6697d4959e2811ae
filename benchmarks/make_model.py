"""Writes the benchmark model: a random LLaVA of the size of a small real one.

    python benchmarks/make_model.py FOLDER [--layers 16] [--dtype bfloat16] [--tiny]

CLIP tower 12 x 768 at 224/14, two-layer projector, Llama decoder 16 x 1024 with 16 heads and 8 KV
heads, 2816 wide, vocabulary 8000; byte-level tokenizer, filled up with words that mean nothing.
Seeded; some 500 MB in bfloat16. `--tiny`: the same images and tokens, but one narrow layer in
each stack, so that everything around the model takes the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

VOCAB_SIZE = 8000
SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
PAD, BOS, EOS, IMAGE = range(4)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def make_tokenizer(
    special: tuple[str, ...] = SPECIAL,
    named: Mapping[str, str] | None = None,
    template: str = TEMPLATE,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these special tokens, some of which have a name."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *letters]
    words += [f"<w{number}>" for number in range(VOCAB_SIZE - len(words))]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=dict(named or {"image_token": "<image>"}),
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def make_model(
    folder: Path,
    layers: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_tiny: bool = False,
) -> None:
    """Write weights, configuration, tokenizer and processor to `folder`."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32 if is_tiny else 1024,
        intermediate_size=64 if is_tiny else 2816,
        num_hidden_layers=1 if is_tiny else layers,
        num_attention_heads=2 if is_tiny else 16,
        num_key_value_heads=1 if is_tiny else 8,
        max_position_embeddings=8192,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    vision = CLIPVisionConfig(
        hidden_size=32 if is_tiny else 768,
        intermediate_size=64 if is_tiny else 3072,
        num_hidden_layers=2 if is_tiny else 12,
        num_attention_heads=2 if is_tiny else 12,
        image_size=224,
        patch_size=14,
    )
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=256
    )
    LlavaForConditionalGeneration(config).to(dtype).save_pretrained(folder)
    square = {"height": 224, "width": 224}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size=square),
        tokenizer=make_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    make_model(args.folder, args.layers, getattr(torch, args.dtype), is_tiny=args.tiny)


if __name__ == "__main__":
    main()
