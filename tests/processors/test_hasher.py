"""Identity: different things never share a key, equal things always do."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.errors import InvalidRequestError
from aioengine.processors.cache.hasher import ContentHasher, digest_options, item_key


def digest(value: Any) -> str:
    hasher = ContentHasher("test")
    hasher.update(value)
    return hasher.hexdigest()


def key(**changes: Any) -> str:
    parts: dict[str, Any] = {
        "model_id": "m",
        "modality": "image",
        "identity": b"x" * 32,
        "mm_processor_kwargs": {},
    }
    parts.update(changes)
    options = digest_options(parts.pop("mm_processor_kwargs"))
    return item_key(options=options, **parts)


DIFFERENT = [
    None, False, True, 0, 1, -1, 0.0, -0.0, 1.0, float("nan"), 2**70, "", b"", "ab", b"ab", "0",
    b"\0", [], {}, [0], [0.0], [[0]], [None], ["a", "b"], ["ab"], [["a"], "b"], [["a", "b"]],
    {"a": 1}, {"a": "1"}, {"a": [1]}, {"ab": 1}, {"a": 1, "b": 2}, {"a": {"b": 2}},
    np.zeros(4, np.uint8), np.zeros(4, np.int8), np.zeros(4, np.float32), np.zeros(4, np.int32),
    np.zeros((2, 2), np.uint8), np.zeros((1, 4), np.uint8), np.zeros((4, 1), np.uint8),
    np.zeros(0, np.uint8), np.zeros((0, 3), np.uint8), np.zeros((), np.uint8),
    torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16),
    np.ones(4, ">f4"), np.ones(4, "<f4").byteswap(),
]  # fmt: skip


def test_different_values_differ() -> None:
    assert len({digest(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_equal_values_agree() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest([1, 2]) == digest((1, 2))
    assert digest(b"ab") == digest(bytearray(b"ab")) == digest(memoryview(b"ab"))
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert digest(pixels) == digest(np.asfortranarray(pixels)) == digest(torch.from_numpy(pixels))
    assert digest(pixels.T) == digest(np.ascontiguousarray(pixels.T)) != digest(pixels)
    assert digest(1) == digest(np.int64(1))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_framing(first: Any, second: Any) -> None:
    def shape(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{k!r}:{shape(value[k])}" for k in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(shape, value)) + "]"
        return f"{type(value).__name__}:{value!r}"

    assert (digest(first) == digest(second)) == (shape(first) == shape(second))


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, 1j, {"a": object()}, [lambda: 0], {1: 2}, np.array([object()])]
)
def test_unknown_objects_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        digest_options({"x": value})
    assert caught.value.parameter.startswith("mm_processor_kwargs")
    assert "0x" not in str(caught.value)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="dense"):
        digest(torch.zeros(3, 3).to_sparse())


def test_every_part_of_the_key_counts() -> None:
    keys = [
        key(),
        key(model_id="n"),
        key(modality="video"),
        key(identity=b"y" * 32),
        key(mm_processor_kwargs={"a": 1}),
        key(mm_processor_kwargs={"a": 1.0}),
        key(mm_processor_kwargs={"a": True}),
        key(mm_processor_kwargs={"images_kwargs": {"a": 1}}),
        key(cache_salt=""),
        key(cache_salt="tenant"),
        key(uuid="u"),
        key(uuid=""),
        key(uuid="u", modality="audio"),
        key(uuid="u", model_id="n"),
        key(uuid="u", cache_salt="tenant"),
        key(uuid="u", mm_processor_kwargs={"a": 1}),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(each) == 64 for each in keys)


def test_a_uuid_never_stands_for_content() -> None:
    content = hashlib.sha256(b"x").hexdigest()
    assert key(uuid=content) != key(identity=content.encode())
    assert key(uuid=key()) != key()
    # The same name is the same item, whatever is given with it.
    assert key(uuid="u", identity=b"1") == key(uuid="u", identity=b"2")


def test_parts_do_not_run_into_each_other() -> None:
    assert key(model_id="ab", modality="c") != key(model_id="a", modality="bc")
    assert key(cache_salt="a", model_id="b") != key(cache_salt="ab", model_id="")
