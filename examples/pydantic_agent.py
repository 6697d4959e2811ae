"""An agent of pydantic-ai in this process, without a server: MODEL QUESTION."""

import asyncio
import datetime
import sys

from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from aioengine import AsyncEngine, demo_images

agent = Agent(instructions="Use the tools where they help.")


@agent.tool_plain
def today() -> str:
    """Tell the date of today."""
    return datetime.date.today().isoformat()


@agent.tool_plain
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


async def main(model: str, question: str) -> None:
    image = BinaryContent(demo_images()[0].read_bytes(), media_type="image/png")
    async with AsyncEngine.from_pretrained(model) as engine:
        provider = OpenAIProvider(openai_client=engine.openai_client(model_names="agent"))
        result = await agent.run(
            [question, image], model=OpenAIChatModel("agent", provider=provider)
        )
        print(result.output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
