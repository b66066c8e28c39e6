"""A run on a Ray cluster: what each of its actors is built from, and the leader's parts around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyturn.build.config_source import ConfigSource
from polyturn.build.parts import Parts, build_parts
from polyturn.build.ranks import check_ranks, model_of, rank_of
from polyturn.core.errors import ConfigError
from polyturn.rollout.pool import RolloutPool

if TYPE_CHECKING:
    from polyturn.cluster.clients import Member
    from polyturn.cluster.journal import WorkerJournal
    from polyturn.core.protocols import Engine, EngineCapabilities
    from polyturn.training.rank_group import RankWorker


def cluster_parts(place: ConfigSource) -> Parts:
    """ConfigSource engines, workers and ranks on the cluster that the configuration names, and return the leader's parts.

    Raises:
        ConfigError: there is no such cluster, it has no room, or the run cannot go there.
    """
    config = place.config
    cluster = config.cluster
    assert cluster.address is not None
    check_ranks(config, config.train.distributed.ranks)
    if config.engine.kind != "embedded" or config.engine.process == "own" or config.engine.update != "in_flight":
        raise ConfigError(
            f"engine has kind {config.engine.kind!r}, process {config.engine.process!r}, update {config.engine.update!r}; "
            "on a cluster the replicas are embedded engines with in_flight updates, so leave these at their defaults"
        )
    if config.policies:
        raise ConfigError(
            f"policies names {', '.join(map(repr, config.policies))} and the run is on a Ray cluster, where each worker "
            "would hold them again; serve them beside the run and give their addresses (base_url, url), or drop --ray"
        )
    try:
        from polyturn.cluster.clients import RayPool
        from polyturn.cluster.placement import Cluster, ResourceRequest
    except ModuleNotFoundError as problem:
        raise ConfigError(f"--ray needs Ray and it is not installed ({problem}); pip install 'polyturn[ray]'") from problem
    here = dataclasses.replace(place, config=config.model_copy(update={"cluster": type(cluster)()}))
    engines, workers = _need(ResourceRequest, cluster.engines), _need(ResourceRequest, cluster.workers)
    ranks = ResourceRequest(count=config.train.distributed.ranks, resources=cluster.rank_resources)
    cpus = sum(need.count * need.resources.get("CPU", 0) for need in (engines, workers, ranks))
    ray = Cluster(cluster.address, patience_s=cluster.patience_s, cpus=cpus)
    try:
        engine = ray.engines(engines, functools.partial(_engine, here))
        parts = build_parts(place, engine=engine)
        pool = functools.partial(_pool, here, engine.replicas, engine.capabilities)
        members = ray.workers(workers, pool)
        team = ray.team(ranks, functools.partial(_rank, here), tensor_parallel=config.train.distributed.tensor_parallel)
    except BaseException:
        ray.close()
        raise
    rollout = config.rollout
    return dataclasses.replace(
        parts,
        team=team,
        pool=RayPool(
            members, parts.context, max_concurrent=rollout.max_concurrent, max_failed_share=rollout.max_failed_share
        ),
    )


def _need(make: Any, actors: Any) -> Any:
    return make(count=actors.count, resources=actors.resources)


def _engine(place: ConfigSource) -> Engine:
    """Build an engine replica, in its actor."""
    return build_parts(place).engine


def _pool(
    place: ConfigSource, replicas: Sequence[Member], capabilities: EngineCapabilities, journal: WorkerJournal
) -> RolloutPool:
    """Build a rollout worker, in its actor."""
    from polyturn.cluster.clients import RayEngine

    parts = build_parts(place, engine=RayEngine(replicas, capabilities))
    # Whether too many failed is for the leader to say, who sees all of them.
    context = dataclasses.replace(parts.context, journal=journal)
    return RolloutPool(context, max_concurrent=place.config.rollout.max_concurrent, max_failed_share=1.0)


def _rank(place: ConfigSource) -> RankWorker:
    """Build a trainer rank, in its actor."""
    from polyturn.training import process_group

    make_model, media = model_of(place)
    return rank_of(place, make_model, media, process_group.join(local_rank=0))
