"""An agent with two tools and an image, by OpenAI's client in this process: MODEL QUESTION."""

import asyncio
import base64
import datetime
import json
import sys
from typing import Any

from aioengine import AsyncEngine, demo_images

FIELDS = {"today": {}, "multiply": {name: {"type": "number"} for name in "ab"}}
TOOLS = {"today": lambda: datetime.date.today(), "multiply": lambda a, b: a * b}
SCHEMAS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": fields}}}
    for name, fields in FIELDS.items()
]


async def main(model: str, question: str) -> None:
    url = f"data:image/png;base64,{base64.b64encode(demo_images()[0].read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    asked: Any = {"model": "agent", "messages": messages, "tools": SCHEMAS}
    async with AsyncEngine.from_pretrained(model) as engine:
        client = engine.openai_client(model_names="agent")
        while messages[-1]["role"] != "assistant":
            answer = (await client.chat.completions.create(**asked)).choices[0].message.to_dict()
            messages.append(answer)
            for call in answer.get("tool_calls") or []:
                function = call["function"]
                result = str(TOOLS[function["name"]](**json.loads(function["arguments"])))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        print(answer["content"])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
