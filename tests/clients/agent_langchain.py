"""LangChain's chat model against our server: a tool bound, its result sent, a stream."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return "It will rain."


def main(base_url: str) -> None:
    """Ask, go on, and print what came."""
    model = ChatOpenAI(model="tiny", base_url=base_url, api_key="none").bind_tools([weather])
    messages = [HumanMessage("Will it rain in Paris?")]
    first = model.invoke(messages)
    (call,) = first.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    last = model.invoke([*messages, first, result])
    whole = None
    for chunk in model.stream(messages):
        whole = chunk if whole is None else whole + chunk
    answer = {
        "call": [call["name"], call["args"]],
        "last": last.content,
        "streamed": [[each["name"], each["args"]] for each in whole.tool_calls],
    }
    print(json.dumps(answer))  # noqa: T201 - its answer


main(sys.argv[1])
