"""What clients are told of fields that are not right: the parameter, and the whole text."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.asgi.api.chat import PARTS, read_chat
from aioengine.asgi.api.completions import read_completion
from aioengine.errors import InvalidRequestError

CHAT: dict[str, Any] = {"messages": []}
PLACE = "messages[0].content[0]"


def part(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [value]}]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "parameter", "text"),
    [
        ({"temprature": 0}, "temprature",
         "'temprature' is not a field of this request; did you mean 'temperature'?"),
        ({"max_new_tokens": 9}, "max_new_tokens",
         "'max_new_tokens' is not a field of this request; did you mean 'max_tokens'?"),
        ({"qqq": 1, "temprature": 0}, "qqq", "'qqq' is not a field of this request"),
        ({"structured_outputs": {"rexeg": "a"}}, "structured_outputs.rexeg",
         "'rexeg' is not a field of structured_outputs; did you mean 'regex'?"),
        ({"structured_outputs": 3}, "structured_outputs",
         "structured_outputs must be an object with one of json, json_object, regex, choice, "
         "grammar"),
        ({"temperature": "0"}, "temperature",
         "temperature must be a number from 0 to 100, not '0'"),
        ({"stop": ["a"] * 65}, "stop", "stop must be at most 64 strings, not 65"),
        ({"structured_outputs": {"regex": "a" * 2049}}, "structured_outputs.regex",
         "structured_outputs.regex must be text of 1 to 2048 characters, not 2049"),
        ({"response_format": nested(40)}, "response_format",
         "response_format must be nested at most 32 levels deep"),
        (part({"text": "x"}), f"{PLACE}.type", f"{PLACE}.type must be one of {', '.join(PARTS)}"),
        (part({"type": ["text"]}), f"{PLACE}.type",
         f"{PLACE}.type must be one of {', '.join(PARTS)}"),
        (part({"type": "image_url"}), f"{PLACE}.image_url", f"{PLACE}.image_url must be given"),
        (part({"type": "image"}), f"{PLACE}.image", f"{PLACE}.image must be given"),
        (part({"type": "audio_url", "audio_url": {"url": None}}), f"{PLACE}.audio_url.url",
         f"{PLACE}.audio_url.url must be given"),
        ({"stop": ""}, "stop",
         "stop must be a string or a list of strings of 1 to 1024 characters, not 0"),
    ],
)  # fmt: skip
def test_chat(fields: dict[str, Any], parameter: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_chat({**CHAT, **fields})
    assert (caught.value.parameter, str(caught.value)) == (parameter, text)


def test_completion() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_completion({"prompt": "x", "max_completion_tokens": 3})
    assert str(caught.value) == (
        "'max_completion_tokens' is not a field of this request; did you mean 'max_tokens'?"
    )


def test_a_long_name_is_not_repeated() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_chat({**CHAT, "x" * 10_000_000: 1})
    assert len(str(caught.value)) < 120
    assert len(caught.value.parameter or "") == 60
