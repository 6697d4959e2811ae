"""Fields, items and ranges: cutting into items and putting together are inverses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargs,
    MultiModalKwargsItem,
    PlaceholderRange,
    is_host_only,
)
from aioengine.types import Span


@given(offset=st.integers(0, 50), mask=st.lists(st.booleans(), min_size=1, max_size=30))
def test_ranges_become_spans(offset: int, mask: list[bool]) -> None:
    if not any(mask):
        with pytest.raises(ValueError, match="at least one"):
            PlaceholderRange(offset, len(mask), torch.tensor(mask))
        return
    placed = PlaceholderRange(offset, len(mask), torch.tensor(mask))
    span = placed.to_span()
    assert placed.num_embeds == span.num_rows == sum(mask)
    covered = [index for start, stop in span.embed_runs for index in range(start, stop)]
    assert covered == [index for index, wanted in enumerate(mask) if wanted]
    edges = [edge for run in span.embed_runs for edge in run]
    assert edges == sorted(set(edges))
    if all(mask):
        plain = PlaceholderRange(offset, len(mask))
        assert plain == placed and hash(plain) == hash(placed)
        assert plain.to_span() == span == Span(offset, len(mask))


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(4, dtype=torch.bool)])
def test_masks_have_the_ranges_shape(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="bool tensor"):
        PlaceholderRange(0, 3, mask)


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, MultiModalFieldConfig]]:
    count = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    dim = draw(st.integers(0, 1))
    total = sum(sizes)
    shape = (total, 2) if dim == 0 else (2, total)
    outputs = {
        "batched": torch.randn(count, 3, 2),
        "ragged": [torch.randn(index + 1, 2) for index in range(count)],
        "flat": torch.randn(shape),
        "shared": torch.randn(2, 2),
        "counts": torch.tensor(sizes),
    }
    slices, end = [], 0
    for size in sizes:
        slices.append(slice(end, end + size))
        end += size
    flat = (
        MultiModalFieldConfig.flat("image", slices, dim)
        if draw(st.booleans())
        else MultiModalFieldConfig.flat_from_sizes("image", torch.tensor(sizes), dim)
    )
    config = {
        "batched": MultiModalFieldConfig.batched("image"),
        "ragged": MultiModalFieldConfig.batched("image"),
        "flat": flat,
        "shared": MultiModalFieldConfig.shared("image", count),
        "counts": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    names = draw(st.sets(st.sampled_from(sorted(outputs)), min_size=1))
    return {name: outputs[name] for name in names}, {name: config[name] for name in names}


@given(batches())
def test_reduce_inverts_build(
    batch: tuple[dict[str, Any], dict[str, MultiModalFieldConfig]],
) -> None:
    outputs, config = batch
    items = MultiModalKwargs.build({**outputs, "unnamed": torch.zeros(1)}, config)["image"]
    reduced = MultiModalKwargs({"image": items})
    assert set(reduced) == set(outputs)
    for name, value in outputs.items():
        back = reduced[name]
        if isinstance(value, list) and len(value) > 1:
            assert all(torch.equal(mine, given) for mine, given in zip(back, value, strict=True))
        elif isinstance(value, list):
            assert torch.equal(torch.as_tensor(back)[0], value[0])
        else:
            assert isinstance(back, torch.Tensor) and torch.equal(back, value)
    for item in items:
        assert item.num_bytes == sum(item[name].nbytes for name in item)
        assert item.keep_on_cpu("counts") if "counts" in item else True
        for tensor in item.values():
            assert tensor.is_contiguous()
            # It keeps nobody else's memory alive.
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_items_of_different_batches() -> None:
    config = {"x": MultiModalFieldConfig.batched("image")}
    data = torch.arange(12.0).reshape(4, 3)
    first = MultiModalKwargs.build({"x": data[:1]}, config)["image"]
    rest = MultiModalKwargs.build({"x": data[1:]}, config)["image"]
    assert torch.equal(MultiModalKwargs.reduce(first + rest)["x"], data)
    data.zero_()
    assert rest[2]["x"].tolist() == [9, 10, 11]


def test_what_is_for_the_host_only_is_in_no_batch() -> None:
    assert is_host_only("_layout") and not is_host_only("pixel_values")
    field = MultiModalFieldConfig.flat_from_sizes("image", [2])
    items = [
        MultiModalKwargsItem.from_config(
            {"x": torch.full((2, 3), float(number)), **extra}, {"x": field, "_layout": field}
        )
        for number, extra in enumerate([{"_layout": torch.tensor([4, 5])}, {}])
    ]
    assert items[0]["_layout"].tolist() == [4, 5]
    assert items[0].num_bytes == 2 * 3 * 4 + 2 * 8
    reduced = MultiModalKwargs.reduce(items)
    assert reduced.keys() == {"x"}
    both = MultiModalKwargs({"image": items})
    assert set(both) == {"x"} and "_layout" not in both
    assert both.get_item("image", 0)["_layout"].tolist() == [4, 5]


def test_nothing_is_batched_before_it_is_asked_for() -> None:
    shared = {"x": MultiModalFieldConfig.shared("image", 1)}
    items = [MultiModalKwargsItem.from_config({"x": torch.full((1,), v)}, shared) for v in (1, 2)]
    kwargs = MultiModalKwargs({"image": items})
    assert kwargs.get_item("image", 1)["x"].tolist() == [2]
    with pytest.raises(ValueError, match="shared"):
        kwargs["x"]


def test_bfloat16_items() -> None:
    config = {"x": MultiModalFieldConfig.batched("image")}
    data = torch.randn(2, 3).to(torch.bfloat16)
    items = MultiModalKwargs.build({"x": data}, config)["image"]
    assert torch.equal(MultiModalKwargs.reduce(items)["x"], data)


def test_disagreements() -> None:
    batched = MultiModalFieldConfig.batched("image")
    with pytest.raises(ValueError, match="disagree"):
        MultiModalKwargs.build(
            {"x": torch.zeros(2, 1), "y": torch.zeros(3, 1)}, {"x": batched, "y": batched}
        )
    with pytest.raises(ValueError, match="cannot be cut"):
        sizes = MultiModalFieldConfig.flat_from_sizes("image", [1, 2])
        MultiModalKwargs.build({"x": torch.zeros(4, 1)}, {"x": sizes})
    with pytest.raises(ValueError, match="consecutive"):
        MultiModalFieldConfig.flat("image", [slice(0, 2), slice(3, 4)])
    one = MultiModalKwargsItem.from_config({"x": torch.zeros(1)}, {"x": batched})
    other = MultiModalKwargsItem.from_config({"y": torch.zeros(1)}, {"y": batched})
    with pytest.raises(ValueError, match="same modality and names"):
        MultiModalKwargs.reduce([one, other])
    shared = {"x": MultiModalFieldConfig.shared("image", 1)}
    with pytest.raises(ValueError, match="shared"):
        MultiModalKwargs.reduce(
            [MultiModalKwargsItem.from_config({"x": torch.full((1,), v)}, shared) for v in (1, 2)]
        )


def test_empty() -> None:
    assert len(MultiModalKwargs()) == 0
    assert MultiModalKwargs().get_items("image") == []
    assert MultiModalKwargs.reduce([]) == {}


def test_a_rule_of_no_kind_is_no_rule() -> None:
    with pytest.raises(TypeError, match="abstract"):
        MultiModalFieldConfig("image", keep_on_cpu=False)  # type: ignore[abstract]
