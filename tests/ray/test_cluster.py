"""Two replicas on this machine: right answers, warm caches, even queues, and losses made good."""

from __future__ import annotations

import asyncio
import base64
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray import serve

import aioengine
from aioengine import AsyncEngine, EngineConfig, EngineStatistics, errors
from tests.ray.cluster import Cluster, Heard, ask, hear, running_cluster
from tests.support.engines import encoded, greedy
from tests.support.tiny import tiny_image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
NUM_LONG_TOKENS = 160
NUM_CONVERSATIONS = 16
"""So many that no chance gives all of them one home."""


@pytest.fixture(scope="module")
def cluster(folder: Path, engine_config: EngineConfig) -> Iterator[Cluster]:
    """With room for eight requests in a step, so that others wait."""
    with running_cluster(folder, replace(engine_config, max_num_seqs=8)) as cluster:
        yield cluster


def image(seed: int, text: str = "What is this?") -> list[dict[str, object]]:
    """A message's content with an image that no other seed gives."""
    data = base64.b64encode(encoded(tiny_image(seed))).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    return [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]


async def expected(folder: Path, config: EngineConfig, contents: list, max_tokens: int) -> list:
    """What the engine says in this process, without Ray."""
    async with AsyncEngine.from_pretrained(folder, config=config) as engine:
        messages = ([{"role": "user", "content": content}] for content in contents)
        outputs = await asyncio.gather(
            *(engine.generate(each, greedy(max_tokens)) for each in messages)
        )
    return [output.text for output in outputs]


def gained(
    before: list[EngineStatistics], after: list[EngineStatistics], counter: str
) -> list[int]:
    """By how much a counter has grown, in each replica, the least first."""
    pairs = zip(before, after, strict=True)
    return sorted(getattr(new, counter) - getattr(old, counter) for old, new in pairs)


async def test_answers_are_the_engines(
    cluster: Cluster, folder: Path, engine_config: EngineConfig
) -> None:
    contents = ["hello", "How many colours are there?", image(0), image(1)]
    wanted = await expected(folder, engine_config, contents, 24)
    async with cluster.client() as client:
        whole = await asyncio.gather(*(ask(client, each, 24) for each in contents))
        streamed = await asyncio.gather(*(hear(client, each, 24) for each in contents))
    assert [heard.text for heard in whole] == wanted
    assert [heard.text for heard in streamed] == wanted
    assert all(heard.is_done and len(heard.texts) > 5 for heard in streamed)
    finished = [each.finished for each in await cluster.at_rest()]
    assert sum(finished) == 2 * len(contents)


async def test_handles_answer_and_raise_as_the_engine_does(cluster: Cluster) -> None:
    output = await cluster.engines.generate.remote("hello", greedy(6))
    streaming = cluster.engines.options(stream=True)
    deltas = [delta async for delta in streaming.stream.remote("hello", greedy(6))]
    assert "".join(delta.text for delta in deltas) == output.text
    assert len(output.token_ids) == 6
    with pytest.raises(errors.PlaceholderMismatchError) as caught:
        await cluster.engines.generate.remote("no placeholder", images=[tiny_image(0)])
    assert caught.value.parameter is not None
    async with cluster.client() as client:
        refused = await ask(client, "hello", -1)
    assert (refused.status, refused.error and refused.error["param"]) == (400, "max_tokens")


async def test_one_image_is_encoded_once_and_different_ones_are_spread(cluster: Cluster) -> None:
    before = await cluster.at_rest()
    async with cluster.client() as client:
        for number in range(6):
            await ask(client, image(100, f"Question {number}?"), 4)
    middle = await cluster.at_rest()
    assert gained(before, middle, "finished") == [0, 6]
    assert gained(before, middle, "encoder_items_run") == [0, 1]
    async with cluster.client() as client:
        for seed in range(20):
            await ask(client, image(200 + seed), 4)
    after = await cluster.at_rest()
    assert min(gained(middle, after, "encoder_items_run")) > 0


async def test_turns_of_conversations_find_their_prefixes(cluster: Cluster) -> None:
    before = await cluster.at_rest()
    system = {"role": "system", "content": "Answer in few words. " * 6}
    conversations = [
        [system, {"role": "user", "content": f"Name {number} birds!"}]
        for number in range(NUM_CONVERSATIONS)
    ]
    prompt_tokens = [0] * len(conversations)
    async with cluster.client() as client:
        for turn in range(3):
            for number, conversation in enumerate(conversations):
                heard = await ask(client, conversation, 16)
                if turn:
                    assert heard.cached_tokens > prompt_tokens[number] - 16, "all full blocks"
                answer = {"role": "assistant", "content": "A short answer."}
                conversation += [answer, {"role": "user", "content": "And what else?"}]
                prompt_tokens[number] = heard.prompt_tokens
    assert min(gained(before, await cluster.at_rest(), "finished")) > 0, "on both replicas"


async def test_a_long_queue_outweighs_a_warm_cache(cluster: Cluster) -> None:
    before = await cluster.at_rest()
    async with cluster.client() as client:
        await ask(client, image(300), 4)
        requests = []
        for _ in range(48):
            asked = ask(client, image(300), NUM_LONG_TOKENS)
            requests.append(asyncio.ensure_future(asked))
            await asyncio.sleep(0.01)  # so that a router has heard of the queues, which only grow
        all_heard = await asyncio.gather(*requests)
    assert len({heard.text for heard in all_heard}) == 1
    fewer, more = gained(before, await cluster.at_rest(), "finished")
    assert fewer + more == 49
    assert 5 < fewer < more


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_leaves_frees_the_replica(cluster: Cluster, is_streamed: bool) -> None:
    before = await cluster.at_rest()
    has_begun = asyncio.Semaphore(0)
    async with cluster.client() as client:
        if is_streamed:
            request = asyncio.ensure_future(hear(client, "hello", 900, has_begun))
            await has_begun.acquire()
        else:
            request = asyncio.ensure_future(ask(client, "hello", 900))
            await cluster.busy()
        request.cancel()
        await asyncio.wait([request])
    after = await cluster.at_rest()
    assert gained(before, after, "aborted") == [0, 1]
    assert gained(before, after, "finished") == [0, 0]


async def test_a_killed_replica_loses_nothing_that_had_not_begun(
    cluster: Cluster, folder: Path, engine_config: EngineConfig
) -> None:
    contents = [f"Tell me about number {number}." for number in range(36)]
    wanted = await expected(folder, engine_config, contents, NUM_LONG_TOKENS)
    await cluster.at_rest()
    has_begun = asyncio.Semaphore(0)
    async with cluster.client() as client, asyncio.TaskGroup() as group:
        calls = [
            hear(client, content, NUM_LONG_TOKENS, has_begun)
            if number % 4
            else ask(client, content, NUM_LONG_TOKENS)
            for number, content in enumerate(contents)
        ]
        requests = [group.create_task(call) for call in calls]
        for _ in range(9):  # one more than a replica runs at once, so both are at it
            await has_begun.acquire()
        assert not any(request.done() for request in requests)
        cluster.kill_one()
        all_heard = await asyncio.gather(*requests)
        outcomes = check_outcomes(all_heard, wanted)
        print(f"after a kill: {outcomes}")  # noqa: T201
        assert outcomes["lost midway"] > 0, "the replica that was killed was streaming"
        after = await cluster.at_rest()
        again = await asyncio.gather(*(ask(client, each, 24) for each in contents))
    for heard, text in zip(again, wanted, strict=True):
        assert heard.is_done and text.startswith(heard.text.rstrip("\ufffd"))
    assert len(after) == 2, "another one has taken its place"


def check_outcomes(all_heard: list[Heard], wanted: list[str]) -> dict[str, int]:
    """Each is right, or had begun to stream and says what happened; how many of each."""
    outcomes = {"whole": 0, "streamed": 0, "lost midway": 0}
    for number, (heard, text) in enumerate(zip(all_heard, wanted, strict=True)):
        assert heard.status == 200, heard.error
        if heard.error is None:
            assert heard.is_done
            assert heard.text == text
            outcomes["streamed" if number % 4 else "whole"] += 1
        else:
            assert number % 4, "what is not streamed is made again"
            assert heard.error["code"] == "engine_dead"
            assert heard.texts and not heard.is_done
            assert text.startswith(heard.text.rstrip("\ufffd"))
            outcomes["lost midway"] += 1
    return outcomes


async def test_a_replica_that_is_scaled_away_finishes_what_it_has(
    cluster: Cluster, folder: Path, engine_config: EngineConfig
) -> None:
    contents = [f"A long story about number {number}." for number in range(6)]
    wanted = await expected(folder, engine_config, contents, 600)
    await cluster.at_rest()
    has_begun = asyncio.Semaphore(0)
    async with cluster.client() as client, asyncio.TaskGroup() as group:
        requests = []
        for content in contents:  # in turn: a home is worth two places in a queue that is known
            requests.append(group.create_task(hear(client, content, 600, has_begun)))
            await has_begun.acquire()
        assert all(each.running for each in await cluster.statistics())
        await cluster.scale(1)
        await cluster.stopping()
        assert not any(request.done() for request in requests)
        late = await ask(client, "hello", 4)
        all_heard = await asyncio.gather(*requests)
    assert late.status == 200
    assert [heard.text for heard in all_heard] == wanted
    assert all(heard.is_done for heard in all_heard)
    await cluster.at_rest(num_replicas=1)


async def test_the_example(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the application before it, with the tiny model in place of the demo model."""
    monkeypatch.setattr(aioengine, "ASSETS", folder.parent)
    (folder.parent / "demo_llava").symlink_to(folder)
    example = runpy.run_path(str(EXAMPLE))
    await asyncio.to_thread(serve.run, example["app"])
    async with cluster.client() as client:
        heard = await hear(client, image(0), 8)
    assert heard.is_done and heard.text
    assert len(await cluster.statistics()) == 2
