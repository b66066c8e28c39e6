"""Actor, the base of every actor of a run, and Member, its handle in the controller: location, log tail and errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polyturn.core.errors import PolyturnError

AT_ONCE = 100_000
"""Maximum number of concurrent calls of one actor, which a run never reaches. With a lower limit a run could deadlock:
`posts` would queue after calls of `run`, which themselves wait until `posts` has taken their lines to the journal."""
_NUM_LINES = 20
_SOON_S = 2.0
"""Seconds to wait for an actor's state."""


class ActorInfo(NamedTuple):
    """The node, process and resources of an actor."""

    node: str
    address: str
    pid: int
    logs: tuple[str, ...]
    """The files with its stdout and stderr, on its node."""
    gpus: tuple[str, ...] = ()
    """Numbers of the GPUs on its node that Ray assigned to it."""


class Actor:
    """The methods that all actors of a run have."""

    def home(self) -> ActorInfo:
        """Return this actor's node, address, process, logs and GPUs."""
        logs = tuple(os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2))
        this = ray.get_runtime_context()
        gpus = tuple(this.get_accelerator_ids().get("GPU", ()))
        return ActorInfo(this.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), logs, gpus)


class Member:
    """The handle of an actor, its display name and its location."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.home: ActorInfo = ray.get(handle.home.remote())

    def crash_report(self) -> str:
        """Return a message that the actor died, with the last lines of its log if the log is on this machine."""
        files = [path for path in map(Path, self.home.logs) if path.is_file()]
        lines = [line for path in files for line in path.read_text(errors="replace").splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(":")][-_NUM_LINES:]  # Ray's own marks begin with a colon
        where = f"process {self.home.pid} on {self.home.address}"
        text = "\n".join(f"  {line}" for line in lines) or "  (nothing on this machine; see `ray logs` on its node)"
        return f"{self.name} ({where}) died. The last lines of its log:\n{text}"

    def is_dead(self) -> bool:
        """Return whether Ray reports the actor as dead; False if Ray does not answer within `_SOON_S`."""
        try:
            ray.get(self.handle.home.remote(), timeout=_SOON_S)
        except RayActorError:
            return True
        except RayError:
            return False
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """A number of actors of one kind, and the resources that each of them occupies."""

    count: int
    resources: Mapping[str, float]
    """For example {"CPU": 4, "GPU": 1}, or custom resources of a node."""


def start_in(actor: type, group: Any, index: int, resources: Mapping[str, float], *arguments: Any, at_once: int = 1) -> Any:
    """Start an actor with `resources` in bundle `index` of a placement group, and return its handle."""
    options: dict[str, Any] = {"max_concurrency": at_once} if at_once > 1 else {}
    handle: Any = ray.remote(actor).options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources={k: v for k, v in resources.items() if k not in ("CPU", "GPU")},
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        **options,
    )
    return handle.remote(*arguments)


async def answer(ref: Any) -> Any:
    """Await an actor's answer; if the caller is cancelled, the actor's call is cancelled too.

    Raises:
        RayActorError: the actor died.
        PolyturnError: the actor raised it.
    """
    try:
        return await ref
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as problem:
        raise own_words(problem) from None


def own_words(problem: RayTaskError) -> BaseException:
    """Return the exception that an actor raised, without Ray's trace if it is a `PolyturnError`."""
    return problem.cause if isinstance(problem.cause, PolyturnError) else problem
