"""The scheduler's decisions, one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aioengine.core.plan import Limits
from aioengine.errors import InvalidRequestError, MediaError, PromptTooLongError
from tests.support.world import IMAGES, Image, World, expected_output, make_request

A, B, C, D, E = IMAGES[:5]
LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=40,
    block_size=4,
    num_blocks=10,
    encoder_cache_bytes=6,
    max_num_encoder_input_tokens=8,
    enable_prefix_caching=False,
)


def world(**changes: object) -> World:
    return World(replace(LIMITS, **changes))  # type: ignore[arg-type]


def names(plan: object) -> list[str]:
    assert plan is not None
    return [sequence.request_id for sequence in plan.sequences]  # type: ignore[attr-defined]


def encode_all(world: World) -> None:
    """Pixels and rows for everything that is asked for."""
    for _ in range(10):
        world.plan_media()
        for key in list(world.decoding):
            world.pixels(key)
        while world.encodes:
            world.encoded()


# ---- nobody starves


def test_text_passes_a_image_without_pixels() -> None:
    w = world()
    w.submit(make_request("image", [A, 1]))
    w.submit(make_request("text", [1, 1]))
    w.plan_media()
    assert names(w.plan()) == ["text"]


def test_the_text_before_a_image_is_computed_while_it_decodes() -> None:
    w = world()
    w.submit(make_request("r", [1, 0, 1, 0, A, 1]))
    w.plan_media()
    plan = w.plan()
    assert plan is not None
    assert (plan.sequences[0].start, plan.sequences[0].end, plan.sequences[0].samples) == (
        0,
        4,
        False,
    )


def test_text_of_less_than_a_block_waits_with_its_image() -> None:
    """A step of a few tokens reads all weights, and fills no block that others could use."""
    w = world()
    w.submit(make_request("r", [1, 0, 1, A, 1, 1, B, 1]))
    w.plan_media()
    w.pixels("a")
    w.plan_media()
    assert w.plan() is None
    w.encoded()
    first = w.plan()
    assert first is not None
    # Rows of the first image give their room to the second: the text behind them goes along.
    assert (first.sequences[0].start, first.sequences[0].end) == (0, 8)
    w.commit()
    assert w.plan() is None
    encode_all(w)
    last = w.plan()
    assert last is not None
    assert (last.sequences[0].start, last.sequences[0].end) == (8, 14)


@pytest.mark.parametrize(("max_media_rows", "first"), [(100, ["late", "text"]), (6, ["text"])])
def test_more_missing_images_than_are_asked_for_are_passed_by_text_alone(
    max_media_rows: int, first: list[str]
) -> None:
    """A step looks at so much of a long queue, and not at all of it."""
    w = world(max_media_rows=max_media_rows)
    for image in (A, B, C):
        w.submit(make_request(image.key, [image, 1]))
    w.submit(make_request("late", [1] * 4 + [D]))
    w.submit(make_request("text", [1, 1]))
    w.plan_media()
    assert names(w.plan()) == first


def test_a_parked_request_holds_no_slot() -> None:
    w = world(max_num_seqs=1)
    w.submit(make_request("image", [1] * 4 + [A]))
    w.submit(make_request("text", [1, 1], max_tokens=2))
    w.plan_media()
    assert names(w.plan()) == ["image"]  # its text
    w.commit()
    assert names(w.plan()) == ["text"]
    w.commit()


def test_blocks_of_a_request_that_waits_for_pixels_are_taken_first() -> None:
    w = world(num_blocks=10, max_num_batched_tokens=64)
    w.submit(make_request("image", [1] * 24 + [A]))
    w.plan_media()
    w.plan()
    w.commit()
    w.submit(make_request("text", [0] * 30, max_tokens=1))
    assert names(w.plan()) == ["text"]
    assert w.scheduler.counters["preemptions"] == 1
    # It does not come back before its pixels do: it would only be in the way again.
    w.commit()
    assert w.plan() is None
    w.pixels("a")
    assert names(w.plan()) == ["image"]


def test_text_waits_for_blocks_in_line_not_behind_pixels() -> None:
    """A shortage of blocks holds up those behind; else many small ones would starve a large one."""
    w = world(max_num_batched_tokens=64)
    w.submit(make_request("running", [1] * 20, max_tokens=8, eos=False))
    w.plan()
    w.commit()
    w.submit(make_request("large", [0] * 28, max_tokens=8))
    w.submit(make_request("small", [1], max_tokens=8))
    for _ in range(3):
        assert names(w.plan()) == ["running"]
        w.commit()


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    w = world(max_num_batched_tokens=6, num_blocks=20)
    for name in ("one", "two"):
        w.submit(make_request(name, [1, 0], max_tokens=20, eos=False))
    w.plan()
    w.commit()
    w.submit(make_request("long", [0] * 30, max_tokens=1))
    for _ in range(5):
        plan = w.plan()
        assert {"one", "two"} <= set(names(plan))
        w.commit()


def test_a_range_kept_whole_gets_its_step_in_spite_of_decoding() -> None:
    w = world(max_num_batched_tokens=5, disable_chunked_mm_input=True, num_blocks=20)
    for i in range(2):
        w.submit(make_request(f"stream{i}", [1, 0], max_tokens=12, eos=False))
    w.plan()
    w.commit()
    w.submit(make_request("image", [B], max_tokens=1))
    encode_all(w)
    for _ in range(3):
        w.plan()
        w.commit()
        if "image" in w.endings:
            return
    raise AssertionError("the picture never got a step of its own")


def test_a_smaller_priority_goes_first() -> None:
    w = world(max_num_seqs=1)
    w.submit(make_request("late", [1], priority=1))
    w.submit(make_request("soon", [1], priority=0))
    assert names(w.plan()) == ["soon"]


def turn(w: World) -> None:
    """A step, and all that media can do meanwhile."""
    w.plan()
    w.plan_media()
    for key in list(w.decoding):
        w.pixels(key)
    while w.encodes:
        w.encoded()
    if w.steps:
        w.commit()


def test_a_senior_image_is_not_passed_for_ever_by_juniors_with_images() -> None:
    """Each junior begins with a token of text, so it runs at once, and is encoded for first."""
    w = world(encoder_cache_bytes=3, num_blocks=200, max_model_len=24)

    def crowd() -> None:
        while sum(name != "senior" for name in w.live) < 8:
            image = Image(f"p{len(w.requests)}", 3, ((0, 3),), 3)
            w.submit(make_request(f"r{len(w.requests)}", [1, image, 0], eos=False))

    crowd()
    for _ in range(3):
        turn(w)
    w.submit(make_request("senior", [A, *[1] * 18], max_tokens=2, eos=False))
    for _ in range(100):
        crowd()
        turn(w)
        if "senior" in w.endings:
            return
    raise AssertionError("the senior starved")


@pytest.mark.parametrize("disable", [False, True])
def test_a_whole_range_is_not_starved_of_a_slot(disable: bool) -> None:
    """It does not fit behind a stream's token, and the other slot goes to a junior, in turn."""
    w = world(
        max_num_seqs=2,
        max_num_batched_tokens=6,
        max_model_len=24,
        num_blocks=48,
        encoder_cache_bytes=100,
        disable_chunked_mm_input=disable,
    )

    def text() -> None:
        w.submit(make_request(f"r{len(w.requests)}", [1], max_tokens=12, eos=False))

    text()
    for _ in range(6):
        turn(w)
    text()
    turn(w)
    six = Image("six", 6, ((0, 6),), 3, bidirectional=not disable)
    w.submit(make_request("image", [six], max_tokens=1, eos=False))
    for _ in range(100):
        while len(w.live) < 5:
            text()
        turn(w)
        if "image" in w.endings:
            return
    raise AssertionError("the picture starved")


# ---- the encoder cache


def test_encoding_ahead_is_bounded_by_room_and_goes_by_need() -> None:
    w = world(max_encode_items=4, max_num_encoder_input_tokens=100)
    w.submit(make_request("r", [1, A, B, C]))
    w.plan_media()
    for key in list(w.decoding):
        w.pixels(key)
    w.plan_media()
    assert w.encodes[0].keys == ("a", "b")


def test_two_items_that_fit_only_one_after_the_other() -> None:
    w = world(encoder_cache_bytes=3)
    w.submit(make_request("r", [A, B], max_tokens=1))
    for _ in range(4):
        encode_all(w)
        if w.plan():
            w.commit()
    assert "r" in w.endings
    assert w.scheduler.media.cache.num_evictions == 1


def test_rows_of_a_junior_without_blocks_make_room_for_a_senior() -> None:
    """Else each waits for what the other holds: the senior for room, the junior for a block."""
    w = world(
        max_num_seqs=2,
        max_num_batched_tokens=5,
        max_model_len=24,
        num_blocks=6,
        encoder_cache_bytes=3,
    )
    w.submit(make_request("late", [0], max_tokens=1, priority=1))
    w.submit(make_request("first", [0, 0], max_tokens=1))
    w.submit(make_request("senior", [0, B, 0, A, 0, B], max_tokens=1))
    w.submit(make_request("junior", [0, 0, 0, A, B, A], max_tokens=1))
    for _ in range(60):
        w.plan()
        w.plan_media()
        for key in w.decoding[:1]:
            w.pixels(key)
        while w.encodes:
            w.encoded()
        if w.steps:
            w.commit()
    assert not w.live


def test_a_chunk_of_separators_needs_no_rows() -> None:
    """C begins with a position that takes none."""
    w = world()
    w.submit(make_request("r", [1, 1, 1, C]))
    plan = w.plan()
    assert plan is not None
    assert plan.sequences[0].end == 4 and not plan.sequences[0].rows


def test_waiting_requests_hold_no_references() -> None:
    w = world(num_blocks=10, max_num_batched_tokens=64)
    w.submit(make_request("running", [1] * 36, max_tokens=4))
    w.plan()
    for i in range(5):
        w.submit(make_request(f"r{i}", [A, 1]))
    encode_all(w)
    assert w.scheduler.media.cache.num_referenced == 0
    assert w.scheduler.media.cache.is_ready("a")


def test_equal_images_are_asked_for_and_encoded_once() -> None:
    w = world()
    for i in range(3):
        w.submit(make_request(f"r{i}", [A, i % 2, A]))
    w.plan_media()
    assert w.decoding == ["a"]
    w.pixels("a")
    w.plan_media()
    assert [plan.keys for plan in w.encodes] == [("a",)]


def test_the_last_waiter_leaving_forgets_the_item() -> None:
    w = world()
    w.submit(make_request("one", [A]))
    w.submit(make_request("two", [A]))
    w.plan_media()
    w.end("one", "cancelled")
    assert w.scheduler.media.is_needed("a")
    w.end("two", "cancelled")
    assert not w.scheduler.media.is_needed("a")
    assert not w.scheduler.media.is_waiting_for_others


def test_media_are_asked_for_while_their_rows_fit() -> None:
    w = world(max_media_rows=6)
    w.submit(make_request("r", [A, B, C]))
    w.plan_media()
    assert w.decoding == ["a", "b"]


# ---- what can never be served


def test_refused_at_once() -> None:
    w = world(disable_chunked_mm_input=True, max_num_batched_tokens=4)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        w.submit(make_request("r", []))
    with pytest.raises(PromptTooLongError, match="max_model_len is 40"):
        w.submit(make_request("r", [1] * 40))
    with pytest.raises(PromptTooLongError, match="max_num_batched_tokens is 4"):
        w.submit(make_request("r", [B]))
    with pytest.raises(MediaError, match="encoder_cache_bytes is 6"):
        w.submit(make_request("r", [Image("big", 2, ((0, 2),), 7)]))
    assert w.scheduler.num_waiting == 0 and w.scheduler.schedule() is None


def test_a_prompt_that_just_fits_gets_one_token() -> None:
    w = world(max_num_batched_tokens=64)
    w.submit(make_request("r", [1] * 39, max_tokens=9, eos=False))
    w.plan()
    w.commit()
    assert w.endings == {"r": "length"} and len(w.outputs["r"]) == 1


# ---- run-ahead


def test_run_ahead_plans_over_a_token_in_flight() -> None:
    w = world()
    w.submit(make_request("r", [1, 0], max_tokens=3))
    first, second = w.plan(), w.plan()
    assert first is not None and second is not None
    assert second.sequences[0].token_ids == (-1,)
    assert w.scheduler.num_in_flight == 2


def test_run_ahead_stops_at_the_last_token() -> None:
    w = world()
    w.submit(make_request("r", [1, 0], max_tokens=1))
    w.plan()
    assert w.plan() is None


def test_blocks_are_let_go_when_the_last_step_that_uses_them_has_committed() -> None:
    w = world()
    w.submit(make_request("r", [1, 0], max_tokens=3))
    w.plan()
    w.plan()
    w.end("r", "cancelled")
    assert w.scheduler.pool.num_free < w.scheduler.pool.count
    w.commit()
    assert w.scheduler.pool.num_free < w.scheduler.pool.count
    w.commit()
    assert w.scheduler.pool.num_free == w.scheduler.pool.count


# ---- stalls


@pytest.mark.parametrize("num_groups", [1, 2])
def test_of_a_prompt_that_is_cached_to_its_end_one_token_is_computed(num_groups: int) -> None:
    w = world(enable_prefix_caching=True, num_groups=num_groups, num_blocks=20)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    w.submit(make_request("first", prompt, max_tokens=2, eos=False))
    while w.live:
        w.plan()
        w.commit()
    for name in ("second", "third"):
        w.submit(make_request(name, prompt, max_tokens=3, eos=False))
    plan = w.plan()
    assert plan is not None
    assert [(s.start, s.end, s.is_stored) for s in plan.sequences] == [(7, 8, True)] * 2
    for tables in zip(*(s.block_tables for s in plan.sequences), strict=True):
        assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    following = w.plan()  # over the token in flight
    assert following is not None
    assert [(s.start, s.end, s.is_stored) for s in following.sequences] == [(8, 9, False)] * 2
    while w.steps:
        w.commit()
        w.plan()
    for name in ("second", "third"):
        output, _ = expected_output(w.requests[name])
        assert w.outputs[name] == output
    assert w.requests["second"].num_cached_tokens == 7


def test_a_stall_is_told_from_waiting() -> None:
    w = world()
    assert not w.scheduler.is_stalled
    w.submit(make_request("r", [A]))
    w.plan_media()
    assert not w.scheduler.is_stalled  # somebody decodes
    w.scheduler.media._decoded["a"] = True  # and now nobody does, nor encodes
    assert w.scheduler.is_stalled


def test_the_encoder_waits_for_fewer_steps_the_more_requests_wait_for_it() -> None:
    w = world(encoder_cache_bytes=100, max_num_seqs=8, num_blocks=40, max_encode_items=1)

    def patience() -> int:
        w.plan_media()
        for key in list(w.decoding):
            w.pixels(key)
        w.plan_media()
        found = w.encodes[-1].patience
        w.encoded()
        return found

    w.submit(make_request("first", [A, 1], max_tokens=30, eos=False))
    assert patience() == 1  # nobody else is served meanwhile
    for name in ("1", "2", "3"):
        w.submit(make_request(name, [1, 1], max_tokens=30, eos=False))
    w.plan()
    w.submit(make_request("one image", [B, 1]))
    assert patience() == 3  # four run
    for name, image in (("x", C), ("y", D), ("z", E)):
        w.submit(make_request(name, [image, 1]))
    assert patience() == 2
