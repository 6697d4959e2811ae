"""Tiny random models whose chat templates know tools, as tests of agents want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import save_tiny_llava, tiny_llama, tiny_processor, tiny_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
"""In the form of Hermes."""


def save_tiny_caller(folder: Path) -> None:
    """Write a model that sees images to `folder`."""
    save_tiny_llava(folder)
    processor = tiny_processor()
    processor.chat_template = TEMPLATE
    processor.save_pretrained(folder)


def save_tiny_text_caller(folder: Path, **changes: Any) -> Path:
    """Write a model of texts alone to `folder`; returns it. `changes`: of the model's config."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    return folder
