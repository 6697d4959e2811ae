"""What Serve's router is told: whom to ask first, and whom not again."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from aioengine.ray_serve.affinity import MEDIA_WEIGHT, REQUEST_COST, Affinity
from aioengine.ray_serve.calls import Route
from aioengine.ray_serve.router import AffinityRouter

ENGINES = DeploymentID(name="engines", app_name="default")
NAMES = ("amber", "birch", "cedar")
REPLICAS = [SimpleNamespace(replica_id=ReplicaID(name, ENGINES)) for name in NAMES]


@pytest.fixture
def router() -> AffinityRouter:
    """That knows all replicas, and that they are idle."""
    router = AffinityRouter(
        ENGINES, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(max_keys=100)
    router.curr_replicas.update({each.replica_id: each for each in REPLICAS})
    return router


async def pending(number: int = 0, **kwargs: Any) -> PendingRequest:
    """A call with these keyword arguments; it makes a future."""
    metadata = RequestMetadata(request_id="", internal_request_id=f"call {number}")
    return PendingRequest(args=[], kwargs=kwargs, metadata=metadata)


async def order(router: AffinityRouter, request: PendingRequest) -> list[str]:
    """The replicas' names, best first."""
    ranks = await router.choose_replicas(REPLICAS, request)
    assert all(len(rank) == 1 for rank in ranks)
    assert request.routing_context.should_backoff, "no spinning where all are full"
    return [replica.replica_id.unique_id for (replica,) in ranks]


def routed(router: AffinityRouter, request: PendingRequest, name: str) -> None:
    """The replica has taken the request."""
    router.on_send_request(ReplicaID(name, ENGINES))
    router.on_request_routed(request, ReplicaID(name, ENGINES), None)


async def test_a_replica_that_has_had_the_like_is_asked_first(router: AffinityRouter) -> None:
    route = Route(Affinity(b"home", {b"picture": MEDIA_WEIGHT}))
    at_home = await order(router, await pending(route=route))
    assert sorted(at_home) == sorted(NAMES), "all of them, should the first refuse"
    elsewhere = at_home[-1]
    routed(router, await pending(route=route), elsewhere)
    like = Route(Affinity(b"another home", {b"picture": MEDIA_WEIGHT}))
    assert (await order(router, await pending(route=like)))[0] == elsewhere
    for _ in range(MEDIA_WEIGHT // REQUEST_COST + 1):
        router.on_send_request(ReplicaID(elsewhere, ENGINES))
    assert (await order(router, await pending(route=like)))[-1] == elsewhere


async def test_a_request_is_not_made_again_where_it_was(router: AffinityRouter) -> None:
    """Unless it was everywhere."""
    route = Route(Affinity(b"home", {b"key": 10_000}))
    tried = []
    for number in range(3):
        request = await pending(route=route)
        left = await order(router, request)
        assert sorted([*left, *tried]) == sorted(NAMES)
        routed(router, request, left[0])
        tried.append(left[0])
        assert route.tried == tried and len(tried) == number + 1
    assert sorted(await order(router, await pending(route=route))) == sorted(NAMES)


@pytest.mark.parametrize("kwargs", [{}, {"route": None}, {"route": Route()}], ids=str)
async def test_calls_that_lead_nowhere_are_spread(
    router: AffinityRouter, kwargs: dict[str, Any]
) -> None:
    firsts = Counter([(await order(router, await pending(n, **kwargs)))[0] for n in range(300)])
    assert min(firsts[name] for name in NAMES) > 60
    request = await pending(**kwargs)
    routed(router, request, "birch")
    assert kwargs.get("route") is None or kwargs["route"].tried == ["birch"]


async def test_a_replica_that_says_nothing_is_taken_for_idle(router: AffinityRouter) -> None:
    """Serve asks it before it sends anything there."""
    route = Route(Affinity(b"home"))
    busy = await order(router, await pending(route=route))
    for name in busy[:2]:
        for _ in range(5):
            router.on_send_request(ReplicaID(name, ENGINES))
    assert (await order(router, await pending(route=route)))[0] == busy[2]


async def test_no_replica_is_no_answer(router: AffinityRouter) -> None:
    request = await pending(route=Route(Affinity(b"home")))
    assert await router.choose_replicas([], request) == []
    assert await router.choose_replicas(REPLICAS) == [REPLICAS]


async def test_replicas_that_are_gone_are_forgotten(router: AffinityRouter) -> None:
    route = Route(Affinity(b"home", {b"key": 10_000}))
    first = await order(router, await pending(route=route))
    gone = first[-1]
    routed(router, await pending(route=Route(route.affinity)), gone)
    router.on_replica_actor_died(ReplicaID(gone, ENGINES))
    others = [each for each in REPLICAS if each.replica_id.unique_id != gone]
    request = await pending(route=Route(route.affinity))
    ranks = await router.choose_replicas(others, request)
    assert [replica.replica_id.unique_id for (replica,) in ranks] == first[:-1]
