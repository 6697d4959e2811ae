"""LLaVA's token ids, ranges and pixels, bit for bit those of HF's own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    ModelLoadError,
    PlaceholderMismatchError,
    UnsupportedModalityError,
)
from aioengine.models.llava import Llava
from aioengine.processors.embeddings import EmbeddingItems, make_items
from aioengine.processors.items import (
    ImageHeader,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdateDetails
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.types import Embeddings
from tests.processors.conftest import context_of, save_llava

ROWS = 4
SIZES = st.tuples(st.integers(1, 150), st.integers(1, 150))
TEXTS = st.text(st.sampled_from("a b\ncat.<>s/_é猫"), max_size=12)


def items_of(*pil_images: Any) -> MultiModalDataItems:
    return MultiModalDataItems({"image": ImageProcessorItems(pil_images)})


def pil_image(size: tuple[int, int], seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), sizes=st.data())
def test_equals_the_hf_processor(llava: Any, texts: list[str], sizes: st.DataObject) -> None:
    count = len(texts) - 1
    pil_images = [pil_image(sizes.draw(SIZES), seed) for seed in range(count)]
    prompt = "<image>".join(texts)
    mine = llava.apply(prompt, items_of(*pil_images))
    theirs = llava.info.get_hf_processor()(
        text=prompt, images=pil_images or None, return_tensors="pt"
    )
    assert mine.token_ids == theirs["input_ids"][0].tolist()
    if not count:
        assert mine.items == {}
        return
    pixels = torch.stack([item["pixel_values"] for item in mine.items["image"]])
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, theirs["pixel_values"])
    image_token = llava.info.get_hf_config().image_token_id
    covered = [
        position
        for placed in mine.placeholders["image"]
        for position in range(placed.offset, placed.offset + placed.length)
    ]
    expected = (theirs["input_ids"][0] == image_token).nonzero().flatten().tolist()
    assert covered == expected
    assert [placed.num_embeds for placed in mine.placeholders["image"]] == [ROWS] * count


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXTS, min_size=2, max_size=4), size=SIZES)
def test_text_token_and_header_only_prompts_agree(
    llava: Any, texts: list[str], size: tuple[int, int]
) -> None:
    prompt = "<image>".join(texts)
    count = len(texts) - 1
    decoded = items_of(*[pil_image(size, seed) for seed in range(count)])
    headers = items_of(*[ImageHeader(ImageSize(*size), "RGB")] * count)
    whole = llava.apply(prompt, decoded)
    for layout in (
        llava.apply(llava.tokenize(prompt), decoded),
        llava.layout(prompt, headers, {}),
        llava.layout(llava.tokenize(prompt), headers, {}),
    ):
        assert layout.token_ids == whole.token_ids
        assert layout.placeholders == whole.placeholders
    llava.verify_layout(whole, headers, whole.items, {})
    for index in range(count):
        one = llava.process(items_of(decoded["image"].get(index)), {})
        assert torch.equal(
            one["image"][0]["pixel_values"], whole.items["image"][index]["pixel_values"]
        )
        llava.verify_layout(
            whole, items_of(headers["image"]._items[0]), one, {}, {"image": [index]}
        )


@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_towers_and_strategies(tmp_path: Path, tower: str, strategy: str) -> None:
    folder = save_llava(tmp_path, tower=tower, strategy=strategy)
    processor = MULTIMODAL_REGISTRY.create_processor(Llava, context_of(folder))
    images = [pil_image((40, 30)), pil_image((30, 70), 1)]
    mine = processor.apply("<image>a<image>", items_of(*images))
    theirs = processor.info.get_hf_processor()(
        text="<image>a<image>", images=images, return_tensors="pt"
    )
    assert mine.token_ids == theirs["input_ids"][0].tolist()
    rows = 4 + (tower == "clip") - (strategy == "default")
    assert processor.info.get_mm_max_tokens_per_item(0, {"image": 1}) == {"image": rows}
    assert [placed.length for placed in mine.placeholders["image"]] == [rows, rows]


@pytest.mark.parametrize("pads", [False, True])
def test_its_own_image_processor(tmp_path: Path, pads: bool) -> None:
    context = context_of(save_llava(tmp_path, pads=pads))
    processor = MULTIMODAL_REGISTRY.create_processor(Llava, context)
    hf_processor = context.hf_processor
    assert hf_processor.image_processor.do_pad is pads
    for size in ((40, 30), (30, 170), (28, 28), (5, 3)):
        for options in ({}, {"do_pad": not pads}):
            mine = processor.process(items_of(pil_image(size)), options)["image"][0]
            theirs = hf_processor(
                text="<image>", images=[pil_image(size)], return_tensors="pt", **options
            )
            assert torch.equal(mine["pixel_values"], theirs["pixel_values"][0])


def test_text_that_is_no_text(llava: Any) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        llava.layout("a\ud800b", MultiModalDataItems(), {})


def test_a_layout_that_does_not_hold(llava: Any) -> None:
    width = llava.info.get_hidden_size()

    def items(rows: int) -> MultiModalDataItems:
        given = [Embeddings(torch.zeros(rows, width))]
        embeddings = EmbeddingItems(given, modality="image", hidden_size=width)
        return MultiModalDataItems({"image": embeddings})

    layout = llava.layout("<image>", items(3), {})
    with pytest.raises(MediaError, match=r"^images\[0\] was processed to another"):
        llava.verify_layout(layout, items(4), llava.process(items(4), {}), {})


def test_another_tower_is_refused(tmp_path: Path) -> None:
    context = context_of(save_llava(tmp_path))
    context.hf_config.vision_config.model_type = "pixtral"
    with pytest.raises(ModelLoadError, match="pixtral"):
        MULTIMODAL_REGISTRY.create_processor(Llava, context)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ("<image>", 2, "1 `<image>` placeholder(s) but 2 images were given"),
        ("<image><image>", 1, "2 `<image>` placeholder(s) but 1 image was given"),
        ("no place", 1, "0 `<image>` placeholder(s) but 1 image was given"),
        ("<image>", 0, "1 `<image>` placeholder(s) but 0 images were given"),
    ],
)
def test_placeholders_and_images_must_match(
    llava: Any, prompt: str, count: int, message: str
) -> None:
    items = items_of(*[ImageHeader(ImageSize(5, 5), "RGB")] * count)
    with pytest.raises(PlaceholderMismatchError) as caught:
        llava.layout(prompt, items, {})
    assert message in str(caught.value)


def test_limits(llava_folder: Path) -> None:
    context = context_of(llava_folder, limit_mm_per_prompt={"image": 1})
    processor = MULTIMODAL_REGISTRY.create_processor(Llava, context)
    header = ImageHeader(ImageSize(5, 5), "RGB")
    with pytest.raises(UnsupportedModalityError, match=r"raise limit_mm_per_prompt\['image'\]"):
        processor.layout("<image><image>", items_of(header, header), {})
    with pytest.raises(UnsupportedModalityError, match="takes no audio") as caught:
        processor.info.validate_num_items({"audio": 1})
    assert caught.value.parameter == "audios"
    assert str(caught.value) == "the model takes no audio items, only image"
    for limit, text in ((0, "no images, not 2"), (1, "at most 1 image, not 2")):
        context = context_of(llava_folder, limit_mm_per_prompt={"image": limit})
        info = MULTIMODAL_REGISTRY.create_processor(Llava, context).info
        with pytest.raises(UnsupportedModalityError) as caught:
            info.validate_num_items({"image": 2})
        assert str(caught.value) == (
            f"one prompt may have {text}; raise limit_mm_per_prompt['image']"
        )


def test_embeddings_take_as_many_places_as_they_have_rows(llava: Any) -> None:
    width = llava.info.get_hidden_size()
    rows = [torch.randn(3, width), torch.randn(7, width)]
    embeddings = EmbeddingItems([Embeddings(r) for r in rows], modality="image", hidden_size=width)
    items = MultiModalDataItems({"image": embeddings})
    result = llava.apply("a<image>b<image>", items)
    assert [placed.length for placed in result.placeholders["image"]] == [3, 7]
    for item, wanted in zip(result.items["image"], rows, strict=True):
        assert torch.equal(item["image_embeds"], wanted)
    llava.verify_layout(result, items, result.items, {})


def test_images_and_embeddings_in_one_prompt(llava: Any) -> None:
    width = llava.info.get_hidden_size()
    rows = [Embeddings(torch.randn(count, width)) for count in (3, 7)]
    given = [rows[0], pil_image((50, 40)), rows[1], pil_image((9, 30))]
    entries = [("image", f"images[{n}]", item) for n, item in enumerate(given)]
    mixed = make_items(entries, llava.info.get_hidden_size)
    result = llava.apply("a<image>b<image><image>c<image>", mixed)
    each = [llava.apply("<image>", make_items([entry], lambda: width)) for entry in entries]
    lengths = [one.placeholders["image"][0].length for one in each]
    assert [placed.length for placed in result.placeholders["image"]] == lengths
    assert lengths == [3, ROWS, 7, ROWS]
    for item, one in zip(result.items["image"], each, strict=True):
        assert item.keys() == one.items["image"][0].keys()
        assert all(torch.equal(item[name], one.items["image"][0][name]) for name in item)
    llava.verify_layout(result, mixed, result.items, {})
    entries[2] = ("image", "images[2]", Embeddings(torch.zeros(6, width)))
    with pytest.raises(MediaError, match=r"^images\[2\] was processed to another"):
        changed = make_items(entries, lambda: width)
        llava.verify_layout(result, changed, llava.process(changed, {}), {})


def test_targets_and_contents_that_count(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item alone is what it is among others; embeddings between images count with them."""
    tokens = llava.info.get_tokenizer().convert_tokens_to_ids

    def updates(items: Any, *_: Any) -> Any:
        image, numbers = tokens("<image>"), [tokens(letter) for letter in "abc"]

        def content(index: int) -> list[int]:
            group = items["image"]
            rows = group.get_feature_size(index) if isinstance(group, EmbeddingItems) else ROWS
            return [numbers[index], *[image] * rows]

        return [
            PromptReplacement(
                modality="image",
                target=lambda index: f"<image>{'abc'[index]}",
                replacement=lambda index: PromptUpdateDetails.select_token_id(
                    content(index), image
                ),
            )
        ]

    monkeypatch.setattr(llava, "_get_prompt_updates", updates)
    width = llava.info.get_hidden_size()
    given = [pil_image((9, 30)), Embeddings(torch.randn(3, width)), pil_image((50, 40))]
    entries = [("image", f"images[{n}]", item) for n, item in enumerate(given)]
    items = make_items(entries, lambda: width)
    layout = llava.layout("x<image>a<image>b<image>c", items, {})
    lengths = [placed.num_embeds for placed in layout.placeholders["image"]]
    assert lengths == [ROWS, 3, ROWS]
    for index, entry in enumerate(entries):
        alone = make_items([entry], lambda: width)
        outputs = llava.process(alone, {})
        llava.verify_layout(layout, alone, outputs, {}, {"image": [index]})


def test_options_that_change_the_size_are_refused(llava: Any) -> None:
    options = {"crop_size": {"height": 42, "width": 42}}
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs") as caught:
        llava.process(items_of(pil_image((50, 50))), options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_options_reach_the_processor(llava: Any) -> None:
    image = pil_image((50, 40))
    plain = llava.process(items_of(image), {})["image"][0]["pixel_values"]
    raw = llava.process(items_of(image), {"do_normalize": False})["image"][0]["pixel_values"]
    theirs = llava.info.get_hf_processor()(
        text="<image>", images=[image], do_normalize=False, return_tensors="pt"
    )
    assert torch.equal(raw, theirs["pixel_values"][0])
    assert not torch.equal(raw, plain)


def test_a_failing_processor_is_a_media_error_without_payload(llava: Any) -> None:
    with pytest.raises(MediaError) as caught:
        llava.process(items_of(pil_image((9, 9))), {"do_rescale": "secret"})
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("bad", [-1, 512, 10**9, True, 1.0, "1", None])
def test_token_ids_outside_the_vocabulary(llava: Any, bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match="token"):
        llava.layout([1, bad], MultiModalDataItems(), {})


def test_dummy_inputs_make_the_largest_prompt(llava: Any) -> None:
    inputs = llava.dummy_inputs.get_dummy_processor_inputs(100, {"image": 2})
    result = llava.apply(inputs.prompt_text, items_of(*inputs.mm_data["image"]))
    assert [placed.length for placed in result.placeholders["image"]] == [ROWS, ROWS]
