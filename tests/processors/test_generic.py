"""The generic processor against HF's own: token ids, rows' places, and every encoder tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from aioengine.errors import (
    MediaError,
    ModelLoadError,
    PlaceholderMismatchError,
    UnsupportedModalityError,
)
from aioengine.processors.embeddings import EmbeddingItems, make_items
from aioengine.processors.generic import (
    GenericDummyInputsBuilder,
    GenericMultiModalProcessor,
    GenericProcessingInfo,
)
from aioengine.processors.inputs import MultiModalKwargs, MultiModalKwargsItem
from aioengine.processors.items import (
    PROCESSOR_ITEMS,
    AudioClip,
    ImageHeader,
    ImageSize,
    MultiModalDataItems,
    VideoClip,
    VideoHeader,
)
from aioengine.processors.registry import MultiModalRegistry
from aioengine.types import Embeddings
from tests.processors import hf_processors
from tests.processors.conftest import context_of
from tests.processors.hf_processors import FAMILIES, context_for, processor_for, tokenizer_with

TEXTS = st.text(st.sampled_from("a b\ncat.<>s/_é猫"), max_size=10)
# Of an image, width and height; of a clip, the number of samples.
SIZES = st.tuples(st.integers(12, 90), st.integers(12, 90))
TEXT_NAMES = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}


class AppendsSeparator(GenericMultiModalProcessor):
    """What a family file says where HF puts a separator behind every prompt."""

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        return [*prompt_tokens, self.info.get_tokenizer().sep_token_id]


class PutsStartAfterImages(GenericMultiModalProcessor):
    """What a family file says where HF puts BOS behind the images, and a line's end last."""

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        tokenizer = self.info.get_tokenizer()
        image_id = tokenizer.convert_tokens_to_ids("<image>")
        places = [i for i, token_id in enumerate(prompt_tokens) if token_id == image_id]
        cut = places[-1] + 1 if places else 0
        start, end = tokenizer.bos_token_id, tokenizer.encode("\n", add_special_tokens=False)
        return [*prompt_tokens[:cut], start, *prompt_tokens[cut:], *end]


CLASSES = {"chameleon": AppendsSeparator, "paligemma": PutsStartAfterImages}


@cache
def generic(name: str) -> GenericMultiModalProcessor:
    family = FAMILIES[name]
    try:
        hf_processor = family.make()
    except ImportError as error:  # older ones want torchvision here and there
        pytest.skip(str(error).strip().splitlines()[0])
    context = context_for(hf_processor, family.config, family.options)
    return processor_for(context, CLASSES.get(name, GenericMultiModalProcessor))


def item_of(modality: str, size: tuple[int, int], seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    if modality == "audio":
        samples = random.standard_normal(size[0] * 170).astype(np.float32)
        return AudioClip(samples, 16000)
    return Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def group_of(modality: str, items: Sequence[Any]) -> MultiModalDataItems:
    return MultiModalDataItems({modality: PROCESSOR_ITEMS[modality](list(items))})


def run_hf(name: str, prompt: str, items: Sequence[Any]) -> Mapping[str, Any]:
    family, processor = FAMILIES[name], generic(name).info.get_hf_processor()
    media = (
        {"audio": [clip.samples for clip in items], "sampling_rate": 16000}
        if family.modality == "audio"
        else {"images": list(items)}
    )
    outputs: Mapping[str, Any] = processor(
        text=prompt, **media, **family.options, return_tensors="pt"
    )
    return outputs


def assert_same_tensors(
    items: Sequence[MultiModalKwargsItem], theirs: Mapping[str, Any], expects_padding: bool
) -> None:
    """Bit for bit; where HF has padded one item to another's size, its padding must be zeros."""
    reduced = MultiModalKwargs.reduce(items)
    assert reduced.keys() == theirs.keys() - TEXT_NAMES
    for name, mine in reduced.items():
        whole = theirs[name]
        if isinstance(mine, torch.Tensor) and mine.shape == whole.shape:
            assert torch.equal(mine, whole.to(mine.dtype)), name
            continue
        assert expects_padding, name
        own = [item[name] for item in items]
        if len(whole) == 1:  # one entry for all of a prompt's images, its parts side by side
            assert all(len(each) == 1 for each in own)
            whole, own = whole[0], [each[0] for each in own]
        for each, part in zip(own, whole.split([len(each) for each in own]), strict=True):
            inside = tuple(slice(size) for size in each.shape)
            assert torch.equal(part[inside], each), name
            padding = part.clone()
            padding[inside] = 0
            assert not padding.any(), name


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(TEXTS, min_size=2, max_size=4), data=st.data())
def test_equals_hf(name: str, texts: list[str], data: st.DataObject) -> None:
    processor, family = generic(name), FAMILIES[name]
    sizes = [data.draw(SIZES) for _ in texts[1:]]
    items = [item_of(family.modality, size, seed) for seed, size in enumerate(sizes)]
    group = group_of(family.modality, items)
    prompt = processor.info.get_placeholder(family.modality).join(texts)
    theirs = run_hf(name, prompt, items)
    mine = processor.apply(prompt, group)
    assert mine.token_ids == theirs["input_ids"][0].tolist()
    embed_id = processor.info.get_tokenizer().convert_tokens_to_ids(family.embed)
    placed = mine.placeholders[family.modality]
    rows = [each.offset + i for each in placed for run in each.embed_runs for i in range(*run)]
    assert rows == (theirs["input_ids"][0] == embed_id).nonzero().flatten().tolist()
    assert_same_tensors(mine.items[family.modality], theirs, name in ("llava-next", "idefics3"))

    # As tokens, expanded or not, and one item at a time in any order: the same, bit for bit.
    for other in (
        processor.apply(processor.tokenize(prompt), group),
        processor.layout(prompt, group, {}, mine.items),
        processor.apply(theirs["input_ids"][0].tolist(), group),
    ):
        assert (other.token_ids, other.placeholders) == (mine.token_ids, mine.placeholders)
    for index in reversed(range(len(items))):
        alone = group_of(family.modality, [items[index]])
        one = processor.process(alone, {})
        (item,) = one[family.modality]
        together = mine.items[family.modality][index]
        assert item.keys() == together.keys()
        assert all(torch.equal(item[key], together[key]) for key in item)
        processor.verify_layout(mine, alone, one, {}, {family.modality: [index]})


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=4), data=st.data())
@pytest.mark.parametrize("line_ends", ["learnt", "added"])
def test_open_ends_merge_as_in_hf(line_ends: str, texts: list[str], data: st.DataObject) -> None:
    """Empty lines around the images become one token with those that the text has there."""
    processor = gemma3_of(line_ends)
    prompt = "<start_of_image>".join(
        data.draw(st.sampled_from(["", "\n", "\n\n"]))
        + text
        + data.draw(st.sampled_from(["", "\n"]))
        for text in texts
    )
    items = [item_of("image", (30, 20), seed) for seed in range(len(texts) - 1)]
    mine = processor.apply(prompt, group_of("image", items))
    theirs = processor.info.get_hf_processor()(text=prompt, images=items, return_tensors="pt")
    assert mine.token_ids == theirs["input_ids"][0].tolist()
    assert [each.num_embeds for each in mine.placeholders["image"]] == [4] * len(items)
    again = processor.apply(mine.token_ids, group_of("image", items))
    assert (again.token_ids, again.placeholders) == (mine.token_ids, mine.placeholders)


@cache
def gemma3_of(line_ends: str) -> GenericMultiModalProcessor:
    return processor_for(context_for(hf_processors.gemma3(line_ends), hf_processors.SOFT))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), size=SIZES)
def test_equals_the_explicit_processor(
    llava: Any, llava_folder: Path, texts: list[str], size: tuple[int, int]
) -> None:
    """The first family has a processor written for it: the same ids, ranges and pixels."""
    mine = generic_llava(llava_folder)
    items = [item_of("image", size, seed) for seed in range(len(texts) - 1)]
    group, prompt = group_of("image", items), "<image>".join(texts)
    left, right = mine.apply(prompt, group), llava.apply(prompt, group)
    assert (left.token_ids, left.placeholders) == (right.token_ids, right.placeholders)
    ours, theirs = MultiModalKwargs(left.items), MultiModalKwargs(right.items)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(torch.as_tensor(ours[key]), theirs[key]) for key in theirs)
    largest = llava.info.get_mm_max_tokens_per_item(0, {"image": 1})
    assert mine.info.get_mm_max_tokens_per_item(0, {"image": 1}) == largest


@cache
def generic_llava(folder: Path) -> GenericMultiModalProcessor:
    return processor_for(context_of(folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_largest_dummy_has_the_most_rows(name: str) -> None:
    processor, modality = generic(name), FAMILIES[name].modality
    largest = processor.info.get_mm_max_tokens_per_item(0, {modality: 1})[modality]
    random = np.random.default_rng(0)
    sizes = [(int(w), int(h)) for w, h in np.exp(random.uniform(3, 5.5, (12, 2)))]
    items = [item_of(modality, size) for size in sizes[: 3 if name == "aria" else 12]]
    token = processor.info.get_placeholder(modality)
    found = processor.apply(token * len(items), group_of(modality, items)).placeholders[modality]
    assert max(each.num_embeds for each in found) <= largest
    dummy = processor.dummy_inputs.get_dummy_processor_inputs(100, {modality: 2})
    group = group_of(modality, dummy.mm_data[modality])
    places = processor.apply(dummy.prompt_text, group).placeholders[modality]
    assert [each.num_embeds for each in places] == [largest] * 2


def test_a_clone_finds_nothing_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["llava-clip"]
    context = context_for(family.make())
    first = processor_for(context)
    largest = first.info.get_mm_max_tokens_per_item(0, {"image": 1})
    monkeypatch.setattr(hf.LlavaProcessor, "replace_image_token", None)
    clone = processor_for(context.clone())
    assert clone.info.get_mm_max_tokens_per_item(0, {"image": 1}) == largest
    with pytest.raises(ModelLoadError, match="failed on a small image"):
        processor_for(context_for(family.make()))


def test_what_is_in_an_item() -> None:
    processor = generic("internvl")
    (item,) = processor.process(group_of("image", [item_of("image", (80, 30))]), {})["image"]
    # HF makes `num_patches` too, for its own text; no model takes it.
    assert set(item) == {"pixel_values", "_image_replacement_ids", "_image_replacement_text"}
    assert MultiModalKwargs.reduce([item]).keys() == {"pixel_values"}
    assert not item.keep_on_cpu("pixel_values") and item.keep_on_cpu("_image_replacement_ids")
    text = item["_image_replacement_text"].numpy().tobytes().decode()
    assert text.startswith("<img><IMG_CONTEXT>") and text.endswith("</img>")
    assert item["_image_replacement_ids"].tolist() == processor.info.encode(text)
    (grid,) = generic("qwen2-vl").process(group_of("image", [item_of("image", (80, 30))]), {})[
        "image"
    ]
    assert grid.keep_on_cpu("image_grid_thw") and not grid.keep_on_cpu("pixel_values")
    assert tuple(grid["image_grid_thw"].shape) == (1, 3)


@pytest.mark.parametrize(
    ("name", "around"),
    [("llava-clip", ("", "")), ("internvl", ("<img>", "</img>")), ("gemma3", ("\n\n", "\n\n"))],
)
def test_embeddings_stand_in_the_items_markers(name: str, around: tuple[str, str]) -> None:
    processor, embed = generic(name), FAMILIES[name].embed
    given = [Embeddings(torch.zeros(rows, 8)) for rows in (3, 1)]
    embeddings = EmbeddingItems(given, modality="image", hidden_size=8)
    group = MultiModalDataItems({"image": embeddings})
    token = processor.info.get_placeholder("image")
    mine = processor.apply(f"a {token} b {token}", group)
    if name == "gemma3":
        around = ("\n\n<start_of_image>", "<end_of_image>\n\n")
    texts = [around[0] + embed * rows + around[1] for rows in (3, 1)]
    assert mine.token_ids == processor.tokenize(f"a {texts[0]} b {texts[1]}")
    assert [each.length for each in mine.placeholders["image"]] == [3, 1]
    assert MultiModalKwargs.reduce(mine.items["image"]).keys() == {"image_embeds"}


def test_images_and_embeddings_in_one_prompt() -> None:
    processor = generic("internvl")
    entries = [
        ("image", "images[0]", item_of("image", (80, 30))),
        ("image", "images[1]", Embeddings(torch.zeros(3, 8))),
        ("image", "images[2]", item_of("image", (30, 30))),
    ]
    token = processor.info.get_placeholder("image")
    mixed = processor.apply(f"a {token} b {token}{token}", make_items(entries, lambda: 8))
    each = [processor.apply(token, make_items([entry], lambda: 8)) for entry in entries]
    texts = [processor.info.get_tokenizer().decode(one.token_ids[1:]) for one in each]
    assert mixed.token_ids == processor.tokenize(f"a {texts[0]} b {texts[1]}{texts[2]}")
    lengths = [one.placeholders["image"][0].length for one in each]
    assert [placed.length for placed in mixed.placeholders["image"]] == lengths
    assert lengths[1] == 3
    for item, one in zip(mixed.items["image"], each, strict=True):
        assert item.keys() == one.items["image"][0].keys()


def test_embeddings_whose_places_nobody_knows() -> None:
    embeddings = EmbeddingItems([Embeddings(torch.zeros(4, 8))], modality="image", hidden_size=8)
    with pytest.raises(UnsupportedModalityError, match="no image embeddings"):
        generic("idefics3").apply("<image>", MultiModalDataItems({"image": embeddings}))


class Clips(hf.ProcessorMixin):  # type: ignore[misc]
    """A made-up HF processor for videos: a time and two rows for each frame."""

    def __init__(self, tokenizer: Any, video_processor: Any) -> None:
        super().__init__(tokenizer, video_processor)
        self.video_token = "<video>"
        self.image_token_id = tokenizer.convert_tokens_to_ids("<frame>")

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        pass

    def replace_video_token(self, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        times = video_inputs["video_metadata"][video_idx].timestamps
        return "".join(f" {time:.1f}<frame><frame>" for time in times)


class Frames:
    """Its HF video processor."""

    def __call__(self, videos: Any, **options: Any) -> dict[str, Any]:
        assert options["return_tensors"] == "pt" and options["do_sample_frames"] is False
        frames = [torch.from_numpy(video).float() for video in videos]
        grids = [[len(video), *video.shape[1:3]] for video in videos]
        metadata = options["video_metadata"]
        return {"pixel_values_videos": frames, "video_grid": grids, "video_metadata": metadata}


def test_videos_tell_their_times() -> None:
    tokenizer = tokenizer_with("<frame>", "<video>")
    processor = processor_for(context_for(Clips(tokenizer, Frames())))
    assert processor.info.get_supported_mm_limits() == {"video": None}
    header = VideoHeader(ImageSize(6, 4), (0, 10, 30), 40, fps=20.0)
    clip = VideoClip(np.ones((3, 4, 6, 3), np.uint8), header)
    group = group_of("video", [clip])
    mine = processor.apply("see<video>.", group)
    text = "see 0.0<frame><frame> 0.5<frame><frame> 1.5<frame><frame>."
    assert mine.token_ids == processor.tokenize(text)
    (place,) = mine.placeholders["video"]
    assert place.num_embeds == 6 and len(place.embed_runs) == 3
    reduced = MultiModalKwargs.reduce(mine.items["video"])
    assert reduced.keys() == {"pixel_values_videos", "video_grid"}
    assert reduced["pixel_values_videos"].shape == (1, 3, 4, 6, 3)  # type: ignore[union-attr]
    assert reduced["video_grid"].tolist() == [[3, 4, 6]]  # type: ignore[union-attr]
    assert processor.info.get_mm_max_tokens_per_item(0, {"video": 1}) == {"video": 64}


def test_an_hf_processor_that_reports_nothing() -> None:
    image_processor = hf.BlipImageProcessorPil(size=hf_processors.SQUARE)
    blip = hf.Blip2Processor(
        image_processor, tokenizer_with(image_token="<image>"), num_query_tokens=4
    )
    with pytest.raises(ModelLoadError, match=r"does not report.*BaseMultiModalProcessor"):
        processor_for(context_for(blip))
    with pytest.raises(ModelLoadError, match="does not report"):
        GenericProcessingInfo(context_for(type("Text", (), {"tokenizer": tokenizer_with()})()))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_hf_processor_that_does_more_to_the_prompt(name: str) -> None:
    with pytest.raises(ModelLoadError, match="_apply_hf_processor_tokens_only"):
        processor_for(context_for(FAMILIES[name].make()))


def test_an_hf_processor_that_says_more_of_each_token() -> None:
    made = FAMILIES["llava-clip"].make()

    class Says(type(made)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().__call__(*args, **kwargs)
            outputs["experts_of_each"] = outputs["input_ids"] * 0
            return outputs

    made.__class__ = Says
    with pytest.raises(ModelLoadError, match="experts_of_each for each token of a prompt"):
        processor_for(context_for(made))


def test_a_place_that_is_called_otherwise_than_its_rows_token() -> None:
    made = FAMILIES["internvl"].make()
    made.image_placeholder_token = "<image>"
    assert GenericProcessingInfo(context_for(made)).get_placeholder("image") == "<image>"


def test_an_hf_processor_for_one_item_a_prompt() -> None:
    processor = processor_for(context_for(hf_processors.audioflamingo3()))
    assert processor.info.get_supported_mm_limits() == {"audio": 1}
    clip = item_of("audio", (60, 0))
    with pytest.raises(UnsupportedModalityError, match="at most 1 audio item, not 2"):
        processor.apply("<sound><sound>", group_of("audio", [clip, clip]))
    theirs = processor.info.get_hf_processor()(text="a<sound>", audio=[clip.samples])
    mine = processor.apply("a<sound>", group_of("audio", [clip]))
    assert mine.token_ids == np.asarray(theirs["input_ids"])[0].tolist()


def test_the_registry_makes_it(llava_folder: Path) -> None:
    registry = MultiModalRegistry()
    register = registry.register_processor(
        GenericMultiModalProcessor,
        info=GenericProcessingInfo,
        dummy_inputs=GenericDummyInputsBuilder,
    )
    model_class = register(type("Model", (), {}))
    processor = registry.create_processor(model_class, context_of(llava_folder))
    assert processor.layout_needs_hf_outputs
    assert processor.info.get_allowed_mm_limits() == {"image": None}


def test_wrong_requests() -> None:
    processor = generic("qwen2-vl")
    image = group_of("image", [item_of("image", (30, 30))])
    with pytest.raises(PlaceholderMismatchError, match=r"1 `<\|image_pad\|>`"):
        processor.apply("<|image_pad|>", MultiModalDataItems())
    with pytest.raises(PlaceholderMismatchError):
        processor.apply("nothing", image)
    with pytest.raises(UnsupportedModalityError, match="takes no audio"):
        processor.process(group_of("audio", [item_of("audio", (30, 30))]), {})
    with pytest.raises(MediaError) as caught:
        processor.process(image, {"do_rescale": "secret"})
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None
    with pytest.raises(ValueError, match="not decoded"):
        processor.process(group_of("image", [ImageHeader(ImageSize(5, 5), "RGB")]), {})


def test_options_reach_hf_and_nothing_else() -> None:
    processor = generic("internvl")
    group = group_of("image", [item_of("image", (90, 30))])
    many = processor.apply("<IMG_CONTEXT>", group)
    for options in ({"max_patches": 1}, {"images_kwargs": {"max_patches": 1}}):
        one = processor.apply("<IMG_CONTEXT>", group, options)
        assert one.placeholders["image"][0].length == 4 < many.placeholders["image"][0].length
        with pytest.raises(MediaError, match="promised"):
            processor.verify_layout(many, group, one.items, options)
    assert processor.apply("<IMG_CONTEXT>", group).token_ids == many.token_ids
