"""Bodies come out as `json.loads` would have them, and their bounds hold."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from aioengine.asgi import json_body as module
from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.json_body import (
    LONG,
    MAX_DEPTH,
    MAX_REST,
    BodyBudget,
    BoundedBody,
    parse_object,
    read_object,
)

LETTERS = st.sampled_from(['"', "\\", "a", "é", "\n", "{", "\0", "/"])
SHORT = st.lists(LETTERS, max_size=6).map("".join)
LONG_TEXTS = st.builds(lambda text, count: text + "x" * count + text, SHORT, st.just(LONG))
KEYS = SHORT | LONG_TEXTS
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | SHORT | LONG_TEXTS,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(KEYS, children, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(value=st.dictionaries(KEYS, VALUES, max_size=4), ascii_only=st.booleans())
def test_any_object_is_read_as_json_reads_it(value: dict[str, Any], ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assume(len(data) < MAX_REST)  # beyond it, long strings with escapes are refused
    assert parse_object(data) == value


@settings(deadline=None)
@given(data=st.binary(max_size=60), padding=st.booleans())
def test_what_json_refuses_is_refused(data: bytes, padding: bool) -> None:
    text = b'{"a": "' + data + (b"x" * LONG if padding else b"") + b'"}'
    try:
        expected = json.loads(text, strict=not padding)
    except ValueError:
        with pytest.raises(ApiError) as caught:
            parse_object(text)
        assert caught.value.status == 400
    else:
        assert parse_object(text) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'"a"',
        b"{",
        b"\xff",
        b"{}{}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a":' * 5_000,
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
        b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"a":"' + b"x" * LONG,
        b'{"a":"' + b"\\" * LONG + b'"',
        b'{"a":"' + b"\\" * (4 * LONG + 1) + b'"}',
        b'{"a":"' + b"\xff" * (LONG + 1) + b'"}',
    ],
    ids=lambda data: repr(data[:12]),
)
def test_no_object(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(data)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


@pytest.mark.parametrize("text", ["", "[" * 1000, "]{" * 1000, '"}' * 1000])
def test_lists_in_lists_and_brackets_in_texts(text: str) -> None:
    value: dict[str, Any] = {"texts": [text] * 3, "flat": [{"a": [1.5]}] * 1000}
    for _ in range(MAX_DEPTH - 4):
        value = {"a": value}
    assert parse_object(json.dumps(value).encode()) == value
    with pytest.raises(ApiError):
        parse_object(json.dumps({"a": value}).encode())


def test_the_rest_is_bounded() -> None:
    fits = json.dumps({"a": ["b"] * (MAX_REST // 10), "c": "x" * (4 * MAX_REST)}).encode()
    assert len(parse_object(fits)["c"]) == 4 * MAX_REST
    for value in (["b"] * MAX_REST, "\n" * MAX_REST, [[]] * (MAX_REST // 8), [{}] * MAX_REST):
        with pytest.raises(ApiError) as caught:
            parse_object(json.dumps({"a": value}).encode())
        assert caught.value.status == 413


def test_what_looks_like_a_mark_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = []
    cut = module._cut

    def spy(body: bytes, mark: str, *options: Any) -> Any:
        marks.append(mark)
        return cut(body, mark, *options)

    monkeypatch.setattr(module, "_cut", spy)
    text = json.dumps({"a": "\0" * 8 + "0", "b": "x" * LONG * 2}).encode()
    assert parse_object(text) == json.loads(text)
    again = json.dumps({"a": marks[0] + "7", "b": "x" * LONG * 2}).encode()
    assert parse_object(again) == json.loads(again)
    assert marks[0] != marks[1]  # what one client sees is of no use to another


@pytest.mark.parametrize("escape", [r"\/", "\\u002F", "\\u002f"])
def test_media_of_writers_that_escape(escape: str) -> None:
    """PHP writes `\\/`, .NET `\\u002B`."""
    url = "data:image/png;base64," + "ab/c+d=" * (MAX_REST // 4)
    body = json.dumps({"url": url}).replace("/", escape).replace("+", "\\u002B")
    assert parse_object(body.encode()) == {"url": url}
    twice = json.dumps({"url": (r"a\/" * LONG)[: MAX_REST // 2]})
    assert parse_object(twice.encode()) == json.loads(twice)


class Client:
    """Sends pieces, and then nothing more."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self.messages = [
            {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
        ]
        if ends and self.messages:
            self.messages[-1]["more_body"] = False

    async def __call__(self) -> Any:
        if self.messages:
            return self.messages.pop(0)
        return await asyncio.Future()


def bounded(client: Any, *, headers: Any = (), most: int = 100, seconds: float = 30) -> BoundedBody:
    return BoundedBody({"type": "http", "headers": headers}, client, most, seconds)


async def test_pieces_are_one_body() -> None:
    assert await read_object(bounded(Client(b'{"a"', b": ", b"1}")), dict) == {"a": 1}
    large = b'{"a": "' + b"x" * (3 * LONG) + b'"}'
    pieces = [large[start : start + 999] for start in range(0, len(large), 999)]
    read = await read_object(bounded(Client(*pieces), most=1 << 20), dict)
    assert read == json.loads(large)


@pytest.mark.parametrize("size", [LONG - 1, LONG, LONG + 1, 2 * LONG + 1])
@pytest.mark.parametrize("step", [999, LONG, LONG + 1])
@pytest.mark.parametrize("announced", [None, "exactly", "more"])
async def test_bodies_of_about_the_size_that_is_long(
    size: int, step: int, announced: str | None
) -> None:
    body = b'{"a": "' + b"x" * (size - 9) + b'"}'
    assert len(body) == size
    pieces = [body[start : start + step] for start in range(0, size, step)]
    length = size + LONG if announced == "more" else size
    headers = [(b"content-length", b"%d" % length)] if announced else []
    read = await read_object(bounded(Client(*pieces), headers=headers, most=1 << 20), dict)
    assert read == json.loads(body)


async def test_too_many_bytes() -> None:
    with pytest.raises(ApiError) as caught:
        await read_object(bounded(Client(b"x" * 60, b"x" * 60, ends=False)), dict)
    assert caught.value.status == 413
    with pytest.raises(ApiError) as caught:
        await bounded(Client(), headers=[(b"content-length", b"101")])()
    assert caught.value.status == 413


@pytest.mark.parametrize("length", [b"101", b"9" * 12, b"9" * 19])
async def test_a_length_that_is_too_large_takes_no_memory(length: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        await read_object(bounded(Client(), headers=[(b"content-length", length)]), dict)
    assert caught.value.status == 413


async def test_a_body_that_does_not_come() -> None:
    with pytest.raises(ApiError) as caught:
        await read_object(bounded(Client(b"{", ends=False), seconds=0.01), dict)
    assert caught.value.status == 408


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_budget_is_for_all_bodies(is_announced: bool) -> None:
    """It is taken before they come, where their lengths are known, and given back at the end."""
    budget = BodyBudget(5 * LONG)

    def body(size: int, *pieces: bytes) -> BoundedBody:
        headers = [(b"content-length", str(size).encode())] if is_announced else []
        client = Client(*(pieces or [b"x" * size]), ends=False)
        return BoundedBody({"headers": headers}, client, 9 * LONG, 30, budget)

    small, first, second = body(LONG), body(3 * LONG), body(4 * LONG)
    await small()
    assert budget.num_bytes == 0, "small ones are let in, whatever the large ones do"
    await first()
    assert budget.num_bytes == 2 * LONG
    await second()
    assert budget.num_bytes == budget.peak_bytes == 5 * LONG
    third = body(LONG + 1)
    with pytest.raises(ApiError) as caught:
        await third()
    assert caught.value.status == 429 and caught.value.headers["retry-after"]
    await body(LONG)()
    first.close()
    first.close()
    third.close()
    assert budget.num_bytes == 3 * LONG
    third = body(LONG + 1)
    await third()
    for each in (second, third, small):
        each.close()
    assert (budget.num_bytes, budget.peak_bytes) == (0, 5 * LONG)


DATA = bytes(range(256)) * 1024
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"image": URL, "type": "image"},
        {"type": "input_audio", "input_audio": {"data": URL.partition(",")[2], "format": "wav"}},
    ],
    ids=["a URL", "bare", "of the other form", "an audio clip"],
)
@pytest.mark.parametrize("escape", ["/", r"\/", "\\u002F"])
@pytest.mark.parametrize("layout", [(",", ":"), (" , ", "\n:\t")])
async def test_base64_of_media_is_decoded(part: Any, escape: str, layout: Any) -> None:
    wanted = {"messages": [{"role": "user", "content": [part, "x" * LONG * 2, part]}]}
    body = json.dumps(wanted, separators=layout).replace("/", escape).encode()
    pieces = [body[start : start + 99_999] for start in range(0, len(body), 99_999)]
    for headers in ([(b"content-length", str(len(body)).encode())], []):
        read = await read_object(bounded(Client(*pieces), headers=headers, most=1 << 30), dict)
        content = read["messages"][0]["content"]
        assert content[1] == "x" * LONG * 2
        for found in (content[0], content[2]):
            (item,) = (value for name, value in found.items() if name != "type")
            if isinstance(item, dict):
                assert item.keys() == part[part["type"]].keys()
                item = item.get("url", item.get("data"))
            assert item == DATA


@pytest.mark.parametrize(
    "url",
    [
        URL[:-1],
        URL + "AAAA",
        URL[:-100] + "=" + URL[-100:],
        URL[:-100] + "\u00e9" + URL[-100:],
        URL.replace(";base64", ""),
        "https://" + "a" * LONG,
        "é" * LONG,
    ],
    ids=["cut", "padded", "padding inside", "a letter", "not in base64", "a long URL", "letters"],
)
async def test_what_is_no_base64_stays_text(url: str) -> None:
    wanted = {"messages": [{"image_url": {"url": url}}], "text": "x" * LONG}
    for ascii_only in (True, False):
        body = json.dumps(wanted, ensure_ascii=ascii_only).encode()
        assert await read_object(bounded(Client(body), most=1 << 30), dict) == wanted


async def test_base64_elsewhere_is_text_or_refused() -> None:
    texts = {"messages": [{"content": URL}], "prompt": URL, URL: URL}
    body = json.dumps(texts).encode()
    assert await read_object(bounded(Client(body), most=1 << 30), dict) == texts
    body = json.dumps({"messages": [], "response_format": {"url": URL}}).encode()
    with pytest.raises(ApiError) as caught:
        await read_object(bounded(Client(body), most=1 << 30), dict)
    assert caught.value.status == 400 and "messages" in caught.value.message


async def test_a_client_that_leaves_before_its_body_is_there() -> None:
    async def leave() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await read_object(bounded(leave), dict)
