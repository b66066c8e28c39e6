"""Builds runs of several processes: rollout workers and trainer ranks on this machine, or all parts on a Ray cluster.

Each process gets a function that builds its part of the run. The controller calls the processes through clients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyturn.build.parts import Parts, build_parts, rollout_pool
from polyturn.build.ranks import holds_weights, model_of, rank_of, row_width
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import RunConfig
from polyturn.config.schema import dotted
from polyturn.config.sources import leaves
from polyturn.core.errors import ConfigError, one_line
from polyturn.engines.following import FollowingPool
from polyturn.engines.options import ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.infra.live import LiveObject
from polyturn.infra.loop import LoopMonitor
from polyturn.rollout.pool import RolloutPool

if TYPE_CHECKING:
    from polyturn.cluster.journal import WorkerJournal
    from polyturn.cluster.members import Member
    from polyturn.cluster.rank_processes import RankProcesses
    from polyturn.cluster.worker_pool import RemoteWorker
    from polyturn.core.protocols import Engine
    from polyturn.training.rank_group import RankWorker


def check_cluster(config: RunConfig) -> None:
    """Refuse settings that do not work on a cluster, in addition to `check_ranks` and `check_workers`.

    Raises:
        ConfigError: a setting is for one machine only, or servers would not share whole GPUs with the ranks.
    """
    engine, cluster, ranks = config.engine, config.cluster, config.train.distributed.ranks
    of_rank, of_server = (resources.get("GPU", 0) for resources in (cluster.rank_resources, cluster.engines.resources))
    if engine.update == "sleep" and (of_rank != 1 or of_server < 1 or cluster.engines.count * of_server != ranks):
        raise ConfigError(
            f"engine.update is sleep, which puts a rank and a part of a server on each GPU, but there are {ranks} ranks of "
            f"{of_rank:g} GPUs and {cluster.engines.count} servers of {of_server:g}; set cluster.rank_resources to GPU: 1, "
            f"and cluster.engines so that count times GPU is {ranks}"
        )
    if not isinstance(engine, ServerOptions):
        return
    if engine.launch is not None and engine.launch.devices:
        raise ConfigError(
            f"engine.launch.devices is {engine.launch.devices}, and on a cluster Ray assigns GPUs to servers; remove it and "
            "set the number of GPUs in cluster.engines.resources, for example {GPU: 2}"
        )
    if engine.launch is not None and engine.launch.replicas > 1:
        raise ConfigError(
            f"engine.launch.replicas is {engine.launch.replicas}, which counts the servers of one machine; on a cluster set "
            f"cluster.engines.count to {engine.launch.replicas}"
        )
    if engine.weights == "ipc":
        raise ConfigError(
            "engine.weights is ipc, which needs trainer and server on one GPU; on a cluster leave it at auto, or use gloo, "
            "or an engine.weights_folder that all nodes see"
        )


def check_workers(config: RunConfig) -> None:
    """Refuse settings that rollout workers do not support.

    Raises:
        ConfigError: the run has further policies, the number of episodes follows the engine's load, or the servers take too
            few requests.
    """
    num_workers = config.cluster.workers.count
    if config.cluster.address is None and num_workers == 1:
        return
    if isinstance(config.engine, ServerOptions) and config.engine.max_in_flight < num_workers:
        raise ConfigError(
            f"engine.max_in_flight is {config.engine.max_in_flight} and cluster.workers.count is {num_workers}, and each "
            "worker needs a share of at least one request at a server; raise engine.max_in_flight, or set fewer workers"
        )
    if config.policies:
        raise ConfigError(
            f"policies names {', '.join(map(repr, config.policies))} and the run has rollout workers (cluster.address, or "
            "cluster.workers.count above 1), each of which would load them again; serve them separately and give their "
            "addresses (base_url, url), or let the trainer's process run the episodes"
        )
    if config.rollout.min_concurrent is not None:
        raise ConfigError(
            f"rollout.min_concurrent is {config.rollout.min_concurrent}, and the run has rollout workers (cluster.address, "
            "or cluster.workers.count above 1), which do not see the engine's load; remove min_concurrent, or let the "
            "trainer's process run the episodes"
        )


def with_workers(parts: Parts) -> Parts:
    """Add `cluster.workers.count` processes on this machine that run the episodes; with a count of 1, change nothing."""
    config = parts.source.config
    if config.cluster.address is not None or config.cluster.workers.count == 1:
        return parts
    check_workers(config)
    from polyturn.cluster.worker_pool import travelling
    from polyturn.cluster.worker_process import ProcessWorker

    check_travels(parts.source.config)
    # Workers send requests to servers directly, and to another engine through this process and its gate.
    servers = parts.engine if isinstance(config.engine, ServerOptions) and isinstance(parts.engine, EnginePool) else None
    follows = 0 if servers is None else len(servers.replicas)
    build = travelling(functools.partial(_worker, _without_cluster(parts.source), follows=follows))
    engine = parts.context.engine if servers is None else None
    names = [f"rollout worker {number}" for number in range(config.cluster.workers.count)]
    return _with_pool(parts, [ProcessWorker(name, build, engine) for name in names], engines=servers)


def pool_of(parts: Parts) -> RolloutPool:
    """Return the pool that runs the episodes of a run without training: the workers, or this process."""
    return parts.pool or rollout_pool(parts.source, parts.context)


def _with_pool(parts: Parts, workers: Sequence[RemoteWorker], *, engines: EnginePool | None = None) -> Parts:
    from polyturn.cluster.worker_pool import WorkerPool

    rollout = parts.source.config.rollout
    limit, share = rollout.max_concurrent, rollout.max_failed_share
    pool = WorkerPool(workers, parts.context, max_concurrent=limit, max_failed_share=share, engines=engines)
    return dataclasses.replace(parts, pool=pool)


def _without_cluster(source: ConfigSource) -> ConfigSource:
    """Return the configuration from which another process builds its part, as if the run used one machine.

    Each worker gets a share of `rollout.max_concurrent` episodes, and of a server's concurrent requests, which all workers
    together do not exceed. The share of a worker that dies stays unused until the run is resumed.
    """
    config, num_workers = source.config, source.config.cluster.workers.count
    episodes = {"max_concurrent": math.ceil(config.rollout.max_concurrent / num_workers)}
    alone: dict[str, Any] = {"cluster": type(config.cluster)(), "rollout": config.rollout.model_copy(update=episodes)}
    if isinstance(engine := config.engine, ServerOptions):
        alone["engine"] = dataclasses.replace(engine, max_in_flight=engine.max_in_flight // num_workers)
    return dataclasses.replace(source, config=config.model_copy(update=alone))


def start_ranks(source: ConfigSource) -> RankProcesses:
    """Start a process on this machine for each trainer rank; the first command waits until they are built."""
    from polyturn.cluster.rank_processes import RankProcesses

    own = _for_ranks(source)
    check_travels(own.config)
    num_ranks = source.config.train.distributed.ranks
    return RankProcesses(functools.partial(_rank, own), num_ranks, row_width=row_width(source.config))


def _for_ranks(source: ConfigSource) -> ConfigSource:
    """Return the part of a configuration that ranks read, without objects that only episodes use."""
    config = source.config
    unused = ("data", "env", "policies", "rollout", "reward", "evaluation", "dump", "store", "tracking")
    fields = type(config).model_fields
    update = {name: fields[name].get_default(call_default_factory=True) for name in unused}
    return dataclasses.replace(source, config=config.model_copy(update=update))


def check_travels(config: RunConfig) -> None:
    """Refuse a configuration with an object of the program that cannot be pickled for other processes."""
    from polyturn.cluster.worker_pool import travelling

    for path, value in leaves(config.model_dump(), ()):
        if not isinstance(value, LiveObject):
            continue
        try:
            travelling(value.target)
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as problem:
            raise ConfigError(
                f"{dotted(path)} is {value!r}, which cannot be sent to the run's other processes ({one_line(problem)}); "
                "give its class, so that each process makes an object, or remove ray=, ranks= and cluster.workers"
            ) from problem


def cluster_parts(source: ConfigSource) -> Parts:
    """Place engines, workers and ranks on the cluster that the configuration names, and return the controller's parts."""
    config = source.config
    cluster = config.cluster
    assert cluster.address is not None
    try:
        from polyturn.cluster.members import ResourceRequest
        from polyturn.cluster.placement import Cluster
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"cluster.address needs Ray, which is not installed ({problem}); pip install 'polyturn[ray]'"
        ) from problem
    check_travels(source.config)
    here = _without_cluster(source)
    engines, workers = ResourceRequest(**dict(cluster.engines)), ResourceRequest(**dict(cluster.workers))
    ranks = ResourceRequest(count=config.train.distributed.ranks, resources=cluster.rank_resources)
    cpus = sum(need.count * need.resources.get("CPU", 0) for need in (engines, workers, ranks))
    ray = Cluster(cluster.address, patience_s=cluster.patience_s, cpus=cpus)
    reading = dataclasses.replace(source, reads_parts=not holds_weights(source))
    rank_members: list[Member] = []
    try:
        if config.engine.kind == "embedded":
            actors_as = ray.engines(engines, functools.partial(_engine, here))
            parts = build_parts(reading, engine=actors_as(EnginePool))
            build_worker = functools.partial(_worker_of_actors, here, actors_as)
        else:
            if config.engine.update == "sleep":
                rank_members, servers = ray.shared(ranks, engines)
            else:
                servers = ray.places(None if isinstance(config.engine, ServerOptions) and config.engine.urls else engines)
            parts = build_parts(reading, places=servers)
            build_worker = functools.partial(_worker, here, follows=_num_servers(parts))
        pool = parts.engine
        assert isinstance(pool, EnginePool)
        members = ray.workers(workers, build_worker)
        rank_members = rank_members or ray.ranks(ranks)
        rank_group = ray.rank_group(rank_members, functools.partial(_rank, here), row_width=row_width(config))
    except BaseException:
        ray.close()  # otherwise the placed actors keep their resources
        raise
    return _with_pool(dataclasses.replace(parts, rank_group=rank_group), members, engines=pool)


def _engine(source: ConfigSource) -> Engine:
    """Build an engine replica, in its actor."""
    return build_parts(source).engine


def _num_servers(parts: Parts) -> int:
    """Return the number of servers of a run on a cluster."""
    pool, kind = parts.engine, parts.source.config.engine.kind
    if not isinstance(pool, EnginePool) or not all(isinstance(replica.engine, RemoteEngine) for replica in pool.replicas):
        raise ConfigError(
            f"engine.kind {kind!r} makes a {type(pool).__name__}; on a cluster it must make a pool of servers "
            "(polyturn.engines.served.build_servers), as vllm and sglang do, or be embedded"
        )
    return len(pool.replicas)


def _worker_of_actors(
    source: ConfigSource, actors_as: Callable[[type[EnginePool]], EnginePool], journal: WorkerJournal
) -> RolloutPool:
    """Build the pool of a rollout worker that uses embedded engines in actors; called in the worker's actor."""
    return _worker(source, journal, actors_as(FollowingPool))


def _worker(source: ConfigSource, journal: WorkerJournal, engine: Engine | None = None, *, follows: int = 0) -> RolloutPool:
    """Build the pool of a rollout worker, in its process; without `engine`, it calls the controller's servers directly."""
    parts = build_parts(source, engine=engine, has_weights=False, follows=follows)
    # Requests to the controller's engine wait at the controller's gate; others at a gate of this process.
    engine = parts.context.engine if isinstance(parts.engine, FollowingPool) else parts.engine
    # `owns_process`, because an actor's event loop does not run in the main thread, and the process has no other work.
    config = source.config
    monitor = LoopMonitor(limit_s=config.rollout.watchdog_s, deadline_s=config.deadline_s, owns_process=True)
    # The controller counts failures, because it sees all trajectories.
    context = dataclasses.replace(parts.context, engine=engine, journal=journal, monitor=monitor)
    return RolloutPool(context, max_concurrent=config.rollout.max_concurrent, max_failed_share=1.0)


def _rank(source: ConfigSource) -> RankWorker:
    """Build a trainer rank; called in its process or actor."""
    from polyturn.training import process_group

    make_model, media = model_of(source)
    return rank_of(source, make_model, media, process_group.join())
