"""Memory of a prompt's media: each token sees the rows of the pieces that it is shown."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.models.encdec.media_memory import lay_out_memory

masks = st.integers(1, 6).flatmap(
    lambda num_pieces: st.lists(
        st.lists(st.booleans(), min_size=num_pieces, max_size=num_pieces), min_size=1, max_size=9
    )
)


@given(masks, st.integers(1, 7), st.sampled_from([1, 4, 16]), st.booleans(), st.integers(0, 8))
def test_each_token_sees_what_it_is_shown(
    mask: list[list[bool]], piece_rows: int, block_size: int, blind_see_all: bool, start: int
) -> None:
    shown = torch.tensor(mask)
    memory = lay_out_memory(shown, piece_rows, block_size, blind_see_all=blind_see_all)
    end = len(mask) + 3  # tokens behind the prompt see what its last one does
    start = min(start, end - 1)
    runs = memory.seen_at(start, end)
    assert sum(run.num_tokens for run in runs) == end - start
    seen = [run for run in runs for _ in range(run.num_tokens)]
    for position, run in zip(range(start, end), seen, strict=True):
        row = mask[min(position, len(mask) - 1)]
        assert run.first % block_size == 0
        assert run.is_sighted == any(row)
        sees_all = blind_see_all and not any(row)
        rows = memory.index[run.first : run.first + run.num_rows].tolist()
        assert sorted(rows) == [
            piece * piece_rows + i
            for piece, is_shown in enumerate(row)
            if is_shown or sees_all
            for i in range(piece_rows)
        ]


def test_tiles_of_one_image_are_there_once() -> None:
    """Those before it see all of them, those behind it as many as there are."""
    memory = lay_out_memory(
        torch.tensor([[False] * 4, [True, True, False, False]]), 5, 4, blind_see_all=True
    )
    assert memory.index.tolist() == [*range(20)]
    assert [(run.first, run.num_rows) for _, run in memory.runs] == [(0, 20), (0, 10)]


def test_images_that_are_seen_together_are_there_once() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1]]) != 0
    memory = lay_out_memory(mask, 3, 4, blind_see_all=False)
    assert [(end, run.first, run.num_rows) for end, run in memory.runs] == [
        (1, 0, 3), (3, 0, 6), (4, 8, 3),
    ]  # fmt: skip
    assert memory.index.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 6, 7, 8]
