"""build_metadata and select_backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aioengine.kernels.attention import list_backends, register_backend, select_backend
from aioengine.kernels.cpu import library
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.metadata import build_metadata
from aioengine.kernels.reference import ReferenceBackend


def test_a_mixed_step() -> None:
    meta = build_metadata(
        block_size=4,
        block_tables=[[7, 3], [5, 1, 2, 9], [8, 6]],
        starts=[6, 12, 2],
        ends=[7, 13, 7],
    )
    assert meta.query_start.tolist() == [0, 1, 2, 7]
    assert meta.query_start.dtype == meta.seq_lens.dtype == meta.block_table.dtype == torch.int32
    assert meta.seq_lens.tolist() == [7, 13, 7]
    assert meta.block_table.tolist() == [[7, 3, 0, 0], [5, 1, 2, 9], [8, 6, 0, 0]]
    assert meta.slot_blocks.tolist() == [3, 9, 8, 8, 6, 6, 6]
    assert meta.slot_offsets.tolist() == [2, 0, 2, 3, 0, 1, 2]
    assert meta.slot_blocks.dtype == meta.slot_offsets.dtype == torch.int32
    assert meta.query_lens == (1, 1, 5)
    assert meta.context_lens == (7, 13, 7)
    assert meta.num_decodes == 2
    assert meta.num_tokens == 7


def test_a_table_without_padding() -> None:
    meta = build_metadata(
        block_size=4, block_tables=[[7, 3], [5, 1, 2], [8]], starts=[6, 8, 0], ends=[7, 9, 3],
        is_captured=True, is_open=True,
    )  # fmt: skip
    assert meta.block_table.tolist() == [7, 3, 5, 1, 2, 8]
    assert meta.table_starts is not None and meta.table_starts.tolist() == [0, 2, 5]


def test_blocks_beyond_the_step_are_left_out() -> None:
    meta = build_metadata(block_size=4, block_tables=[[3, 2, 1]], starts=[0], ends=[4])
    assert meta.block_table.tolist() == [[3]]


def test_a_token_that_is_stored_is_written_behind_itself() -> None:
    meta = build_metadata(
        block_size=4,
        block_tables=[[3, 2, 1], [5, 6]],
        starts=[7, 4],
        ends=[8, 5],
        stored=[True, False],
    )
    assert meta.slot_blocks.tolist() == [1, 6] and meta.slot_offsets.tolist() == [0, 0]
    assert meta.block_table.tolist() == [[3, 2], [5, 6]] and meta.seq_lens.tolist() == [8, 5]


def test_chunks_are_sequences_of_their_own() -> None:
    meta = build_metadata(
        block_size=4,
        block_tables=[[7, 3, 5], [1, 2, 9, 6], [8, 4]],
        starts=[8, 6, 2],
        ends=[9, 16, 7],
        chunk=8,
    )
    assert meta.query_lens == (1, 2, 8, 5) and meta.context_lens == (1, 8, 8, 7)
    assert meta.block_table.tolist() == [[5, 0], [1, 2], [9, 6], [8, 4]]
    assert meta.slot_blocks.tolist() == [5, 2, 2, *[9] * 4, *[6] * 4, 8, 8, 4, 4, 4]
    assert meta.slot_offsets.tolist() == [0, 2, 3, *[0, 1, 2, 3] * 2, 2, 3, 0, 1, 2]
    assert meta.num_decodes == 1


def test_a_chunk_that_ends_with_a_stored_token() -> None:
    meta = build_metadata(
        block_size=4, block_tables=[[7, 3, 5]], starts=[7], ends=[8], stored=[True], chunk=4
    )
    assert meta.block_table.tolist() == [[3]] and meta.context_lens == (4,)
    assert meta.slot_blocks.tolist() == [5] and meta.slot_offsets.tolist() == [0]


def test_an_empty_step() -> None:
    meta = build_metadata(block_size=4, block_tables=[], starts=[], ends=[])
    assert meta.query_start.tolist() == [0]
    assert meta.slot_blocks.shape == (0,)
    assert meta.num_decodes == meta.num_tokens == 0


def test_decodes_are_counted_from_the_front() -> None:
    meta = build_metadata(
        block_size=4, block_tables=[[0], [1], [2]], starts=[0, 0, 0], ends=[1, 2, 1]
    )
    assert meta.num_decodes == 1


def test_backends_are_chosen_by_name() -> None:
    assert isinstance(select_backend("gather"), GatherBackend)
    assert isinstance(select_backend("reference", "cpu"), ReferenceBackend)
    assert select_backend() is not select_backend()
    assert list_backends() == ("cpu", "gather", "reference", "triton")


def test_without_a_compiler_pytorch_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    library.is_available.cache_clear()
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "nothing.so")
    try:
        assert isinstance(select_backend(), GatherBackend)
        assert isinstance(select_backend(), GatherBackend)
        assert len(caplog.messages) == 1 and "plain PyTorch" in caplog.messages[0]
        with pytest.raises(RuntimeError, match="not built"):
            select_backend("cpu")
        (tmp_path / "nothing.so").write_bytes(b"not a library")
        library.is_available.cache_clear()
        assert isinstance(select_backend(), GatherBackend)
        assert "cannot be loaded" in caplog.messages[-1]
    finally:
        library.is_available.cache_clear()


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="cpu, gather, reference, triton, not 'quick'"):
        select_backend("quick")


def test_a_backend_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.kernels.attention._FACTORIES", {})
    register_backend("mine", ReferenceBackend)
    assert isinstance(select_backend("mine"), ReferenceBackend)
