"""Items as bytes: bit for bit there and back, and nothing else is let in."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.processors.cache.serialization import dump_item, item_parts, load_item
from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargs,
    MultiModalKwargsItem,
)

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    torch.complex64,
)
KEY = "5a" * 32


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and shape, empty and 0-dimensional ones too, with any bits in it."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


@st.composite
def items(draw: st.DrawFn) -> MultiModalKwargsItem:
    """An item of any modality with tensors that are batched in any way."""
    modality = draw(st.sampled_from(["image", "audio", "a modality ü\ud800"]))
    found = draw(st.dictionaries(st.text(max_size=8), tensors(), max_size=5))
    fields: dict[str, MultiModalFieldConfig] = {}
    for name, tensor in found.items():
        on_cpu = draw(st.booleans())
        kinds = ["batched", "shared", *(["flat"] if tensor.ndim else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "flat":
            dim = draw(st.integers(-tensor.ndim, tensor.ndim - 1))
            sizes = [3, tensor.shape[dim], 0]
            config = MultiModalFieldConfig.flat_from_sizes(modality, sizes, dim, keep_on_cpu=on_cpu)
        elif kind == "shared":
            config = MultiModalFieldConfig.shared(modality, 3, keep_on_cpu=on_cpu)
        else:
            config = MultiModalFieldConfig.batched(modality, keep_on_cpu=on_cpu)
        fields[name] = config
    return MultiModalKwargsItem(modality, found, fields)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(one: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    """Equal in all that an item is, but for what its fields know of the batch it came from."""
    assert one.modality == other.modality
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert one[name].shape == other[name].shape
        assert bits(one[name]) == bits(other[name])
        assert one.keep_on_cpu(name) == other.keep_on_cpu(name)
        assert type(one.field(name)) is type(other.field(name))
        assert getattr(one.field(name), "dim", None) == getattr(other.field(name), "dim", None)
    return True


def an_item() -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_config(
        {
            "pixels": torch.arange(12, dtype=torch.float32).reshape(3, 4),
            "grid": torch.tensor([1, 2, 3]),
            "mask": torch.tensor([True, False]),
        },
        {
            "pixels": MultiModalFieldConfig.flat_from_sizes("image", [2, 3], 0),
            "grid": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            "mask": MultiModalFieldConfig.shared("image", 2),
        },
    )


@given(items())
def test_there_and_back_bit_for_bit(item: MultiModalKwargsItem) -> None:
    assert same(item, load_item(dump_item(item)))
    assert same(item, load_item(bytearray(dump_item(item, key=KEY)), key=KEY))


@given(items())
def test_a_loaded_item_shares_no_memory_with_the_bytes(item: MultiModalKwargsItem) -> None:
    data = bytearray(dump_item(item))
    loaded = load_item(data)
    data[:] = bytes(len(data))
    assert same(item, loaded)


@given(st.lists(tensors(), min_size=1, max_size=1), st.data())
def test_loaded_items_batch_as_the_originals_do(found: list[torch.Tensor], data: Any) -> None:
    """`reduce` needs nothing of an item's field that is lost on the way."""
    config = {
        "a": MultiModalFieldConfig.batched("image"),
        "b": MultiModalFieldConfig.flat_from_sizes("image", [1, 2, 3], 1),
        "c": MultiModalFieldConfig.shared("image", 3),
    }
    dtype = found[0].dtype
    outputs = {
        "a": torch.ones(3, 2).to(dtype),
        "b": torch.arange(12).reshape(2, 6).to(torch.int32),
        "c": torch.tensor([7, 8]),
    }
    batch = MultiModalKwargs.build(outputs, config)["image"]
    chosen = [batch[i] for i in data.draw(st.permutations(range(3)))]
    expected = MultiModalKwargs.reduce(chosen)
    reduced = MultiModalKwargs.reduce([load_item(dump_item(item)) for item in chosen])
    assert list(reduced) == list(expected)
    for name, value in expected.items():
        other = reduced[name]
        assert isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        assert bits(value) == bits(other) and value.shape == other.shape


def test_a_single_loaded_item_splits_as_its_field_says() -> None:
    loaded = load_item(dump_item(an_item()))
    for name in loaded:
        field = loaded.field(name)
        (part,) = field.split(field.join([loaded[name]]))
        assert torch.equal(part, loaded[name])


def test_any_reader_of_the_format_reads_it() -> None:
    item = an_item()
    read = safetensors.torch.load(dump_item(item, key=KEY))
    assert read.keys() == item.keys()
    assert all(torch.equal(read[name], item[name]) for name in item)


def test_what_the_library_writes_is_read() -> None:
    header = parse(dump_item(an_item()))[0]
    written = safetensors.torch.save(dict(an_item()), metadata=header["__metadata__"])
    assert same(an_item(), load_item(written))


def test_the_parts_are_the_items_own_memory() -> None:
    item = an_item()
    parts = item_parts(item)
    assert b"".join(parts) == dump_item(item)
    item["pixels"][0, 0] = 5
    assert b"".join(parts) == dump_item(item)


class OfNoKind(MultiModalFieldConfig):
    def split(self, data: Any) -> list[torch.Tensor]:
        return list(data)

    def join(self, items: Any) -> Any:
        return torch.stack(list(items))


def test_what_the_format_does_not_have_is_refused() -> None:
    config = {"x": MultiModalFieldConfig.batched("image"), "__metadata__": None}
    item = MultiModalKwargsItem.from_config({"x": torch.ones(1, dtype=torch.complex128)}, config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="complex128"):
        dump_item(item)
    field = MultiModalFieldConfig.batched("image")
    for wrong in (
        MultiModalKwargsItem("image", {"__metadata__": torch.ones(1)}, {"__metadata__": field}),
        MultiModalKwargsItem("audio", {"x": torch.ones(1)}, {"x": field}),
        MultiModalKwargsItem("image", {"x": torch.ones(1)}, {"x": OfNoKind("image", False)}),
    ):
        with pytest.raises(ValueError, match=r"cannot be written|another modality"):
            dump_item(wrong)


# ---- hostile bytes


def parse(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def build(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def of_item(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def changed(header: dict[str, Any]) -> None:
        item = json.loads(header["__metadata__"]["aioengine"])
        change(item)
        header["__metadata__"]["aioengine"] = json.dumps(item)

    return changed


def entry(name: str, **changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(changes)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no metadata": lambda header: header.pop("__metadata__"),
    "metadata is a list": lambda header: header.update(__metadata__=[]),
    "no item": lambda header: header.update(__metadata__={}),
    "item is a number": lambda header: header["__metadata__"].update(aioengine=1),
    "item is no JSON": lambda header: header["__metadata__"].update(aioengine="{"),
    "item is a list": lambda header: header["__metadata__"].update(aioengine="[]"),
    "deep": lambda header: header["__metadata__"].update(aioengine="[" * 100_000),
    "later version": of_item(lambda item: item.update(version=2)),
    "something more": of_item(lambda item: item.update(more=2)),
    "modality is a number": of_item(lambda item: item.update(modality=3)),
    "fields is a list": of_item(lambda item: item.update(fields=[])),
    "a field too few": of_item(lambda item: item["fields"].pop("mask")),
    "a field too many": of_item(lambda item: item["fields"].update(x=item["fields"]["mask"])),
    "field is null": of_item(lambda item: item["fields"].update(mask=None)),
    "unknown kind": of_item(lambda item: item["fields"]["mask"].update(kind="pickled")),
    "kind is a list": of_item(lambda item: item["fields"]["mask"].update(kind=[])),
    "keep_on_cpu is 1": of_item(lambda item: item["fields"]["mask"].update(keep_on_cpu=1)),
    "dim too large": of_item(lambda item: item["fields"]["pixels"].update(dim=2)),
    "dim too small": of_item(lambda item: item["fields"]["pixels"].update(dim=-3)),
    "dim is true": of_item(lambda item: item["fields"]["pixels"].update(dim=True)),
    "no dim": of_item(lambda item: item["fields"]["pixels"].pop("dim")),
    "tensor is a list": lambda header: header.update(mask=[]),
    "a tensor too few": lambda header: header.pop("mask"),
    "unknown dtype": entry("mask", dtype="OBJECT"),
    "wider dtype": entry("mask", dtype="F32"),
    "dtype is a list": entry("mask", dtype=["BOOL"]),
    "shape is a number": entry("mask", shape=2),
    "other shape": entry("mask", shape=[3]),
    "negative": entry("mask", shape=[-1, -2]),
    "fractions": entry("mask", shape=[2.0]),
    "true": entry("mask", shape=[2, True]),
    "too many dims": entry("mask", shape=[2, *[1] * 40]),
    "enormous": entry("mask", shape=[0, 1 << 40, 1 << 40]),
    "beyond numbers": entry("mask", shape=[0, 1 << 200]),
    "one offset": entry("mask", data_offsets=[72]),
    "offsets beyond": entry("mask", data_offsets=[100, 102]),
    "offsets before": entry("mask", data_offsets=[-2, 0]),
    "overlap": entry("mask", data_offsets=[0, 2]),
    "something beside": entry("mask", more=1),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_header_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    header, body = parse(dump_item(an_item()))
    assert same(an_item(), load_item(build(header, body)))
    change(header)
    with pytest.raises(ValueError, match=r"malformed|JSON|Expecting"):
        load_item(build(header, body))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"1234567", struct.pack("<Q", 1 << 63), build(b"", b""), build(b"\xff\xfe", b"")),
        *(build([], b""), build(b"[" * 100_000, b""), build(b'{"a":1,"a":1}', b""), build({}, b"")),
        build({str(number): {} for number in range(2000)}, b""),
        build(b"9" * 5000, b""),
    ],
)
def test_no_item_at_all(data: bytes) -> None:
    with pytest.raises(ValueError):
        load_item(data)
    with pytest.raises(ValueError):
        load_item(memoryview(bytearray(data)), key=KEY)


def test_bools_are_zero_or_one() -> None:
    header, body = parse(dump_item(an_item()))
    assert header["mask"]["data_offsets"][1] == len(body)
    with pytest.raises(ValueError, match="bool"):
        load_item(build(header, body[:-1] + b"\2"))


@given(st.data())
def test_no_shorter_or_longer_one_is_an_item(data: Any) -> None:
    whole = dump_item(an_item())
    with pytest.raises(ValueError):
        load_item(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError):
        load_item(whole + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.data())
def test_no_bit_of_a_sealed_item_may_change(data: Any) -> None:
    sealed = bytearray(dump_item(an_item(), key=KEY))
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        load_item(sealed, key=KEY)


@given(st.data())
def test_damaged_bytes_are_an_item_or_a_value_error(data: Any) -> None:
    damaged = bytearray(dump_item(an_item()))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        loaded = load_item(damaged)
    except ValueError:
        return
    assert isinstance(loaded, MultiModalKwargsItem)


def test_a_seal_is_of_one_key() -> None:
    sealed = dump_item(an_item(), key=KEY)
    assert same(an_item(), load_item(sealed))
    for data, key in ((sealed, "00" * 32), (dump_item(an_item()), KEY)):
        with pytest.raises(ValueError, match="another item"):
            load_item(data, key=key)
    header, body = parse(sealed)
    with pytest.raises(ValueError, match="damaged"):  # spaces that a parser does not mind
        load_item(build(json.dumps(header).encode(), body), key=KEY)
