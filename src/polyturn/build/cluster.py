"""A run on a Ray cluster: the specification of each of its actors, and the leader's parts around them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import TYPE_CHECKING

from polyturn.build.backend import row_width
from polyturn.build.engine import build_engine, servable_folder
from polyturn.build.model import build_codec, build_media, build_outline
from polyturn.build.parts import Parts, build_parts, max_context_of
from polyturn.build.ranks import check_ranks, holds_weights, model_of, rank_of
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.core.plugins import load_plugins
from polyturn.core.standstill import Standstill
from polyturn.engines.options import EmbeddedOptions, ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.rollout.pool import RolloutPool

if TYPE_CHECKING:
    from polyturn.cluster.journal import WorkerJournal
    from polyturn.cluster.members import Member
    from polyturn.cluster.servers import NodePlaces
    from polyturn.core.protocols import Engine, EngineCapabilities
    from polyturn.training.rank_group import RankWorker


def check_cluster(config: RunConfig) -> None:
    """Refuse what cannot go to a cluster.

    Raises:
        ConfigError: some setting is for one machine only.
    """
    check_ranks(config, config.train.distributed.ranks)
    engine = config.engine
    process = engine.process if isinstance(engine, EmbeddedOptions) else "auto"
    if process == "own" or engine.update != "in_flight":
        raise ConfigError(
            f"engine has process {process!r} and update {engine.update!r}; on a cluster every replica is in a "
            "process of its own and weights arrive in flight, so leave these at their defaults"
        )
    if config.policies:
        raise ConfigError(
            f"policies names {', '.join(map(repr, config.policies))} and the run is on a Ray cluster, where each worker "
            "would hold them again; serve them beside the run and give their addresses (base_url, url), or drop "
            "cluster.address"
        )
    if not isinstance(engine, ServerOptions):
        return
    if engine.launch is not None and engine.launch.devices:
        raise ConfigError(
            f"engine.launch.devices is {engine.launch.devices}, and on a cluster Ray says which GPUs a server gets; leave "
            "it out and say how many in cluster.engines.resources, for example {GPU: 2}"
        )
    if engine.launch is not None and engine.launch.replicas > 1:
        raise ConfigError(
            f"engine.launch.replicas is {engine.launch.replicas}, which counts the servers of one machine; on a cluster set "
            f"cluster.engines.count to {engine.launch.replicas}"
        )
    if engine.weights == "ipc":
        raise ConfigError(
            "engine.weights is ipc, which needs trainer and server in one machine's memory; on a cluster leave it at auto, "
            "or use http, gloo, or disk with an engine.weights_folder that all nodes see"
        )


def cluster_parts(place: ConfigSource) -> Parts:
    """Place engines, workers and ranks on the cluster that the configuration names, and return the leader's parts.

    Raises:
        ConfigError: there is no such cluster, it has no room, or the run cannot go there.
    """
    config = place.config
    cluster = config.cluster
    assert cluster.address is not None
    try:
        from polyturn.cluster.clients import RayPool
        from polyturn.cluster.members import ResourceRequest
        from polyturn.cluster.placement import Cluster, check_travels
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"cluster.address needs Ray, which is not installed ({problem}); pip install 'polyturn[ray]'"
        ) from problem
    for held in place.live:
        check_travels(held.label, held.target)
    # An actor builds as on one machine, so what it reads names no cluster.
    here = dataclasses.replace(place, config=config.model_copy(update={"cluster": type(cluster)()}))
    engines, workers = ResourceRequest(**dict(cluster.engines)), ResourceRequest(**dict(cluster.workers))
    ranks = ResourceRequest(count=config.train.distributed.ranks, resources=cluster.rank_resources)
    cpus = sum(need.count * need.resources.get("CPU", 0) for need in (engines, workers, ranks))
    ray = Cluster(cluster.address, patience_s=cluster.patience_s, cpus=cpus)
    reading = dataclasses.replace(place, reads_parts=not holds_weights(place, num_ranks=ranks.count))
    try:
        if config.engine.kind == "embedded":
            engine = ray.engines(engines, functools.partial(_engine, here))
            parts = build_parts(reading, engine=engine)
        else:
            places = ray.places(None if isinstance(config.engine, ServerOptions) and config.engine.urls else engines)
            engine = ray.pool()
            parts = build_parts(reading, engine=engine)
            media = parts.context.media
            folder = servable_folder(parts.place, parts.model, tokenizer=parts.tokenizer, media=media, checkpoint=None)
            engine.start(functools.partial(_servers, here, places(folder)))
        pool = functools.partial(_pool, here, engine.pool, engine.capabilities)
        members = ray.workers(workers, pool)
        rank_group = ray.rank_group(ranks, functools.partial(_rank, here), tensor_parallel=row_width(config))
    except BaseException:
        ray.close()  # or the actors that were placed keep their resources
        raise
    rollout = config.rollout
    return dataclasses.replace(
        parts,
        rank_group=rank_group,
        pool=RayPool(
            members, parts.context, max_concurrent=rollout.max_concurrent, max_failed_share=rollout.max_failed_share
        ),
    )


def _engine(place: ConfigSource) -> Engine:
    """Build an engine replica, in its actor."""
    return build_parts(place).engine


async def _servers(place: ConfigSource, places: NodePlaces) -> EnginePool:
    """Build the pool of servers, in its actor, and let all of them come up.

    Raises:
        ConfigError, EngineError: they cannot be, or one does not come up.
    """
    config = place.config
    load_plugins(config.plugins, base=place.base)
    codec = build_codec(place)
    model = build_outline(place, codec.tokenizer)
    made = build_engine(
        place,
        model,
        tokenizer=codec.tokenizer,
        media=build_media(place, codec, model),
        max_context=max_context_of(config.rollout.limits, model),
        checkpoint=None,
        places=places,
    )
    if not isinstance(made, EnginePool):
        raise ConfigError(
            f"engine.kind {config.engine.kind!r} makes a {type(made).__name__}; on a cluster it must make a pool of servers "
            "(polyturn.engines.pool.EnginePool), as vllm and sglang do, or be embedded"
        )
    await made.update_weights(0)
    return made


def _pool(place: ConfigSource, pool: Member, capabilities: EngineCapabilities, journal: WorkerJournal) -> RolloutPool:
    """Build a rollout worker, in its actor."""
    from polyturn.cluster.engine import ClusterEngine

    parts = build_parts(place, engine=ClusterEngine(pool, capabilities), has_weights=False)
    Standstill(asyncio.get_running_loop(), deadline_s=place.config.deadline_s, of_worker=True)
    # Whether too many failed is for the leader to say, who sees all of them.
    context = dataclasses.replace(parts.context, journal=journal)
    return RolloutPool(context, max_concurrent=place.config.rollout.max_concurrent, max_failed_share=1.0)


def _rank(place: ConfigSource) -> RankWorker:
    """Build a trainer rank, in its actor."""
    from polyturn.training import process_group

    make_model, media = model_of(place)
    return rank_of(place, make_model, media, process_group.join(local_rank=0))
