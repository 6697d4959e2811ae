"""tokenize, detokenize, messages/count_tokens: the tokens of prompts, and the texts of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.asgi.api.asks import Ask, flag, make_ask, prompt_options, wrong
from aioengine.asgi.api.chat import check_conversation, read_tools
from aioengine.asgi.api.fields import DETOKENIZE, TOKENIZE, known
from aioengine.asgi.client_task import LongEvent
from aioengine.asgi.service import Service
from aioengine.types import Prompt

__all__ = ["count", "read_text", "read_tokenize", "show", "text_of"]

PIECE = 128
"""Tokens whose texts are looked up at a time."""
MANY = 1024
"""Tokens whose JSON is not written on the loop."""


def read_tokenize(body: Mapping[str, Any]) -> Ask:
    """The body of tokenize. Raises InvalidRequestError."""
    given = known(body, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise wrong("prompt", "given, or messages, and not both")
    options = prompt_options(given)
    flag(given, "return_token_strs")
    if "messages" in given:
        template = given.get("chat_template_kwargs", {})
        if not isinstance(template, dict):
            raise wrong("chat_template_kwargs", "an object")
        tools = read_tools(given.get("tools", []))
        if not isinstance(tools, list):
            raise wrong("tools", "a list of functions")
        prompt = Prompt(
            messages=check_conversation(given["messages"]),
            tools=tools,
            chat_template_kwargs=template,
            **options,
        )
        return make_ask(given, (prompt,), None)
    if not isinstance(given["prompt"], str):
        raise wrong("prompt", "text")
    if not flag({"add_special_tokens": True, **given}, "add_special_tokens"):
        raise wrong("add_special_tokens", "true: a prompt is read as it is for an answer")
    for name in ("tools", "chat_template_kwargs"):
        if given.get(name):
            raise wrong(name, "absent where there are no messages")
    return make_ask(given, (Prompt(text=given["prompt"], **options),), None)


def read_text(body: Mapping[str, Any]) -> Ask:
    """The body of detokenize. Raises InvalidRequestError."""
    given = known(body, DETOKENIZE)
    if not isinstance(given.get("tokens"), list):
        raise wrong("tokens", "a list of token ids")
    return make_ask(given, (), None)


async def show(service: Service, ask: Ask) -> dict[str, Any]:
    """Answer tokenize."""
    token_ids = await service.engine.tokenize(ask.prompts[0])
    wants_texts = ask.fields.get("return_token_strs")
    answer = LongEvent if len(token_ids) > MANY else dict
    return answer(
        {
            "count": len(token_ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": await _texts(service, token_ids) if wants_texts else None,
        }
    )


async def _texts(service: Service, token_ids: Sequence[int]) -> list[str]:
    """Piece by piece, so that thousands of tokens do not hold the loop."""
    texts: list[str] = []
    for start in range(0, len(token_ids), PIECE):
        texts += map(service.token_texts.text, token_ids[start : start + PIECE])
        await asyncio.sleep(0)
    return texts


async def text_of(service: Service, ask: Ask) -> dict[str, Any]:
    """Answer detokenize."""
    return {"prompt": await service.engine.detokenize(ask.fields["tokens"])}


async def count(service: Service, ask: Ask) -> dict[str, Any]:
    """Answer messages/count_tokens."""
    return {"input_tokens": len(await service.engine.tokenize(ask.prompts[0]))}
