"""A script without asyncio: one answer, a stream, and many prompts."""

from aioengine import Engine, Prompt, SamplingParams, demo_images, demo_model

QUESTION = "USER: <image>\nDescribe the picture. ASSISTANT:"
PARAMS = SamplingParams(temperature=0, max_tokens=96)


def main() -> None:
    first, second, *others = demo_images()
    with Engine.from_pretrained(demo_model()) as engine:
        print(engine.generate(QUESTION, PARAMS, images=[first]).text)
        for delta in engine.stream(QUESTION, PARAMS, images=[second]):
            print(delta.text, end="", flush=True)
        print()
        prompts = [Prompt(text=QUESTION, media={"image": [image]}) for image in others]
        for output in engine.map(prompts, PARAMS):
            print(output.text)


if __name__ == "__main__":
    main()
