"""Items by modality, and embeddings that are checked before anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aioengine.errors import MediaError
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.items import (
    ImageHeader,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from aioengine.types import Embeddings

WIDTH = 6


def embeddings(*items: Embeddings) -> EmbeddingItems:
    return EmbeddingItems(items, modality="image", hidden_size=WIDTH)


def test_images_and_headers() -> None:
    header = ImageHeader(ImageSize(7, 5), "RGB", "PNG")
    image = Image.new("RGB", (3, 4))
    items = ImageProcessorItems([header, image, np.zeros((2, 9, 3))])
    assert [items.get_image_size(index) for index in range(3)] == [(7, 5), (3, 4), (9, 2)]
    assert items.get(1) is image
    with pytest.raises(ValueError, match="not decoded"):
        items.get(0)
    assert ImageProcessorItems([image]).get_processor_data() == {"images": [image]}


def test_by_modality() -> None:
    images = ImageProcessorItems([Image.new("RGB", (3, 4))] * 2)
    data = MultiModalDataItems({"image": images, "video": ImageProcessorItems([])})
    assert data.get_all_counts() == {"image": 2}
    assert data.get_count("video") == 0
    assert data.get_items("image", ImageProcessorItems) is images
    with pytest.raises(TypeError, match="ImageProcessorItems"):
        data.get_items("image", EmbeddingItems)


def test_embeddings() -> None:
    rows = torch.randn(3, WIDTH)
    items = embeddings(
        Embeddings(rows, grid=[1, 2, 3]),
        Embeddings(rows.numpy().astype(np.float16), grid=[4, 5, 6]),
    )
    assert [items.get_feature_size(index) for index in range(2)] == [3, 3]
    first, second = items.to_kwargs_items()
    assert torch.equal(first["image_embeds"], rows)
    assert second["image_embeds"].dtype == torch.float32
    assert first["grid"].tolist() == [1, 2, 3] and first.keep_on_cpu("grid")
    rows.zero_()
    assert first["image_embeds"].any()
    bfloat = embeddings(Embeddings(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
    assert bfloat.get(0).dtype == torch.float32


def sparse() -> torch.Tensor:
    # Out-of-range indices, unchecked: making it dense would write outside its memory.
    indices, values = torch.tensor([[10**6], [0]]), torch.tensor([1.0])
    return torch.sparse_coo_tensor(indices, values, (2, WIDTH), check_invariants=False)


@pytest.mark.parametrize(
    "rows",
    [
        None, "x", b"x", [[1.0] * WIDTH], object(), {"a": 1}, 3.0,
        torch.zeros(WIDTH), torch.zeros(1, 2, WIDTH), torch.zeros(2, WIDTH + 1),
        torch.zeros(0, WIDTH), torch.zeros(2, WIDTH, dtype=torch.int64),
        torch.zeros(2, WIDTH, dtype=torch.bool), torch.zeros(2, WIDTH, dtype=torch.complex64),
        torch.full((2, WIDTH), torch.nan), torch.full((2, WIDTH), -torch.inf),
        torch.zeros(2, WIDTH, device="meta"), torch.zeros(2, WIDTH).to_sparse(),
        np.zeros((2, WIDTH), object), np.zeros((2, WIDTH), "U1"), np.full((2, WIDTH), np.nan),
        np.zeros((2, WIDTH), np.int32),
    ],
    ids=lambda rows: type(rows).__name__,
)  # fmt: skip
def test_wrong_embeddings(rows: Any) -> None:
    with pytest.raises(MediaError) as caught:
        embeddings(Embeddings(torch.zeros(1, WIDTH)), Embeddings(rows))
    assert caught.value.parameter == "images[1]"
    assert "0x" not in str(caught.value)


def test_a_hostile_sparse_tensor_is_never_made_dense() -> None:
    with pytest.raises(MediaError, match="dense"):
        embeddings(Embeddings(sparse()))


@pytest.mark.parametrize("extra", [object(), "x", [[1], [2, 3]], {"a": 1}, [None], [float("nan")]])
def test_wrong_extras(extra: Any) -> None:
    with pytest.raises(MediaError) as caught:
        embeddings(Embeddings(torch.zeros(1, WIDTH), grid=extra))
    assert caught.value.parameter == "images[0].grid"
