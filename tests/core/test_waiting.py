"""Lines of requests by seniority, and how little of a long one a step looks at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aioengine.core.plan import Limits, MediaPlan, StepPlan
from aioengine.core.request import Item, Request
from aioengine.core.scheduler import Scheduler
from aioengine.core.waiting import WaitingRequests, insert, remove, take_turns
from aioengine.types import Span
from tests.support.lines import num_lines
from tests.support.world import IMAGES, Image, make_request

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=40,
    block_size=4,
    num_blocks=4000,
    num_cross_groups=1,
    max_encoder_len=8,
    encoder_cache_bytes=6,
    max_num_encoder_input_tokens=8,
    max_media_rows=24,
)


def image(number: int) -> Image:
    return Image(f"p{number}", 3, ((0, 3),), 3)


def with_image(number: int) -> Request:
    return make_request(f"r{number}", [image(number), 1])


def with_text_before_it(number: int) -> Request:
    text = [number % 8, number // 8 % 8, number // 64 % 8, 0]
    return make_request(f"r{number}", [*text, image(number), 1])


def with_encoder_input(number: int) -> Request:
    return make_request(f"r{number}", [1], encoder=Item(f"e{number}", "audio", Span(0, 5), 3))


def with_text(number: int) -> Request:
    return make_request(f"r{number}", [1, number % 8])


def like_the_first(number: int) -> Request:
    return make_request(f"r{number}", [image(0), *[1] * 12])


def take_step(scheduler: Scheduler, *, has_media: bool = False) -> int:
    """The lines of a step and of the choice of media, which get ready before it: `has_media`."""
    if has_media:
        for key in list(scheduler.media._decoded):
            scheduler.media.media_ready(key)
    media: list[MediaPlan] = []
    steps: list[StepPlan | None] = []
    lines = num_lines(lambda: media.append(scheduler.schedule_media()))
    for key in () if media[0].encode is None else media[0].encode.keys:
        scheduler.media.encoded(key)
    lines += num_lines(lambda: steps.append(scheduler.schedule()))
    if steps[0] is not None:
        scheduler.commit(steps[0], [7] * sum(s.samples for s in steps[0].sequences))
    return lines


def finish(scheduler: Scheduler) -> None:
    """Until all have ended."""
    for _ in range(2000):
        if not scheduler.num_running + scheduler.num_waiting:
            return
        take_step(scheduler, has_media=True)
    raise AssertionError("they do not end")


@pytest.mark.parametrize("num_streams", [0, 4])
@pytest.mark.parametrize(
    "make",
    [with_image, with_text_before_it, with_encoder_input, with_text, like_the_first],
)
def test_a_step_does_not_look_at_all_that_wait(
    make: Callable[[int], Request], num_streams: int
) -> None:
    """Beside streams that hold all slots, and beside none."""
    most = []
    for count in (50, 500):
        scheduler = Scheduler(LIMITS)
        scheduler.submit(like_the_first(-1))
        finish(scheduler)
        scheduler.media.cache.clear()
        for number in range(num_streams):
            scheduler.submit(make_request(f"s{number}", [1], max_tokens=39, eos=False))
        take_step(scheduler)
        for number in range(count):
            scheduler.submit(make(number))
        most.append(max(take_step(scheduler) for _ in range(12)))
        assert scheduler.num_running + scheduler.num_waiting >= count - 40
    assert most[1] <= 1.2 * most[0] + 50


def test_completions_that_follow_are_not_looked_at() -> None:
    most = []
    for count in (50, 500):
        scheduler, leader = Scheduler(LIMITS), with_image(0)
        scheduler.submit(leader)
        for number in range(1, count):
            scheduler.submit(make_request(f"c{number}", [image(0), 1], leader=leader))
        most.append(max(take_step(scheduler) for _ in range(4)))
        assert (scheduler.num_running, scheduler.num_waiting) == (0, count)
        finish(scheduler)
    assert most[0] == most[1]


def test_no_more_texts_are_computed_ahead_than_media_are_asked_for() -> None:
    """Each would hold a block, until its turn comes or the block is taken back."""
    scheduler = Scheduler(LIMITS)
    for number in range(100):
        scheduler.submit(with_text_before_it(number))
    for _ in range(20):
        take_step(scheduler)
    num_asked = LIMITS.max_media_rows // 3
    assert scheduler.num_running == num_asked + 1
    scheduler.submit(with_text(100))
    take_step(scheduler)
    assert scheduler.num_running == num_asked + 2  # text passes them
    finish(scheduler)


def test_lines() -> None:
    requests = [make_request(f"r{n}", [0], priority=n % 3) for n in range(9)]
    line: list[Request] = []
    for number, request in enumerate(reversed(requests)):
        request.arrival = number
        insert(line, request)
    assert [r.order for r in line] == sorted(r.order for r in requests)
    odd, even = line[1::2], line[::2]
    assert list(take_turns(odd[:], even[:])) == line
    walk = take_turns(odd, even)
    assert [next(walk), next(walk)] == line[:2]
    odd.clear()
    assert list(walk) == line[2::2]
    for request in requests:
        remove(line, request)
    assert not line


def test_text_and_media_wait_apart() -> None:
    waiting = WaitingRequests()
    text, media = make_request("text", [0]), make_request("media", [IMAGES[0]])
    for request in (text, media):
        waiting.add(request)
    assert (waiting.text, waiting.media) == ([text], [media])
    waiting.remove(text)
    waiting.remove(media)
    assert not waiting.text and not waiting.media
