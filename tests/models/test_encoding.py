"""Encoder rows: every form transformers returns them in, batching, merging."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.errors import EngineError
from aioengine.models.runtime.encoding import encode_batch, encode_items, parts_of, rows_by_item
from aioengine.models.runtime.interfaces import (
    NestedTensors,
    SupportsMultiModal,
    merge_multimodal_embeddings,
)
from aioengine.models.runtime.transformers_model import TransformersModel
from tests.support.tiny import IMAGE, NUM_IMAGE_TOKENS, tiny_llava, tiny_pixels

ROWS = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    "output",
    [
        ROWS,
        list(ROWS),
        tuple(ROWS),
        SimpleNamespace(pooler_output=ROWS, last_hidden_state=None),
        SimpleNamespace(pooler_output=list(ROWS)),
        SimpleNamespace(pooler_output=tuple(ROWS)),
        SimpleNamespace(pooler_output=None, last_hidden_state=ROWS),
        SimpleNamespace(last_hidden_state=ROWS),
        list(ROWS.view(2, 1, 3, 4)),
    ],
)
def test_rows_by_item(output: Any) -> None:
    rows = rows_by_item(parts_of(output), [1, 1])
    assert rows is not None
    assert [tuple(r.shape) for r in rows] == [(3, 4), (3, 4)]
    assert torch.equal(torch.stack(rows), ROWS)


def test_a_single_item_owns_all_rows() -> None:
    for output in (ROWS, list(ROWS), ROWS.view(6, 4), ROWS.view(1, 6, 4)):
        rows = rows_by_item(parts_of(output), [1])
        assert rows is not None
        assert len(rows) == 1
        assert torch.equal(rows[0], ROWS.view(6, 4))


def test_rows_that_cannot_be_told_apart() -> None:
    assert rows_by_item(parts_of(ROWS.view(6, 4)), [1, 1]) is None
    assert rows_by_item(list(ROWS), [1, 1, 1]) is None


def test_tiles_go_to_their_items() -> None:
    tiles = torch.arange(60.0).view(5, 3, 4)
    rows = rows_by_item(parts_of(tiles), [2, 1, 2])
    assert rows is not None and [len(each) for each in rows] == [6, 3, 6]
    assert torch.equal(torch.cat(rows), tiles.view(15, 4))


class FlatEncoder:
    """Gives all rows in one flat tensor, so that a batch must be taken apart."""

    def get_image_features(self, pixel_values: Tensor, scale: Tensor) -> Tensor:
        return (pixel_values * scale[:, None, None]).flatten(0, 1)


def test_a_flat_batch_is_encoded_item_by_item() -> None:
    scale = torch.tensor([1.0, 10.0])
    items = [{"pixel_values": ROWS[i], "scale": scale[i]} for i in range(2)]

    def embed(**kwargs: Tensor) -> list[Tensor]:
        return encode_batch(FlatEncoder(), kwargs, torch.float64, torch.device("cpu"))

    rows = encode_items(embed, items)
    assert [r.dtype for r in rows] == [torch.float64] * 2
    torch.testing.assert_close(torch.stack(rows), (ROWS * scale[:, None, None]).double())


@pytest.mark.parametrize("is_joined", [True, False])
def test_rows_for_further_layers_lie_beside_the_first(is_joined: bool) -> None:
    """Of all items as one, as transformers 5.17 gives them, or item by item."""
    layers = [ROWS + 100, ROWS + 200]
    further = [layer.flatten(0, 1) if is_joined else list(layer) for layer in layers]
    output = SimpleNamespace(pooler_output=list(ROWS), deepstack_features=further)
    model = SimpleNamespace(get_image_features=lambda **_: output)
    rows = encode_batch(model, {"pixel_values": ROWS}, torch.float32, torch.device("cpu"))
    assert torch.equal(torch.stack(rows), torch.cat([ROWS, *layers], -1))


def test_images_by_another_name() -> None:
    model = SimpleNamespace(get_image_features=lambda pixel_values_images: pixel_values_images)
    given = {"pixel_values_images": ROWS}
    rows = encode_batch(model, given, torch.float32, torch.device("cpu"))
    assert torch.equal(torch.stack(rows), ROWS)


def test_a_model_without_an_encoder() -> None:
    with pytest.raises(EngineError, match="get_audio_features"):
        encode_batch(FlatEncoder(), {"input_features": ROWS}, torch.float32, torch.device("cpu"))
    with pytest.raises(EngineError, match="no media"):
        encode_batch(FlatEncoder(), {"image_sizes": ROWS}, torch.float32, torch.device("cpu"))


def test_items_of_equal_shape_share_a_call() -> None:
    calls = []

    def embed(**kwargs: Tensor) -> list[Tensor]:
        calls.append(tuple(kwargs["pixel_values"].shape))
        return [pixels.flatten(0, 1) for pixels in kwargs["pixel_values"]]

    shapes = [(2, 3, 4), (5, 3, 4), (2, 3, 4)]
    items = [{"pixel_values": torch.full(shape, float(i))} for i, shape in enumerate(shapes)]
    rows = encode_items(embed, items)
    assert sorted(calls) == [(1, 5, 3, 4), (2, 2, 3, 4)]
    assert [float(r[0, 0]) for r in rows] == [0.0, 1.0, 2.0]
    assert encode_items(embed, []) == []


def test_llava_rows_do_not_depend_on_the_batch() -> None:
    model = TransformersModel(tiny_llava())
    assert isinstance(model, SupportsMultiModal)
    pixels = tiny_pixels(3)
    given = torch.randn(5, 48)
    items = [{"pixel_values": p} for p in pixels] + [{"image_embeds": given}]
    together = model.encode("image", items)
    assert [tuple(r.shape) for r in together] == [(NUM_IMAGE_TOKENS, 48)] * 3 + [(5, 48)]
    assert {r.dtype for r in together} == {torch.float64}
    for item, rows in zip(items, together, strict=True):
        torch.testing.assert_close(model.encode("image", [item])[0], rows, atol=1e-12, rtol=0)
    assert torch.equal(together[3], given.double())


def test_embeddings_by_mask() -> None:
    model = TransformersModel(tiny_llava())
    ids = torch.tensor([1, 10**6, 5, IMAGE, 10**6])
    mask = torch.tensor([False, True, False, False, True])
    rows = [torch.full((1, 48), 7.0), torch.full((1, 48), 8.0)]
    embeds = model.embed_input_ids(ids, rows, mask)
    table = model.model.get_input_embeddings().weight
    assert embeds.dtype == torch.float64
    # A placeholder id outside the mask is an ordinary token.
    for position, expected in ((0, table[1]), (2, table[5]), (3, table[IMAGE])):
        assert torch.equal(embeds[position], expected)
    assert (embeds[1] == 7).all()
    assert (embeds[4] == 8).all()
    assert torch.equal(model.embed_input_ids(ids[:1]), table[1:2])


class Guided(TransformersModel):
    """A wrapper that speaks the older names of the model guide."""

    def get_multimodal_embeddings(self, **kwargs: Tensor) -> Tensor | None:
        pixels = kwargs.get("pixel_values")
        return (
            None
            if pixels is None
            else torch.stack(self.model.get_image_features(pixels).pooler_output)
        )

    def get_input_embeddings(
        self, input_ids: Tensor, multimodal_embeddings: NestedTensors | None = None
    ) -> Tensor:
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        if multimodal_embeddings is not None:
            embeds = merge_multimodal_embeddings(
                input_ids=input_ids,
                inputs_embeds=embeds,
                multimodal_embeddings=multimodal_embeddings,
                placeholder_token_id=IMAGE,
            )
        return embeds


def test_the_older_names_are_accepted() -> None:
    guided, plain = Guided(tiny_llava()), TransformersModel(tiny_llava())
    items = [{"pixel_values": p.double()} for p in tiny_pixels(2)]
    ids = torch.tensor([1, 5, *[IMAGE] * NUM_IMAGE_TOKENS, 6])
    expected, actual = plain.encode("image", items), guided.encode("image", items)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(
        guided.embed_input_ids(ids, actual[:1], ids == IMAGE),
        plain.embed_input_ids(ids, expected[:1], ids == IMAGE),
    )
    assert guided.embed_multimodal() == []


def test_an_encoder_without_rows_is_at_fault() -> None:
    items = [{"pixel_values": torch.zeros(1)}] * 2
    with pytest.raises(EngineError, match="each of 2 items"):
        encode_items(lambda **_: [], items)


@pytest.mark.parametrize("rows", [[torch.ones(2, 3)], torch.ones(3, 2, 3)])
def test_rows_that_fit_no_items_are_asked_for_one_by_one(rows: Any) -> None:
    calls = []

    def embed(**kwargs: Tensor) -> Any:
        calls.append(len(kwargs["pixel_values"]))
        return rows

    found = encode_items(embed, [{"pixel_values": torch.zeros(1)}] * 2)
    assert calls == [2, 1, 1]
    assert [len(each) for each in found] == [
        len(torch.as_tensor(parts_of(rows)[0])) * len(rows)
    ] * 2


def test_merging_by_placeholder_id() -> None:
    ids = torch.tensor([5, 9, 9, 6, 9, 8])
    rows = torch.arange(1.0, 13.0).view(2, 2, 3)
    merged = merge_multimodal_embeddings(ids, torch.zeros(6, 3), rows, [9, 8])
    assert merged[0].sum() == merged[3].sum() == 0
    assert torch.equal(merged[[1, 2, 4, 5]], rows.view(4, 3))
    nested = [rows[0], [rows[1, :1], rows[1, 1:]]]
    assert torch.equal(merge_multimodal_embeddings(ids, torch.zeros(6, 3), nested, [9, 8]), merged)
    one = merge_multimodal_embeddings(ids, torch.zeros(6, 3), rows[:1, :1], 8)
    assert torch.equal(one[5], rows[0, 0])


def test_counts_and_widths_must_fit() -> None:
    ids = torch.tensor([5, 9, 9])
    with pytest.raises(ValueError, match="1 encoder rows for 2 placeholders"):
        merge_multimodal_embeddings(ids, torch.zeros(3, 4), torch.ones(1, 4), 9)
    with pytest.raises(ValueError, match="0 encoder rows for 2 placeholders"):
        merge_multimodal_embeddings(ids, torch.zeros(3, 4), [], 9)
    with pytest.raises(ValueError, match="3 wide, embeddings 4"):
        merge_multimodal_embeddings(ids, torch.zeros(3, 4), torch.ones(2, 3), 9)
    with pytest.raises(ValueError, match="is_multimodal"):
        merge_multimodal_embeddings(None, torch.zeros(3, 4), torch.ones(2, 4))
