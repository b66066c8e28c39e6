"""Inference servers on nodes: an actor in a bundle of a placement group starts, watches and stops each server.

    controller     NodePlaces.starter(2) -> NodeServer           a `RunningServer` for the client's supervisor
      |  a new actor for every start, on another node if the bundle's node is gone
    node           ServerActor -> Server (ManagedProcess)        the process, its log, the checkpoint that it reads

If an actor is killed, the kernel ends its server with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from polyturn.cluster.members import AT_ONCE, Actor, ActorInfo, answer, start_in
from polyturn.cluster.weights import ModelFiles, NodeStore, StoredWeights
from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.engines.base import ModelFolder
from polyturn.engines.launcher import LaunchSpec, Server, StartServer
from polyturn.engines.weights.folder import WeightFolder

_SOON_S = 5.0
"""Seconds to wait for a server's actor to report its state."""
_MODEL = "{model}"
"""Placeholder in a command for the model's folder, if nodes get the model through the object store."""


class ServerActor(Actor):
    """Runs one server on this node."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._files: WeightFolder | None = None

    async def start(self, spec: LaunchSpec, model: ModelFiles) -> str:
        """Start the server and return its address once it is ready.

        Raises:
            EngineError: the server cannot be started, ended early, or was not ready in time.
        """
        folder: ModelFolder = await asyncio.to_thread(model.here)
        self._files = WeightFolder(folder.path, owns_model=folder.is_temporary)
        command = tuple(part.replace(_MODEL, str(folder.path)) for part in spec.command)
        host = ray.util.get_node_ip_address()
        try:
            self._server = await Server.start(dataclasses.replace(spec, command=command), host=host)
        except BaseException:
            self._files.close()
            raise
        return self._server.url

    async def is_dead(self) -> bool:
        return self._server is None or await self._server.is_dead()

    async def last_lines(self) -> str:
        return "" if self._server is None else await self._server.last_lines()

    async def record_memory(self) -> None:
        """Record the shared memory that the server uses."""
        if self._server is not None:
            self._server.record_memory()

    async def hold(self, weights: StoredWeights, at: Path | None, adapter: Mapping[str, Any] | None) -> Path:
        """Return a checkpoint folder of `weights` on this node: `at`, if it exists here, else a newly written folder.

        `adapter` has peft's settings if the weights are an adapter's.
        """
        assert self._files is not None
        self._files.adapter = adapter
        if at is not None and await asyncio.to_thread(at.is_dir):
            if self._files.last != at:
                self._files.drop()
            return at
        return (await asyncio.to_thread(self._files.write, weights)).folder

    async def stop(self) -> None:
        """Stop the server, and remove the files written for it."""
        if self._server is not None:
            await self._server.stop()
        if self._files is not None:
            self._files.close()


class NodeServer:
    """A server that an actor started; implements `RunningServer`."""

    def __init__(self, handle: Any, home: ActorInfo, url: str, *, stop_s: float) -> None:
        self._handle = handle
        self._stop_s = stop_s
        self.node = home.node
        self.url = url

    async def is_dead(self) -> bool:
        """Return whether the server or its actor has ended; an actor that is slow to answer counts as alive."""
        try:
            return bool(await asyncio.wait_for(self._handle.is_dead.remote(), _SOON_S))
        except RayActorError:
            return True
        except TimeoutError:
            return False

    async def last_lines(self) -> str:
        """Return the end of its log, or a note that its node or actor is gone."""
        try:
            return str(await asyncio.wait_for(self._handle.last_lines.remote(), _SOON_S))
        except (RayActorError, TimeoutError):
            return "(its actor or its node is gone, and the log with it)"

    def record_memory(self) -> None:
        """Let its actor record the shared memory that the server uses."""
        self._handle.record_memory.remote()

    async def hold(self, weights: StoredWeights, at: Path | None, adapter: Mapping[str, Any] | None) -> Path:
        """Return the checkpoint folder of `weights` on its node; `adapter` has peft's settings if they are an adapter's.

        Raises:
            EngineLostError: the server's actor is gone.
        """
        try:
            path: Path = await answer(self._handle.hold.remote(weights, at, adapter))
        except RayActorError as problem:
            raise EngineLostError(f"the actor of the server at {self.url} is gone ({one_line(problem)})") from problem
        return path

    async def stop(self) -> None:
        """Stop the server and kill its actor."""
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._handle.stop.remote(), self._stop_s)
        ray.kill(self._handle)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodePlaces:
    """The bundles of a placement group, one for each server; implements `engines.base.ServerPlaces`."""

    group: Any
    count: int
    resources: Mapping[str, float]
    devices: tuple[str, ...] = ()
    """For each server, the numbers of the ranks' GPUs that it shares, such as "2,3"; empty if Ray assigns separate GPUs."""
    files: ModelFiles
    patience_s: float
    """Seconds that a start may wait for room."""

    @property
    def num_gpus(self) -> int:
        return round(self.resources.get("GPU", 0))

    @property
    def model(self) -> Path:
        """The model's folder on every node, or its placeholder `_MODEL`."""
        return self.files.path or Path(_MODEL)

    @property
    def config(self) -> ModelFolder:
        """A folder on this machine with the model's config."""
        return self.files.here(only="config.json")

    def store(self, adapter: Mapping[str, Any] | None) -> NodeStore:
        """Return the store that sends weights to the nodes; `adapter` has peft's settings if only an adapter is sent."""
        return NodeStore(adapter)

    def starter(self, number: int) -> StartServer:
        """Return a function that starts a server in bundle `number`, on the bundle's current node."""

        resources = {kind: amount for kind, amount in self.resources.items() if kind != "GPU" or not self.devices}
        gpus = {"CUDA_VISIBLE_DEVICES": self.devices[number]} if self.devices else {}

        async def start(spec: LaunchSpec) -> NodeServer:
            spec = dataclasses.replace(spec, env={**spec.env, **gpus})
            handle = start_in(ServerActor, self.group, number, resources, at_once=AT_ONCE)
            where, stop_s = f"for server {number}", spec.stop_timeout_s + _SOON_S
            try:
                home: ActorInfo = await asyncio.wait_for(handle.home.remote(), self.patience_s)
                where = f"server {number} on {home.address}"
                return NodeServer(handle, home, await answer(handle.start.remote(spec, self.files)), stop_s=stop_s)
            except TimeoutError as problem:
                ray.kill(handle)
                raise EngineError(
                    f"the cluster has no room {where} with {resources} after {self.patience_s:g} s"
                ) from problem
            except RayActorError as problem:
                raise EngineError(f"{where}: its actor died while it was started ({one_line(problem)})") from problem
            except EngineError as problem:
                ray.kill(handle)
                raise EngineError(f"{where}: {problem}") from problem

        return start
