"""The benchmark's model that takes images: its decoder, and its prompts with pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoProcessor, Idefics3ForConditionalGeneration

from aioengine import AsyncEngine, SamplingParams
from tests.support.tiny import tiny_image
from tests.support.tools_model import save_tiny_text_caller

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
try:
    from contenders import desk, seeing_model
finally:
    sys.path.pop(0)

NOTE = "Its note: taxi"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text model, and what it becomes with a small tower and the template of tools."""
    text, seeing = (tmp_path_factory.mktemp(name) for name in ("text", "seeing"))
    save_tiny_text_caller(text, max_position_embeddings=2048, tie_word_embeddings=True)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("SIDE", 64), ("WIDTH", 48), ("LAYERS", 1)):
            patched.setattr(seeing_model, name, value)
        seeing_model.make(text, seeing)
    (seeing / "chat_template.jinja").write_text(desk.TEMPLATE)
    return text, seeing


def conversation(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Read."}, {"role": "user", "content": content}]


def test_the_decoder_is_kept(folders: tuple[Path, Path]) -> None:
    text, seeing = folders
    kept = AutoModelForCausalLM.from_pretrained(text, dtype=torch.bfloat16).state_dict()
    model = Idefics3ForConditionalGeneration.from_pretrained(seeing, dtype=torch.bfloat16)
    made = model.model.text_model.state_dict()
    words = kept.pop("model.embed_tokens.weight")
    grown = made["embed_tokens.weight"]
    assert torch.equal(grown[: len(words)], words)
    new = grown[len(words) :].float()
    assert len(grown) % 64 == 0
    assert float(new.std()) == pytest.approx(float(words.float().std()), rel=0.1)
    assert model.lm_head.weight is model.model.text_model.embed_tokens.weight
    del kept["lm_head.weight"]
    assert len(kept) == len(made) - 1
    assert all(torch.equal(made[name.removeprefix("model.")], kept[name]) for name in kept)


async def test_a_picture_is_five_tiles_in_the_same_prompt(folders: tuple[Path, Path]) -> None:
    image = tiny_image(0, 60, 80)
    messages = conversation([{"type": "image", "image": image}, {"type": "text", "text": NOTE}])
    processor = AutoProcessor.from_pretrained(folders[1])
    theirs = processor.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    (token_ids,) = theirs["input_ids"]
    engine = AsyncEngine.from_pretrained(
        folders[1], device="cpu", dtype="bfloat16", kv_cache_bytes=8 << 20
    )
    async with engine:
        params = SamplingParams(temperature=0, max_tokens=1)
        output = await engine.generate(messages, params, tools=TOOLS)
    assert [*output.prompt_token_ids] == [*token_ids]
    assert token_ids.count(processor.image_token_id) == 5  # a token each


def test_texts_and_parts_are_written_alike(folders: tuple[Path, Path]) -> None:
    tokenizer = AutoProcessor.from_pretrained(folders[1]).tokenizer
    contents: list[str | list[dict[str, Any]]] = [NOTE, [{"type": "text", "text": NOTE}]]
    plain, parts = (
        tokenizer.apply_chat_template(conversation(content), tools=TOOLS, tokenize=False)
        for content in contents
    )
    assert plain == parts and plain.count(NOTE) == 1
