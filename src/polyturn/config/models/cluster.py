"""The section `cluster`: where a run's processes run on a Ray cluster.

    cluster: {address: auto, engines: {count: 4, resources: {GPU: 1}}}

Without an address all processes run on this machine; `workers: {count: 4}` then runs episodes in four processes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyturn.config.parts import Section

Amount = Annotated[float, Field(ge=0)]


class ActorsConfig(Section):
    """Processes of one kind on a cluster."""

    count: int = Field(1, ge=1, le=2**16)
    """Number of processes."""
    resources: dict[str, Amount] = {"CPU": 1}
    """Ray resources of each process: CPU, GPU, and custom resources of nodes."""


class ClusterConfig(Section):
    """Ranks, engines and rollout workers on a Ray cluster. Without an address all run on this machine."""

    address: str | None = None
    """`auto`, an address, or `local` for a cluster on this machine; set by `--ray`."""
    rank_resources: dict[str, Amount] = {"CPU": 1}
    """Ray resources of each rank (train.distributed.ranks)."""
    engines: ActorsConfig = ActorsConfig()
    """Replicas of the engine, embedded or started servers, each with all of these resources. Not for `engine.urls`."""
    workers: ActorsConfig = ActorsConfig()
    """Processes that run episodes (tools, interactions, rewards). Without an address they run on this machine, and a count
    of 1 runs episodes in the run's main process."""
    restarts: int = Field(0, ge=0)
    """Number of restarts of a run from its latest checkpoint after a rank, or the last rollout worker or engine, died."""
    patience_s: float = Field(300.0, gt=0)
    """Seconds to wait until the cluster has room."""
