"""litellm against our server: a tool, whole and streamed, and what was thought."""

from __future__ import annotations

import json
import sys

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def main(base_url: str) -> None:
    """Ask, and print what came."""
    asked = {
        "model": "hosted_vllm/tiny",
        "api_base": base_url,
        "api_key": "none",
        "messages": [{"role": "user", "content": "Will it rain in Paris?"}],
        "tools": [WEATHER],
        "max_tokens": 300,
    }
    message = litellm.completion(**asked).choices[0].message
    chunks = [*litellm.completion(**asked, stream=True)]
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message
    found = {
        name: {
            "content": each.content,
            "reasoning": each.reasoning_content,
            "calls": [[c.function.name, c.function.arguments] for c in each.tool_calls],
        }
        for name, each in (("whole", message), ("streamed", streamed))
    }
    print(json.dumps(found))  # noqa: T201 - its answer


main(sys.argv[1])
