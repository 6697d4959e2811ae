"""An agent of pydantic-ai against our server, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def main(base_url: str) -> None:
    """Run the agent, and print its answers."""
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    agent = Agent(model)
    asked = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return "It will rain."

    whole = await agent.run("Will it rain in Paris?")
    async with agent.run_stream("Will it rain in Paris? Just call.") as result:
        parts = [part async for part in result.stream_text(delta=True)]
    answer = {"whole": whole.output, "streamed": "".join(parts), "asked": asked}
    print(json.dumps(answer))  # noqa: T201 - its answer


asyncio.run(main(sys.argv[1]))
