"""The request router of a deployment of engines: caches first, as far as queues allow."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aioengine.ray_serve.affinity import Affinity, Placements, ranked
from aioengine.ray_serve.calls import Route

__all__ = ["AffinityRouter"]

MAX_KEYS = 1 << 16
"""Digests that a router remembers: some 20 MB."""


class AffinityRouter(RequestRouter):
    """Reads the argument `route` of a call, a `Route`; a call without one goes by queues."""

    def initialize_state(self, *, max_keys: int = MAX_KEYS, **kwargs: Any) -> None:
        """Serve calls this once, with the deployment's `request_router_kwargs`."""
        self._placements = Placements(max_keys)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All candidates, best first, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where all are full
        route = _route(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = [name for name in replicas if name not in route.tried] or list(replicas)
        # Serve asks a replica whose queue is not known before it sends anything there.
        lengths = (self.replica_queue_len_cache.get(replicas[name].replica_id) for name in names)
        queues = {name: length or 0 for name, length in zip(names, lengths, strict=True)}
        order = ranked(route.affinity, queues, self._placements.gains(route.affinity))
        return [[replicas[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Serve calls this once a replica has taken the request."""
        route = _route(pending_request)
        live = frozenset(replica.unique_id for replica in self.curr_replicas)
        self._placements.record(route.affinity, replica_id.unique_id, live)
        route.tried.append(replica_id.unique_id)


def _route(pending_request: PendingRequest) -> Route:
    """A call's route; one that leads nowhere gets a home of its own."""
    given = pending_request.kwargs.get("route")
    route = given if isinstance(given, Route) else Route()
    if route.affinity.home:
        return route
    return Route(Affinity(pending_request.metadata.internal_request_id.encode()), route.tried)
