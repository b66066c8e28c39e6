"""The section `cluster`: the placement of a run's processes on a Ray cluster.

    cluster: {address: auto, engines: {count: 4, resources: {GPU: 1}}}

Without an address every process is on this machine, where `workers: {count: 4}` runs episodes in four of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyturn.config.parts import Section

Amount = Annotated[float, Field(ge=0)]


class ActorsConfig(Section):
    """Processes of one kind on a cluster."""

    count: int = Field(1, ge=1, le=2**16)
    """Number of them."""
    resources: dict[str, Amount] = {"CPU": 1}
    """The resources of each, in Ray's words: CPU, GPU, and those that a node was started with."""


class ClusterConfig(Section):
    """A Ray cluster: where the ranks, engines and rollout workers of a run are placed. Without an address all are here."""

    address: str | None = None
    """`auto`, an address, or `local` for a cluster on this machine; `--ray` sets it."""
    rank_resources: dict[str, Amount] = {"CPU": 1}
    """The resources of each of train.distributed.ranks."""
    engines: ActorsConfig = ActorsConfig()
    """Replicas of the engine: embedded ones, or servers that are started, each with all of these resources. Not for
    `engine.urls`."""
    workers: ActorsConfig = ActorsConfig()
    """Processes that run episodes: tools, interactions, rewards. Without an address they are on this machine, and 1 leaves
    episodes in the run's own process."""
    restarts: int = Field(0, ge=0)
    """Restarts of a run from its latest checkpoint when a rank, or the last rollout worker or engine, died. Not of ranks
    that torchrun started."""
    patience_s: float = Field(300.0, gt=0)
    """Seconds to wait until the cluster has room."""
