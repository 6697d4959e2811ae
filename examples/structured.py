"""Answers in a form that a program can read: one of three words, then JSON by a schema."""

import asyncio
import json

from aioengine import AsyncEngine, SamplingParams, StructuredOutputs, demo_images, demo_model

SCHEMA = {
    "type": "object",
    "properties": {"objects": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["objects"],
    "additionalProperties": False,
}


async def main() -> None:
    image = demo_images()[0]
    words = StructuredOutputs(choice=["One.", "Two.", "Three."])
    schema = StructuredOutputs(json=SCHEMA)
    async with AsyncEngine.from_pretrained(demo_model()) as engine:
        prompt = "USER: <image>\nHow many objects are there? ASSISTANT:"
        for form in (words, schema):
            params = SamplingParams(temperature=0, max_tokens=32, structured_outputs=form)
            output = await engine.generate(prompt, params, images=[image])
            print(output.text)
    print(json.loads(output.text)["objects"], "of any kind: this model never learned to write JSON")


if __name__ == "__main__":
    asyncio.run(main())
