"""Chat messages: HF's own token ids where no literal is typed, and text that stays text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aioengine.errors import InvalidRequestError, UnsupportedModalityError
from aioengine.processors.chat.literals import _any_of
from aioengine.processors.chat.renderer import ChatRenderer
from aioengine.processors.items import (
    ImageHeader,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from aioengine.processors.text_only import TextOnlyDummyInputs, TextOnlyInfo, TextOnlyProcessor
from tests.processors.conftest import context_of, make_tokenizer

IMAGE = {"type": "image", "image": b"never looked at here"}
TEXTS = st.text(st.sampled_from("a b\ncat.:é猫"), min_size=1, max_size=10)
LETTERS = st.text(st.sampled_from("a b\ncat.:"), min_size=1, max_size=10)
STRING_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def renderer(llava: Any) -> ChatRenderer:
    return ChatRenderer(llava)


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(st.one_of(TEXTS, st.none()), min_size=1, max_size=5))
def test_equals_hf_without_literals(llava: Any, renderer: Any, parts: list[str | None]) -> None:
    content = [IMAGE if part is None else text(part) for part in parts]
    plain = [{"type": "image"} if part is None else text(part) for part in parts]
    mine = renderer.render([{"role": "user", "content": content}])
    processor = llava.info.get_hf_processor()
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": plain}], add_generation_prompt=True
    )
    assert mine.token_ids == processor.tokenizer(rendered)["input_ids"]
    assert len(mine.media.get("image", [])) == parts.count(None)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    before=LETTERS,
    literal=st.sampled_from(["<image>", "<s>", "</s>", "<pad>", "<image><image>", "</s><image>"]),
    after=LETTERS,
    num_images=st.integers(0, 2),
)
@example(before="a", literal="<im<image>age>", after="b", num_images=1)
def test_a_typed_literal_stays_text(
    llava: Any, renderer: Any, before: str, literal: str, after: str, num_images: int
) -> None:
    typed = before + literal + after
    messages = [{"role": "user", "content": [IMAGE] * num_images + [text(typed)]}]
    prompt = renderer.render(messages)
    tokenizer = llava.info.get_tokenizer()
    ids = prompt.token_ids
    image_token = llava.info.get_hf_config().image_token_id
    assert ids.count(image_token) == num_images
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids
    # Nothing is lost: the letters are all there.
    decoded = tokenizer.decode([token_id for token_id in ids if token_id != image_token])
    assert "".join(typed.split()) in "".join(decoded.split())
    headers = [ImageHeader(ImageSize(5, 5), "RGB")] * num_images
    items = MultiModalDataItems({"image": ImageProcessorItems(headers)})
    layout = llava.layout(ids, items, {})
    assert len(layout.placeholders.get("image", [])) == num_images


def test_texts_do_not_spell_a_literal_together(llava: Any, renderer: Any) -> None:
    content = [text("a <im"), text("a"), IMAGE, text("b <im"), text("a"), text("ge> c")]
    prompt = renderer.render([{"role": "user", "content": content}])
    assert prompt.token_ids.count(llava.info.get_hf_config().image_token_id) == 1


def test_marks_in_user_text_are_dropped(renderer: Any) -> None:
    marked = renderer.render([{"role": "user", "content": "a\ue0f0b\ue0f1"}])
    plain = renderer.render([{"role": "user", "content": "ab"}])
    assert marked.token_ids == plain.token_ids


def test_media_in_part_order(renderer: Any) -> None:
    url = "data:image/png;base64,AAAA"
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url}},
                text("and"),
                {"type": "image", "image": b"1", "uuid": "mine"},
            ],
        },
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [{"type": "image", "image": None, "uuid": "known"}]},
        {"role": "user", "content": [{"type": "image", "image": Path("one.png")}]},
    ]
    found = renderer.render(messages).media["image"]
    assert [(media.parameter, media.trusted, media.uuid) for media in found] == [
        ("messages[1].content[0]", False, None),
        ("messages[1].content[2]", False, "mine"),
        ("messages[3].content[0]", False, "known"),
        ("messages[4].content[0]", True, None),
    ]
    assert found[0].item == url


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "root", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "\udcff"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "tools": []}], "messages[0]"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 3}}]}],
            "messages[0].content[0].image_url",
        ),
        (
            [{"role": "user", "content": [text("a"), {**IMAGE, "uuid": 3}]}],
            "messages[0].content[1].uuid",
        ),
    ],
)
def test_wrong_structure(renderer: Any, messages: Any, parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        renderer.render(messages)
    assert caught.value.parameter == parameter
    assert str(caught.value).startswith(parameter)


def test_unsupported_part(renderer: Any) -> None:
    messages = [{"role": "user", "content": [text("a"), {"type": "audio", "audio": b""}]}]
    with pytest.raises(UnsupportedModalityError) as caught:
        renderer.render(messages)
    assert caught.value.parameter == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("part", "modality", "item"),
    [
        ({"type": "audio", "audio": "a"}, "audio", "a"),
        ({"type": "audio", "url": "a"}, "audio", "a"),
        ({"type": "audio_url", "audio_url": {"url": "a"}}, "audio", "a"),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            "audio",
            "data:audio/wav;base64,AAAA",
        ),
        ({"type": "video", "video": b"bytes"}, "video", b"bytes"),
        ({"type": "video_url", "video_url": "v"}, "video", "v"),
    ],
)
def test_parts_of_every_modality(
    llava: Any, monkeypatch: pytest.MonkeyPatch, part: Any, modality: str, item: Any
) -> None:
    every = {"image": None, "audio": None, "video": None}
    monkeypatch.setattr(llava.info, "get_supported_mm_limits", lambda: every)
    template = "{% for part in messages[0]['content'] %}{{ part['type'] }}{% endfor %}"
    renderer = ChatRenderer(llava)
    renderer._template, renderer._takes = template, {template: (False, True)}
    prompt = renderer.render([{"role": "user", "content": [part]}])
    (found,) = prompt.media[modality]
    assert found.item == item and found.trusted is isinstance(item, Path)
    assert prompt.token_ids == llava.tokenize(modality)


@pytest.mark.parametrize("audio", ["AAAA", {"data": 1, "format": "wav"}, {"format": "wav"}])
def test_clips_of_the_wrong_form(llava: Any, monkeypatch: pytest.MonkeyPatch, audio: Any) -> None:
    monkeypatch.setattr(llava.info, "get_supported_mm_limits", lambda: {"audio": None})
    part = {"type": "input_audio", "input_audio": audio}
    with pytest.raises(InvalidRequestError) as caught:
        ChatRenderer(llava).render([{"role": "user", "content": [part]}])
    assert caught.value.parameter.startswith("messages[0].content[0].input_audio")


def text_only(llava_folder: Path, template: str | None) -> ChatRenderer:
    context = context_of(llava_folder)
    context._tokenizer = make_tokenizer("bytes")
    context._tokenizer.chat_template = template
    info = TextOnlyInfo(context)
    return ChatRenderer(TextOnlyProcessor(info, TextOnlyDummyInputs(info)))


def test_no_template(llava_folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        text_only(llava_folder, None).render([{"role": "user", "content": "hi"}])


def test_template_for_strings(llava_folder: Path) -> None:
    renderer = text_only(llava_folder, STRING_TEMPLATE)
    whole = renderer.render([{"role": "user", "content": "a\nb"}])
    parts = renderer.render([{"role": "user", "content": [text("a"), text("b")]}])
    assert whole == parts
    tokenizer = renderer._tokenizer
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a\nb"}], add_generation_prompt=True, return_dict=False
    )
    assert whole.token_ids == expected
    with pytest.raises(UnsupportedModalityError, match="no image items"):
        renderer.render([{"role": "user", "content": [IMAGE]}])


def test_placeholders_in_a_template_for_strings(llava: Any) -> None:
    renderer = ChatRenderer(llava)
    renderer._template = STRING_TEMPLATE
    prompt = renderer.render([{"role": "user", "content": [IMAGE, text("a<image>")]}])
    assert prompt.token_ids.count(llava.info.get_hf_config().image_token_id) == 1


def test_a_template_that_refuses(llava_folder: Path) -> None:
    renderer = text_only(llava_folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        renderer.render([{"role": "user", "content": "hi"}])
    assert caught.value.parameter == "messages"


@given(
    words=st.sets(st.text("ab<|.", min_size=1, max_size=6), min_size=1, max_size=8),
    searched=st.text("ab<|.", max_size=40),
)
def test_the_longest_word_is_found(words: set[str], searched: str) -> None:
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    plain = "|".join(map(re.escape, longest_first))
    assert re.findall(_any_of(words), searched) == re.findall(plain, searched)


def test_a_template_that_splits_at_a_token(llava_folder: Path) -> None:
    """A text cut at a typed token leaves half of its marks: the template's own stay tokens."""
    template = (
        "{% for m in messages %}{% set c = m['content'] %}{% if '</s>' in c %}"
        "{{ c.split('</s>')[-1] }}</s>{{ c.split('</s>')[0] }}{% else %}{{ c }}{% endif %}"
        "<s>{% endfor %}"
    )
    renderer = text_only(llava_folder, template)
    tokenizer = renderer._tokenizer
    start, stop = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    messages = [
        {"role": "user", "content": "a</s>b"},
        {"role": "user", "content": "c <s> d"},
        {"role": "user", "content": "e"},
    ]
    token_ids = renderer.render(messages).token_ids
    assert [each for each in token_ids if each in (start, stop)] == [stop, *[start] * 3]
    text_of = tokenizer.decode([each for each in token_ids if each not in (start, stop)])
    assert text_of.replace(" ", "") == "bac<s>de"


def test_many_typed_tokens(renderer: ChatRenderer) -> None:
    content = "<image>" * 3000 + "<" * 300_000
    prompt = renderer.render([{"role": "user", "content": content}])
    assert len(prompt.literals) == 3000
    assert renderer._tokenizer.convert_tokens_to_ids("<image>") not in prompt.token_ids
