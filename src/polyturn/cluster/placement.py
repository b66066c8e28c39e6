"""The placement of a run's actors: placement groups, one for each kind, and the actors in them.

    ranks              PACK      as close together as possible, because they exchange gradients; a server that shares their
                                 GPUs is in their bundle
    engines, servers   SPREAD    they do not communicate with each other
    workers            SPREAD    over the CPUs of all nodes

If the cluster has no room after `patience_s`, an error lists the requested and the existing resources.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group

from polyturn.cluster.actor_engine import pool_of_actors
from polyturn.cluster.actors import EngineActor, RankActor, RolloutActor
from polyturn.cluster.clients import RayRankGroup, RayWorker
from polyturn.cluster.journal import WorkerJournal
from polyturn.cluster.members import AT_ONCE, Member, ResourceRequest, own_words, start_in
from polyturn.cluster.servers import NodePlaces
from polyturn.cluster.weights import ModelFiles
from polyturn.core.errors import ConfigError, EngineLostError, RankLostError, one_line
from polyturn.core.protocols import Engine
from polyturn.engines.base import ModelFolder
from polyturn.engines.pool import EnginePool
from polyturn.rollout.pool import RolloutPool
from polyturn.training.rank_group import RankWorker

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_QUIET_S = 5.0
"""Seconds to wait for room before logging a warning."""


def _check_answers(address: str) -> None:
    """Check that a server answers at an address with a port, because Ray itself retries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as problem:
            raise ConnectionError(one_line(problem)) from problem


class Cluster:
    """A connection to Ray, and the actors that this run placed there."""

    def __init__(self, address: str, *, patience_s: float = 300.0, cpus: float = 0) -> None:
        """Connect.

        Args:
            address: "auto", the address of a cluster, or "local" for a new cluster on this machine.
            patience_s: Seconds to wait for room.
            cpus: Number of CPUs that the run requests; a "local" cluster offers at least this many, even with fewer cores.

        Raises:
            ConfigError: there is no cluster at `address`, or its version differs.
        """
        self._patience_s = patience_s
        self._groups: list[Any] = []
        try:
            _check_answers(address)
            ray.init(
                address=address,
                num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)) if address == "local" else None,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.WARNING,
                ignore_reinit_error=True,
            )
        except (ConnectionError, RayError, ValueError, RuntimeError) as problem:
            if str(problem).startswith("Version mismatch"):
                raise ConfigError(
                    f"the Ray cluster at {address!r} is of another version ({' '.join(str(problem).split())}); install the "
                    "same Ray and Python on every node, this one included"
                ) from problem
            raise ConfigError(
                f"no Ray cluster answers at {address!r} ({str(problem).splitlines()[0]}); start one with `ray start "
                "--head`, or use --ray local (in Python: ray='local')"
            ) from problem

    def engines(self, need: ResourceRequest, build: Callable[[], Engine]) -> Callable[[type[EnginePool]], EnginePool]:
        """Place engine replicas; return a function that makes a pool of them, in this or in another process."""
        replicas = self._place("engine replica", EngineActor, need, build, strategy="SPREAD")
        return partial(pool_of_actors, replicas, ray.get(replicas[0].handle.capabilities.remote()))

    def places(self, need: ResourceRequest | None) -> Callable[[ModelFolder], NodePlaces]:
        """Reserve room for inference servers; return a function that makes their places once the model's folder exists.

        `need` is None if the servers are already running; then nothing is reserved.
        """
        need = need or ResourceRequest(count=0, resources={})
        return self._places(self._room("inference server", need, strategy="SPREAD") if need.count else None, need)

    def shared(
        self, ranks: ResourceRequest, servers: ResourceRequest
    ) -> tuple[list[Member], Callable[[ModelFolder], NodePlaces]]:
        """Place trainer ranks, and reserve room for servers on their GPUs.

        A server and the ranks whose GPUs it shares are in one bundle, and so on one node.

        Returns:
            The ranks, and a function that makes the servers' places once the model's folder exists.
        """
        each = ranks.count // servers.count
        beside = {kind: amount for kind, amount in servers.resources.items() if kind != "GPU"}
        both = {kind: each * ranks.resources.get(kind, 0) + beside.get(kind, 0) for kind in {**ranks.resources, **beside}}
        group = self._room(
            f"{each} trainer ranks and their server", ResourceRequest(count=servers.count, resources=both), strategy="PACK"
        )
        rank_actors = _members(
            "trainer rank", [start_in(RankActor, group, i // each, ranks.resources) for i in range(ranks.count)]
        )
        devices = tuple(
            ",".join(gpu for rank in rank_actors[i : i + each] for gpu in rank.home.gpus)
            for i in range(0, ranks.count, each)
        )
        return rank_actors, self._places(group, servers, devices)

    def _places(
        self, group: Any, need: ResourceRequest, devices: tuple[str, ...] = ()
    ) -> Callable[[ModelFolder], NodePlaces]:
        places = partial(NodePlaces, group=group, count=need.count, resources=need.resources, devices=devices)
        return lambda folder: places(files=ModelFiles.of(folder), patience_s=self._patience_s)

    def workers(self, need: ResourceRequest, build: Callable[[WorkerJournal], RolloutPool]) -> list[RayWorker]:
        """Place rollout workers."""
        return [RayWorker(one) for one in self._place("rollout worker", RolloutActor, need, build, strategy="SPREAD")]

    def ranks(self, need: ResourceRequest) -> list[Member]:
        """Place trainer ranks; `rank_group` lets them build their parts."""
        return self._place("trainer rank", RankActor, need, strategy="PACK")

    def rank_group(self, ranks: Sequence[Member], build: Callable[[], RankWorker], *, row_width: int) -> RayRankGroup:
        """Join trainer ranks to one process group, let each build its part, and return them as a group."""
        address = ranks[0].home.address
        port = ray.get(ranks[0].handle.free_port.remote())
        joined = [r.handle.join.remote(number, len(ranks), address, port, build) for number, r in enumerate(ranks)]
        waiting = list(joined)
        while waiting:
            (done, *_), waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(done)
            except RayActorError as problem:
                raise RankLostError(ranks[joined.index(done)].crash_report()) from problem
            except RayTaskError as problem:
                raise own_words(problem) from None
        return RayRankGroup(ranks, row_width=row_width, on_close=self.close)

    def close(self) -> None:
        """Remove the placement groups and disconnect."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        ray.shutdown()

    def _room(self, name: str, need: ResourceRequest, *, strategy: str) -> Any:
        group = placement_group([dict(need.resources)] * need.count, strategy=strategy)
        self._groups.append(group)
        ready = group.ready()
        if not ray.wait([ready], timeout=min(_QUIET_S, self._patience_s))[0]:
            logger.warning(
                "waiting for room for %d actors as %s with %s each, up to %g s (cluster.patience_s); free are %s of %s",
                *(need.count, name, dict(need.resources), self._patience_s),
                *(_numbers(ray.available_resources()), _numbers(ray.cluster_resources())),
            )
        try:
            ray.get(ready, timeout=self._patience_s)
        except GetTimeoutError as problem:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            raise ConfigError(
                f"the cluster has no room for {need.count} actors as {name} with {dict(need.resources)} each after "
                f"{self._patience_s:g} s; it has {_numbers(ray.cluster_resources())}, of which free "
                f"{_numbers(ray.available_resources())}. "
                + (beyond_one_node(name, need, nodes) or "Lower cluster.*, or add nodes")
            ) from problem
        return group

    def _place(self, name: str, actor: type, need: ResourceRequest, *arguments: Any, strategy: str) -> list[Member]:
        group = self._room(name, need, strategy=strategy)
        at_once = 1 if actor is RankActor else AT_ONCE
        members = [start_in(actor, group, i, need.resources, *arguments, at_once=at_once) for i in range(need.count)]
        return _members(name, members)


def beyond_one_node(name: str, need: ResourceRequest, nodes: Sequence[Mapping[str, float]]) -> str:
    """Explain why no node is large enough for one such actor; return "" if some node is.

    Args:
        name: The kind of the actors, for the message.
        need: The requested resources.
        nodes: For each node, its total resources.
    """
    if any(all(node.get(kind, 0) >= amount for kind, amount in need.resources.items()) for node in nodes):
        return ""
    most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in need.resources}
    return (
        f"Each {name} is on one node, also a server of several GPUs, and no node has all of that: the most that one has "
        f"is {most}. Ask for less, and raise the count instead, or add larger nodes"
    )


def _members(name: str, handles: Sequence[Any]) -> list[Member]:
    try:
        members = [Member(f"{name} {number}", handle) for number, handle in enumerate(handles)]
    except RayActorError as problem:
        raise EngineLostError(f"a {name} could not be built: {problem}") from problem
    for member in members:
        logger.info("%s: process %d on %s", member.name, member.home.pid, member.home.address)
    return members


def _numbers(resources: Mapping[str, float]) -> dict[str, float]:
    return {
        name: value for name, value in resources.items() if name in ("CPU", "GPU") or not name.startswith(("node", "obj"))
    }
