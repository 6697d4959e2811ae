"""The laws of the core, over random interleavings of submit, readiness, step, cancel and fault."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioengine.core.plan import Limits
from tests.support.world import CLIPS, IMAGES, Image, World, chain, expected_output, make_request

BLOCK_SIZE = 4


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    num_groups = draw(st.integers(1, 2))
    num_cross_groups = draw(st.sampled_from([0, 0, 1, 2]))
    max_num_seqs = draw(st.integers(1, 4))
    num_states = draw(st.integers(1, 5)) + max_num_seqs if draw(st.booleans()) else 0
    return Limits(
        max_num_seqs=max_num_seqs,
        num_states=num_states,
        state_interval=draw(st.integers(1, 3)) * BLOCK_SIZE,
        max_num_batched_tokens=draw(st.sampled_from([5, 6, 9, 16, 64])),
        max_model_len=6 * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_blocks=draw(st.integers(6, 14)) * num_groups
        + draw(st.integers(2, 4)) * num_cross_groups,
        num_groups=num_groups,
        num_cross_groups=num_cross_groups,
        max_encoder_len=2 * BLOCK_SIZE,
        encoder_cache_bytes=draw(st.sampled_from([3, 6, 8])),
        max_num_encoder_input_tokens=draw(st.sampled_from([3, 8])),
        max_encode_items=draw(st.sampled_from([1, 3])),
        max_media_rows=draw(st.sampled_from([3, 6, 100])),
        disable_chunked_mm_input=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
    )


# Few different parts, so that prompts share prefixes and images.
DEPTHS = (0, 0, 1, 1, 3, 6)
"""Steps that are planned before the oldest has committed."""
depths = st.sampled_from(DEPTHS)
part = st.one_of(st.integers(0, 1), st.sampled_from(IMAGES))
prompt = st.lists(part, min_size=1, max_size=6).filter(
    lambda parts: sum(getattr(p, "length", 1) for p in parts) <= 6 * BLOCK_SIZE
)
submission = st.tuples(
    prompt,
    st.integers(0, 8),  # tokens, 0 of what ends with its prompt
    st.integers(0, 1),
    st.sampled_from([None, "s"]),
    st.sampled_from([1, 1, 1, 3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([*CLIPS, None]),  # some models read without, too
)
operation = st.one_of(
    st.tuples(st.just("submit"), submission),
    st.tuples(
        st.sampled_from(
            [
                "plan",
                "plan",
                "plan",
                "media",
                "media",
                "commit",
                "commit",
                "pixels",
                "pixels",
                "pixels_fail",
                "encoded",
                "encoded",
                "encode_fails",
                "cancel",
                "clear",
            ]
        ),
        st.integers(0, 7),
    ),
)


def perform(world: World, depth: int, name: str, argument: object, count: int) -> None:
    """One operation, where it is possible now; `depth` is the run-ahead."""
    if name == "submit":
        parts, max_tokens, priority, salt, copies, awaits, scores, clip = argument  # type: ignore[misc]
        if world.limits.num_cross_groups:  # images are the encoder's, not the prompt's
            parts = [0 if isinstance(part, Image) else part for part in parts]
        if max_tokens and sum(getattr(part, "length", 1) for part in parts) == 6 * BLOCK_SIZE:
            parts = parts[:-1]  # there has to be room for a token
        leader = None
        for copy in range(copies):
            request = make_request(
                f"r{count}#{copy}",
                parts,
                max_tokens=max_tokens,
                priority=priority,
                cache_salt=salt,
                awaits_tokens=awaits,
                pooling=None if max_tokens else "all",
                leader=leader,
                reads_prefix=leader is not None or not scores,
                private_salt=None if world.limits.enable_prefix_caching else b"%d" % count,
                encoder=clip if world.limits.num_cross_groups else None,
            )
            leader = leader or request
            world.submit(request)
        return
    pick = argument
    assert isinstance(pick, int)
    if name == "plan" and len(world.steps) <= depth:
        world.plan()
    elif name == "media":
        world.plan_media()
    elif name == "commit" and world.steps:
        world.commit()
    elif name in ("pixels", "pixels_fail") and world.decoding:
        getattr(world, name)(world.decoding[pick % len(world.decoding)])
    elif name == "encoded" and world.encodes:
        world.encoded()
    elif name == "encode_fails" and world.encodes and pick == 0:
        world.encode_fails()
    elif name == "cancel" and world.live:
        world.end(world.live[pick % len(world.live)], "cancelled")
    elif name == "clear":
        world.scheduler.pool.clear()
        world.scheduler.states.clear()
        if not world.encodes:
            world.rows -= set(world.scheduler.media.cache.clear())
    world.forget_unneeded()


def drain(world: World, depth: int) -> None:
    """Let everything outstanding happen until every request has ended."""
    for _ in range(3000):
        if not world.live and not world.steps and not world.encodes:
            return
        moved = len(world.steps) <= depth and world.plan() is not None
        world.plan_media()
        assert moved or world.steps or world.encodes or world.decoding or not world.live, "stalled"
        assert not (world.scheduler.is_stalled and not world.steps)
        if world.decoding:
            world.pixels(world.decoding[0])
        if world.encodes:
            world.encoded()
        if world.steps and (len(world.steps) > depth or not moved):
            world.commit()
        world.forget_unneeded()
    raise AssertionError("not every request ended")


def check_end(world: World) -> None:
    """Every request ended once and right, and everything is back where it was."""
    assert set(world.endings) == set(world.requests)
    for name, ending in world.endings.items():
        expected, reason = expected_output(world.requests[name])
        if ending in ("failed", "cancelled"):
            assert world.outputs[name] == expected[: len(world.outputs[name])]
        else:
            assert (world.outputs[name], ending) == (expected, reason)
        request = world.requests[name]
        if request.pooling is not None and ending == reason:
            wanted, found = chain(request, [*request.prompt_token_ids]), world.pooled[name]
            assert found == wanted[-len(found) :] and (request.reads_prefix or found == wanted)
        num_rows = request.num_answer_rows
        assert not num_rows or len(world.outputs[name]) <= num_rows
    scheduler = world.scheduler
    assert scheduler.pool.num_free == scheduler.pool.count
    assert world.limits.enable_prefix_caching or scheduler.pool.num_cached == 0
    assert scheduler.states.num_free == scheduler.states.count
    assert world.limits.enable_prefix_caching or scheduler.states.num_cached == 0
    assert scheduler.media.cache.num_referenced == 0
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
    assert not scheduler.media._users and not scheduler.media._decoded


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(all_limits(), depths, st.lists(operation, max_size=60))
def test_every_interleaving_ends_well(
    limits: Limits, depth: int, operations: list[tuple[str, object]]
) -> None:
    world = World(limits)
    for count, (name, argument) in enumerate(operations):
        perform(world, depth, name, argument, count)
    drain(world, depth)
    check_end(world)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    all_limits(),
    depths,
    st.lists(submission, min_size=2, max_size=12),
    st.integers(0, 2**32),
)
def test_a_crowd_ends_well(limits: Limits, depth: int, crowd: list, seed: int) -> None:
    """Many requests at once, scarce everything, media that become ready in random order."""
    world = World(limits)
    for count, submitted in enumerate(crowd):
        perform(world, depth, "submit", submitted, count)
    random = Random(seed)
    names = ["plan", "plan", "media", "commit", "commit", "pixels", "encoded", "encoded"]
    for _ in range(120):
        perform(world, depth, random.choice(names), random.randrange(8), 0)
    drain(world, depth)
    check_end(world)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", range(4))
def test_many_crowds(shard: int) -> None:
    """The same with plain random numbers: hundreds of worlds a second, none of them minimal."""
    for seed in range(shard * 500, shard * 500 + 500):
        random = Random(seed)
        world, depth, count = World(random_limits(random)), random.choice(DEPTHS), 0
        for _ in range(random.randint(2, 12) + random.randint(0, 150)):
            if count < 2 or random.random() < 0.15:
                perform(world, depth, "submit", random_submission(random), count)
                count += 1
            else:
                perform(world, depth, random.choice(COMMON + RARE), random.randrange(8), 0)
        drain(world, depth)
        check_end(world)


COMMON = ["plan", "plan", "media", "commit", "commit", "pixels", "encoded", "encoded"] * 6
RARE = ["pixels_fail", "encode_fails", "cancel", "clear"]


def random_limits(random: Random) -> Limits:
    num_groups = random.randint(1, 2)
    num_cross_groups = random.choice([0, 0, 1, 2])
    max_num_seqs = random.randint(1, 4)
    return Limits(
        max_num_seqs=max_num_seqs,
        num_states=max_num_seqs + random.randint(1, 5) if random.random() < 0.5 else 0,
        state_interval=random.randint(1, 3) * BLOCK_SIZE,
        max_num_batched_tokens=random.choice([5, 6, 9, 16, 64]),
        max_model_len=6 * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_blocks=random.randint(6, 14) * num_groups + random.randint(2, 4) * num_cross_groups,
        num_groups=num_groups,
        num_cross_groups=num_cross_groups,
        max_encoder_len=2 * BLOCK_SIZE,
        encoder_cache_bytes=random.choice([3, 6, 8]),
        max_num_encoder_input_tokens=random.choice([3, 8]),
        max_encode_items=random.choice([1, 3]),
        max_media_rows=random.choice([3, 6, 100]),
        disable_chunked_mm_input=random.random() < 0.5,
        enable_prefix_caching=random.random() < 0.5,
    )


def random_submission(random: Random) -> object:
    while True:
        parts = [
            random.choice(IMAGES) if random.random() < 0.5 else random.randint(0, 1)
            for _ in range(random.randint(1, 6))
        ]
        if sum(getattr(p, "length", 1) for p in parts) < 6 * BLOCK_SIZE:
            return (
                parts,
                random.randint(1, 8),
                random.randint(0, 1),
                random.choice([None, "s"]),
                random.choice([1, 1, 1, 3]),
                random.random() < 0.3,
                random.random() < 0.3,
                random.choice(CLIPS),
            )
