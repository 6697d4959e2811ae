"""Anthropic's client against our server: a tool, whole and streamed, and its result."""

from __future__ import annotations

import json
import sys

import anthropic

WEATHER = {
    "name": "weather",
    "description": "Tell the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def main(base_url: str) -> None:
    """Ask, go on, and print what came."""
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    messages = [{"role": "user", "content": "Will it rain in Paris?"}]
    asked = {"model": "tiny", "max_tokens": 300, "tools": [WEATHER]}
    first = client.messages.create(messages=messages, **asked)
    with client.messages.stream(messages=messages, **asked) as stream:
        streamed = stream.get_final_message()
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It will rain."}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(messages=messages, **asked)
    answer = {
        "blocks": [block.type for block in first.content],
        "streamed": [block.type for block in streamed.content],
        "call": [call.name, call.input],
        "reason": [first.stop_reason, streamed.stop_reason, last.stop_reason],
        "last": last.content[-1].text,
    }
    print(json.dumps(answer))  # noqa: T201 - its answer


main(sys.argv[1])
