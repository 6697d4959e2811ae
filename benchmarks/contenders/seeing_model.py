"""Writes a model that takes images, out of SmolLM2-135M's decoder and a random vision tower.

    PYTHONPATH=. HF_HUB_OFFLINE=1 python benchmarks/contenders/seeing_model.py SOURCE FOLDER

SOURCE is SmolLM2-135M-Instruct as `make real-test` fetches it: its decoder and tokenizer are kept,
with Idefics 3's marks of images added. Tower and connector have the shape of SmolVLM-256M's and
seeded random weights: what the model says of an image means nothing, but it takes the work of one
whose words do. An image becomes at most `TILES` x `TILES` tiles and an overview.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

SIDE, PATCH, MERGED, WIDTH, LAYERS, TILES = 512, 16, 4, 768, 12, 2
SPECIAL = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
ROW_MULTIPLE = 64
"""The vocabulary's rows are filled up to a multiple of this."""


def make_processor(source: Path) -> Any:
    """The processor, its tokenizer with the marks of images."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    marks = [AddedToken(word, special=True, normalized=False) for word in SPECIAL]
    tokenizer.add_tokens(marks, special_tokens=True)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE * TILES},
        max_image_size={"longest_edge": SIDE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    template, count = tokenizer.chat_template, (SIDE // PATCH // MERGED) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=count, chat_template=template)


def make_model(source: Path, tokenizer: Any) -> Any:
    """The model in bfloat16: SmolLM2 behind a random tower."""
    torch.manual_seed(0)
    decoder = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    num_known, rows = decoder.config.vocab_size, -(-len(tokenizer) // ROW_MULTIPLE) * ROW_MULTIPLE
    decoder.resize_token_embeddings(rows, mean_resizing=False)
    words = decoder.get_input_embeddings().weight.data
    std = float(words[:num_known].std())
    torch.nn.init.normal_(words[num_known:], std=std)
    config = Idefics3Config(
        vision_config={
            "hidden_size": WIDTH,
            "intermediate_size": 4 * WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 12,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        text_config=decoder.config,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=MERGED,
        tie_word_embeddings=True,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    # The tower ends in a norm: rows of the connector are then as large as words'.
    connector = model.model.connector.modality_projection.proj.weight
    torch.nn.init.normal_(connector, std=std / math.sqrt(connector.shape[1]))
    model.generation_config = decoder.generation_config
    return model.to(torch.bfloat16)


def make(source: Path, folder: Path) -> None:
    """Write the model and its processor to `folder`."""
    processor = make_processor(source)
    make_model(source, processor.tokenizer).save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    make(args.source, args.folder)


if __name__ == "__main__":
    main()
