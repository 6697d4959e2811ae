"""Fuyu: greedy tokens equal transformers' `generate`; what stands before and behind a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, Embeddings, SamplingParams
from aioengine.errors import InvalidRequestError, MediaError, UnsupportedModalityError
from tests.parity.families import MAX_TOKENS, TEXT, Family, cases, id_of, save, vocabulary
from tests.parity.test_families import Model, check_all, engine_for
from tests.processors.test_guide_fuyu import make_tokenizer
from tests.support.tiny import tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SIDE = 10


def fuyu_processor() -> Any:
    image_processor = hf.FuyuImageProcessorPil(
        size={"height": 40, "width": 60}, patch_size={"height": SIDE, "width": SIDE}
    )
    return hf.FuyuProcessor(image_processor=image_processor, tokenizer=make_tokenizer())


def fuyu(tokenizer: Any) -> Any:
    text = {name: TEXT[name] for name in TEXT if name != "num_key_value_heads"}
    config = hf.FuyuConfig(
        text_config={
            "model_type": "persimmon", "vocab_size": vocabulary(tokenizer), **text,
            "qk_layernorm": True, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        },
        patch_size=SIDE,
        image_token_id=id_of(tokenizer, "|SPEAKER|"),
    )  # fmt: skip
    return hf.FuyuForCausalLM(config)


FAMILY = Family(
    processor=fuyu_processor,
    model=fuyu,
    place="",
    lacking="its own processor and model do not fit together",
    sizes=((40, 30), (35, 61), (300, 90)),  # whole patches; parts of some; larger than `size`
    texts=(
        "*Describe the picture.",
        "*Describe the picture.",
        "*Describe the picture.\n",
        "*What is <s> here, |NEWLINE| or cat?",
        "*a",
        "no picture here, tell a story",
    ),
)


@contextmanager
def whole_patches() -> Iterator[None]:
    """Repairs the image processor of transformers 5.23 without torchvision, for reference."""
    cut = hf.FuyuImageProcessorPil.patchify_image

    def patchify_image(self: Any, image: torch.Tensor, patch_size: Any = None) -> torch.Tensor:
        patches = torch.as_tensor(cut(self, np.asarray(image), patch_size))
        return patches.reshape(1, -1, patches.shape[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.FuyuImageProcessorPil, "patchify_image", patchify_image)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    """The saved model with its cases, and the HF processor."""
    folder = tmp_path_factory.mktemp("fuyu")
    model = save(FAMILY, folder)
    processor = hf.AutoProcessor.from_pretrained(folder)
    with whole_patches():
        found = cases(FAMILY, model, processor)
    return Model("fuyu", folder, found, ()), processor


@pytest.fixture
def model(reference: tuple[Model, Any]) -> Model:
    return reference[0]


def test_the_cases_differ(model: Model) -> None:
    assert len({case.expected for case in model.cases}) == 6
    assert len({token for case in model.cases for token in case.expected}) > 6


@pytest.mark.parametrize("budget", [1024, 13, 5, 1])
async def test_tokens_equal_generate(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        for case in model.cases[:2]:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            case.check(output.token_ids)
        await engine.reset_caches()
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with prefix and encoder caches warm
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


async def test_tokens_equal_generate_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with the encoder cache warm
        assert engine.statistics().encoder_items_run == 3


async def test_prompts_of_tokens(reference: tuple[Model, Any]) -> None:
    """As tokenised, with BOS or without, and as HF's processor expands them: the same prompt."""
    model, processor = reference
    async with engine_for(model.folder) as engine:
        for case in model.cases:
            prompts = [processor.tokenizer(case.text)["input_ids"]]
            if case.images:
                prompts.append(prompts[0][1:])
                with whole_patches():
                    inputs = processor(text=case.text, images=case.images[0], return_tensors="pt")
                prompts.append(inputs["input_ids"][0].tolist())
            for prompt in prompts:
                output = await engine.generate(prompt, PARAMS, images=case.images)
                case.check(output.token_ids)
                assert list(output.prompt_token_ids) == prompts[-1]


async def test_another_size(reference: tuple[Model, Any]) -> None:
    """A request's own limit, of which the layout knows; its own patches the model cannot take."""
    model, processor = reference
    size = {"height": 20, "width": 30}
    pil_image = tiny_image(3).resize((50, 33))
    with whole_patches():
        inputs = processor(text="a", images=pil_image, size=size, return_tensors="pt")
    async with engine_for(model.folder, mm_processor_kwargs={"size": size}) as engine:
        output = await engine.generate("a", PARAMS, images=[pil_image])
        assert list(output.prompt_token_ids) == inputs["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": {"height": 5, "width": 5}}, "does not take these"),
        ({"size": {"shortest_edge": 5}}, "a height and a width"),
        ({"size": {"height": 1, "width": 0}}, "too narrow"),
        ({"do_resize": "never"}, "does not take these"),
        ({"do_pad": False}, "could not be processed"),
    ],
)
async def test_options_that_are_refused(
    model: Model, options: dict[str, Any], message: str
) -> None:
    async with engine_for(model.folder, mm_processor_kwargs=options) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            await engine.generate("a", PARAMS, images=[tiny_image(3).resize((50, 33))])


async def refused(engine: AsyncEngine, *images: Any) -> None:
    await engine.generate("a", PARAMS, images=images)


async def test_what_is_refused(model: Model) -> None:
    pil_image = model.cases[0].images[0]
    async with engine_for(model.folder) as engine:
        with pytest.raises(UnsupportedModalityError, match="at most 1 image, not 2"):
            await refused(engine, pil_image, pil_image)
        with pytest.raises(UnsupportedModalityError, match="takes no image embeddings"):
            await refused(engine, Embeddings(torch.zeros(12, 48)))
        with pytest.raises(MediaError, match="too narrow"):
            await refused(engine, tiny_image(0).resize((1, 130)))
        assert engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total
