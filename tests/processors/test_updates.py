"""Matching prompt updates on token ids, against a plain statement of the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.errors import PlaceholderMismatchError
from aioengine.processors.prompt.matching import Ranges, apply_updates, find_expanded
from aioengine.processors.prompt.updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    resolve_updates,
)


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def run(prompt: str, updates: list[PromptUpdate], **counts: int) -> tuple[str, Any]:
    tokens, ranges = expand(ids(prompt), updates, counts)
    places = {
        modality: [
            (placed.offset, placed.length, placed.embed_runs) for placed in ranges.get(modality, [])
        ]
        for modality in counts
    }
    return Letters().decode(tokens), places


def expand(
    prompt: list[int],
    updates: list[PromptUpdate],
    counts: Mapping[str, int],
    literals: Sequence[tuple[int, int]] = (),
) -> tuple[list[int], Ranges]:
    places = {modality: range(count) for modality, count in counts.items()}
    resolved = resolve_updates(updates, places, Letters())
    return apply_updates(prompt, resolved, Letters(), literals)


def whole(offset: int, length: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    return (offset, length, ((0, length),))


def replace(target: Any, replacement: Any, modality: str = "image") -> PromptReplacement:
    return PromptReplacement(modality=modality, target=target, replacement=replacement)


def insert(target: Any, insertion: Any, modality: str = "image") -> PromptInsertion:
    return PromptInsertion(modality=modality, target=target, insertion=insertion)


@given(pieces=st.lists(st.text("abc", max_size=4), min_size=1, max_size=5), sizes=st.data())
def test_replacements_are_leftmost_and_in_order(pieces: list[str], sizes: st.DataObject) -> None:
    lengths = [sizes.draw(st.integers(1, 5)) for _ in pieces[1:]]
    prompt = "X".join(pieces)
    update = replace("X", lambda index: [1000 + index] * lengths[index])
    tokens, ranges = expand(ids(prompt), [update], {"image": len(lengths)})
    expected = ids(pieces[0])
    places = []
    for index, (length, piece) in enumerate(zip(lengths, pieces[1:], strict=True)):
        places.append((len(expected), length))
        expected += [1000 + index] * length + ids(piece)
    assert tokens == expected
    assert [(placed.offset, placed.length) for placed in ranges.get("image", [])] == places


@given(st.text("ab", max_size=14))
def test_targets_of_several_tokens_do_not_overlap(prompt: str) -> None:
    count = prompt.count("aba")
    result, places = run(prompt, [replace(ids("aba"), "XY")], image=count)
    assert result == prompt.replace("aba", "XY")
    assert len(places["image"]) == count


def test_targets_and_contents_of_every_kind() -> None:
    for target in ("X", ids("X"), lambda index: "X", lambda index: ids("X")):
        for content in ("YY", ids("YY"), lambda index: "YY", PromptUpdateDetails.from_seq("YY")):
            assert run("aXb", [replace(target, content)], image=1) == (
                "aYYb", {"image": [whole(1, 2)]},
            )  # fmt: skip
    by_item = replace(lambda index: "XZ"[index], lambda index: "12"[index])
    assert run("aXbZ", [by_item], image=2)[0] == "a1b2"


def test_insertions_follow_their_target() -> None:
    assert run("aXb", [insert("X", "12")], image=1) == ("aX12b", {"image": [whole(2, 2)]})
    # The target stays, so several items can follow it, in order.
    several = insert("X", lambda index: str(index))
    assert run("aXb", [several], image=3)[0] == "aX012b"


def test_index_targets() -> None:
    start, end = PromptIndexTargets.start(), PromptIndexTargets.end()
    numbered = lambda index: str(index)  # noqa: E731
    assert run("ab", [insert(start, numbered)], image=2) == (
        "01ab", {"image": [whole(0, 1), whole(1, 1)]},
    )  # fmt: skip
    assert run("ab", [insert(end, numbered)], image=2)[0] == "ab01"
    assert run("", [insert(end, numbered)], image=1)[0] == "0"
    prefix = PromptIndexTargets.prefix("ab")
    assert run("abab", [insert(prefix, numbered)], image=2)[0] == "ab01ab"
    with pytest.raises(PlaceholderMismatchError):
        run("babab", [insert(prefix, numbered)], image=1)


@pytest.mark.parametrize("spelled", ["ab", ids("ab"), lambda index: ids("ab")])
def test_index_targets_have_no_width(spelled: Any) -> None:
    """A replacement there takes nothing away, be the target text, tokens or a function."""
    start, end = PromptIndexTargets.start(), PromptIndexTargets.end()
    numbered = lambda index: str(index)  # noqa: E731

    def prefix(index: int) -> Any:
        return PromptIndexTargets.prefix(spelled(index) if callable(spelled) else spelled)

    target = prefix if callable(spelled) else prefix(0)
    assert run("abab", [replace(target, "X")], image=1) == ("abXab", {"image": [whole(2, 1)]})
    assert run("abab", [replace(target, numbered)], image=3)[0] == "ab012ab"
    assert run("abab", [replace(start, numbered)], image=2)[0] == "01abab"
    assert run("abab", [replace(end, numbered)], image=2)[0] == "abab01"
    several = [replace(target, "1"), insert(target, "2", "video"), replace("c", "3", "audio")]
    assert run("aba", several[:2], image=1, video=2)[0] == "ab122a"
    assert run("abac", [several[2], several[0]], image=1, audio=1)[0] == "ab1a3"
    with pytest.raises(PlaceholderMismatchError):
        run("babab", [replace(target, "X")], image=1)


def test_a_prefix_that_occurs_again() -> None:
    update = replace(PromptIndexTargets.prefix([32000]), [91])
    tokens, ranges = expand([32000] * 3, [update], {"image": 1})
    assert tokens == [32000, 91, 32000, 32000]
    assert (ranges["image"][0].offset, ranges["image"][0].length) == (1, 1)


def test_alternatives_in_order() -> None:
    updates = [replace("XX", "1"), replace("X", "2")]
    assert run("aXXb", updates, image=1)[0] == "a1b"
    assert run("aXb", updates, image=1)[0] == "a2b"
    # The first alternative that is found anywhere wins for an item; the rest stay for the next.
    assert run("aXXbX", updates, image=2)[0] == "a1b2"


def test_modalities_share_a_prompt() -> None:
    updates = [replace("X", "11"), replace("Y", "222", "video")]
    result, places = run("YaXbY", updates, image=1, video=2)
    assert result == "222a11b222"
    assert places == {"image": [whole(4, 2)], "video": [whole(0, 3), whole(7, 3)]}


def test_a_stretch_serves_one_modality() -> None:
    updates = [replace("XY", "1"), replace("Y", "2", "video")]
    assert run("XYY", updates, image=1, video=1)[0] == "12"
    with pytest.raises(PlaceholderMismatchError, match="video"):
        run("XY", updates, image=1, video=1)
    # An insertion's target must not have been replaced either.
    with pytest.raises(PlaceholderMismatchError, match="video"):
        run("XY", [replace("XY", "1"), insert("Y", "2", "video")], image=1, video=1)


def test_features_and_masks() -> None:
    framed = PromptUpdateDetails(full="[..]", features="..")
    assert run("aX", [replace("X", framed)], image=1) == ("a[..]", {"image": [whole(2, 2)]})
    rows = "..|..|"
    expected = {"image": [(1, 6, ((0, 2), (3, 5)))]}
    for details in (
        PromptUpdateDetails.select_token_id(rows, ord(".")),
        PromptUpdateDetails.select_token_ids(ids(rows), [ord("."), ord("!")]),
        PromptUpdateDetails.select_text(rows, ".."),
    ):
        assert run("aX", [replace("X", details)], image=1) == ("a" + rows, expected)
    both = PromptUpdateDetails(
        full="[.|.]", features=".|.", is_embed=lambda _, ids: torch.tensor(ids) == ord(".")
    )
    assert run("X", [replace("X", both)], image=1)[1] == {"image": [(1, 3, ((0, 1), (2, 3)))]}


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ("aXb", 2, "1 `X` placeholder(s) but 2 images were given"),
        ("ab", 1, "0 `X` placeholder(s) but 1 image was given"),
        ("XaX", 1, "2 `X` placeholder(s) but 1 image was given"),
        ("XaX", 0, "2 `X` placeholder(s) but 0 images were given"),
    ],
)
def test_mismatches_say_how_many(prompt: str, count: int, message: str) -> None:
    with pytest.raises(PlaceholderMismatchError) as caught:
        run(prompt, [replace("X", "YY")], image=count)
    assert message in str(caught.value)
    assert caught.value.parameter == "prompt"


def test_a_modality_without_updates() -> None:
    with pytest.raises(PlaceholderMismatchError, match="0 placeholder"):
        run("ab", [], image=1)


def test_literals_are_no_placeholders() -> None:
    """Whole ones and those that a target would only touch, few or very many."""
    updates = [replace("ab", "!"), insert("b", "?", "audio")]
    literals = [(0, 3), (4, 5)]
    tokens, ranges = expand(ids("abcabXabb"), updates, {"image": 1, "audio": 1}, literals)
    assert Letters().decode(tokens) == "abcabX!b?"
    assert ranges["image"][0].offset == 6 and ranges["audio"][0].offset == 8
    many = 50_000
    literals = [(2 * n, 2 * n + 2) for n in range(many)]
    tokens, _ = expand(ids("ab" * (many + 1)), updates[:1], {"image": 1}, literals)
    assert Letters().decode(tokens) == "ab" * many + "!"


def again(tokens: list[int], updates: list[PromptUpdate], counts: Mapping[str, int]) -> Any:
    """What is found in a prompt that is expanded already."""
    places = {modality: range(count) for modality, count in counts.items()}
    return find_expanded(tokens, resolve_updates(updates, places, Letters()), Letters())


def test_a_content_inside_of_another_is_found_again() -> None:
    """A video's frames are written as images are, and the video comes first."""
    image = PromptUpdateDetails(full="<...>", features="...")
    video = PromptUpdateDetails.select_text("1<...>2<...>", "...")
    updates = [replace("I", image), replace("V", video, "video")]
    for prompt in ("VI", "a Vb I", "VIIV", "IVa", "V"):
        counts = {"image": prompt.count("I"), "video": prompt.count("V")}
        tokens, ranges = expand(ids(prompt), updates, counts)
        assert again(tokens, updates, counts) == ranges
        assert again(ids(prompt), updates, counts) is None
        assert again([*tokens, ord("I")], updates, counts) is None
        assert again(tokens, updates, {**counts, "image": counts["image"] + 3}) is None


def test_what_is_left_beside_a_content_is_not_joined() -> None:
    """The text before and after one spells no placeholder."""
    updates: list[PromptUpdate] = [replace("ab", "<.>")]
    tokens, ranges = expand(ids("aabb"), updates, {"image": 1})
    assert again(tokens, updates, {"image": 1}) == ranges


texts = st.text("abc ", max_size=3)
inner = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(
    pieces=st.lists(st.tuples(texts, st.sampled_from("IVA"), inner), max_size=7),
    tail=texts,
    order=st.permutations("IVA"),
    opening=st.sampled_from(["", "["]),
)
def test_nested_contents_are_found_again(
    pieces: list[tuple[str, str, list[int]]], tail: str, order: list[str], opening: str
) -> None:
    """Images, videos whose frames are images, and a third kind that holds both."""
    sizes = {kind: [size for _, each, size in pieces if each == kind] for kind in "IVA"}

    def image(size: int) -> str:
        return "<" + "." * size + ">"

    def video(frames: list[int]) -> str:
        return opening + "".join(map(image, frames)) + "]"

    def content(kind: str, size: list[int]) -> str:
        if kind == "I":
            return image(size[0])
        return video(size) if kind == "V" else "(" + video(size) + image(size[0]) + ")"

    updates: list[PromptUpdate] = [
        replace(kind, lambda index, kind=kind: content(kind, sizes[kind][index]), kind)
        for kind in order
    ]
    counts = {kind: len(sizes[kind]) for kind in order}
    prompt = "".join(text + kind for text, kind, _ in pieces) + tail
    tokens, ranges = expand(ids(prompt), updates, counts)
    found = again(tokens, updates, counts)
    if opening or not sizes["V"]:
        assert found == ranges
    elif found is not None:
        # Without an opening, images before a video may be its frames: another reading, a whole
        # one all the same.
        assert [len(found[kind]) for kind in found] == [len(ranges[kind]) for kind in ranges]
