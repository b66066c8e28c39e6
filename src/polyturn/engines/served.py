"""Build the pool of servers of the section `engine`: running ones, or ones to start.

{kind: vllm, urls: ["http://a:8000"]}   ->  EnginePool([VllmEngine("http://a:8000")])
{kind: sglang, launch: {replicas: 2}}   ->  EnginePool of two clients; the first call of each starts its server
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from polyturn.core.errors import ConfigError, one_line
from polyturn.core.secrets import bearer, token_from
from polyturn.engines.base import EngineSetup, ModelFolder
from polyturn.engines.dialect import release
from polyturn.engines.following import FollowingPool
from polyturn.engines.launcher import LaunchSpec, Server
from polyturn.engines.options import LaunchOptions, ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.served_routes import FLAG
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.weights.folder import WeightFolder, WeightStore
from polyturn.engines.weights.stream import Transport, choose_transport
from polyturn.engines.weights.transfer import WeightTransfer

logger = logging.getLogger(__name__)

_FOR_PROBES = 16
"""Further slots of a server for probes, so that checking its weights never waits for an episode."""


def build_servers(setup: EngineSetup, client: type[RemoteEngine], command: Callable[..., LaunchSpec]) -> EnginePool:
    """Make a pool of servers. Servers that the run starts are started by the first call.

    Args:
        setup: The parts of the run.
        client: The client of one server.
        command: Returns the command that starts a server; see `serve_commands.py`.

    Raises:
        ConfigError: the servers do not support an option, or are not installed.
    """
    import torch

    options: ServerOptions = setup.options
    key = token_from({"token_env": options.api_key_env}, where="engine.api_key_env")
    model = ServedModel(
        vocab_size=int(setup.model.config.get_text_config().vocab_size),
        max_context=setup.max_context,
        media=setup.media,
        routes=setup.routes,
        needs_routes=setup.needs_routes,
        adapter=setup.adapter,
    )
    sent = dataclasses.replace(options, max_in_flight=options.max_in_flight + _FOR_PROBES)
    limits: Any = {"slots": options.max_in_flight, "max_tries": options.max_tries, "patience_s": options.patience_s}
    if setup.follows:
        followers = [client("", model, options=sent, headers=bearer(key)) for _ in range(setup.follows)]
        return FollowingPool(followers, **limits)
    launch, places = options.launch or LaunchOptions(), setup.places
    root = None if options.weights_folder is None else setup.base / options.weights_folder
    has_gpu = torch.cuda.is_available() if setup.trains_on_gpu is None else setup.trains_on_gpu
    transport = choose_transport(
        options.weights if setup.adapter is None else "adapter",
        options.urls,
        has_gpu=has_gpu,
        is_shared=root is not None or (setup.adapter is not None and client.takes_adapter_tensors),
    )
    in_folder = transport in {"folder", "adapter"}
    if transport in {"nccl", "ipc"}:
        _require_package(transport, setup, client)
    if root is not None and not root.is_dir():
        raise ConfigError(f"engine.weights_folder is {root}, which is not a folder; create it where the servers see it too")
    model_folder = functools.cache(setup.model_folder)
    launches = (
        []
        if options.urls
        else _launches(launch, setup, client, functools.partial(command, transport=transport), model_folder)
    )
    folder = model_folder()  # may write a model, so only after all checks
    own_model = folder.path if folder.is_temporary else None
    transfer = None if in_folder else WeightTransfer(transport, client.open_link, own_model=own_model)
    starters = [Server.start if places is None else places.starter(number) for number in range(len(launches))]
    supervisors = [
        ServerSupervisor(spec, max_restarts=launch.max_restarts, start=start)
        for spec, start in zip(launches, starters, strict=True)
    ]
    clients = [
        client(url, model, options=sent, transfer=transfer, headers=bearer(key), supervisor=supervisor)
        for url, supervisor in [*((url, None) for url in options.urls), *(("", one) for one in supervisors)]
    ]
    files: WeightStore
    if transfer is not None:
        files = transfer
    elif places is not None and launches and root is None:
        files = places.store(setup.adapter)
        if folder.is_temporary:
            shutil.rmtree(folder.path, ignore_errors=True)
    else:
        files = WeightFolder(
            folder.path,
            root=None if root is None else root.resolve(),
            owns_model=folder.is_temporary,
            adapter=setup.adapter,
        )
    return EnginePool(clients, files=files, **limits)


def require_one_version(pool: EnginePool) -> None:
    """Raise if the started servers have different versions, which may sample or load weights differently.

    Raises:
        ConfigError: the versions differ; the message names a server of each version.
    """
    clients = [replica.engine for replica in pool.replicas if isinstance(replica.engine, RemoteEngine)]
    at = {client.software: client.url for client in reversed(clients)}
    if len(at) > 1:
        versions = ", ".join(f"{what} at {url}" for what, url in sorted(at.items()))
        raise ConfigError(
            f"the servers have different versions: {versions}; install one version on all nodes (engine.launch.python)"
        )


def _require_package(transport: Transport, setup: EngineSetup, client: type[RemoteEngine]) -> None:
    """Raise if the trainer's side of a transfer of tensors is not installed.

    Raises:
        ConfigError: the package is missing.
    """
    package = client.transfer_package
    if package is not None and importlib.util.find_spec(package) is None:
        _refuse(
            f"engine.weights resolves to {transport}, which needs the package {package} in polyturn's environment; "
            "install it, or set engine.weights to gloo, or to a folder that the servers see too (engine.weights_folder)",
            setup,
        )


def _require_sleep(setup: EngineSetup, client: type[RemoteEngine], launch: LaunchOptions, *, device: str) -> None:
    """Raise if the servers cannot share the trainer's GPUs.

    Raises:
        ConfigError: there are no GPUs, or a server would use a whole GPU.
    """
    if device != "cuda":
        _refuse(
            "engine.update is sleep, which is for servers on the trainer's GPUs, and there is no CUDA GPU; set "
            "engine.update to in_flight or wait",
            setup,
        )
    elif not any(arg.partition("=")[0] == client.share_flag for arg in launch.args):
        _refuse(
            f"engine.update is sleep and engine.launch.args is {launch.args}, so {client.name} would use nearly all of "
            f"the trainer's GPU; add {client.share_flag} with the free share that `train --dry-run --gpus N` reports",
            setup,
        )


def _refuse(problem: str, setup: EngineSetup) -> None:
    """Raise because the run cannot start on this machine; a dry run records the reason instead.

    Raises:
        ConfigError: unless this is a dry run.
    """
    if setup.obstacles is None:
        raise ConfigError(problem)
    setup.obstacles.append(problem)


def _check_installed(launch: LaunchOptions, setup: EngineSetup, client: type[RemoteEngine]) -> None:
    """Raise if the servers are not installed here. A dry run also checks the environment of `engine.launch.python`, and the
    version of the servers.

    Raises:
        ConfigError: unless this is a dry run, which records the problem instead.
    """
    name, python = client.name, launch.python
    install = (
        f"make an environment with {name}=={client.tested_version} and set engine.launch.python to its interpreter, or "
        "set engine.urls to a running server"
    )
    if python is None and importlib.util.find_spec(name) is None:
        return _refuse(f"engine.kind is {name}, and {name} is not installed here; {install}", setup)
    if setup.obstacles is None:
        return  # a real run learns of a missing package when the server starts
    ask = f"import importlib.metadata as m; print(m.version({name!r}))"
    try:
        done = subprocess.run(
            [python or sys.executable, "-P", "-c", ask], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return _refuse(f"engine.launch.python is {python!r}, which does not run ({one_line(problem)}); {install}", setup)
    version = done.stdout.strip()
    if done.returncode:
        _refuse(f"engine.launch.python is {python!r}, whose environment has no {name}; {install}", setup)
    elif release(version) < release(client.tested_version):
        _refuse(f"engine.kind is {name}, and {name} {version} is too old to train with; {install}", setup)


def _launches(
    launch: LaunchOptions,
    setup: EngineSetup,
    client: type[RemoteEngine],
    command: Callable[..., LaunchSpec],
    model_folder: Callable[[], ModelFolder],
) -> list[LaunchSpec]:
    import torch

    places = setup.places
    if places is None:
        _check_installed(launch, setup, client)
    count = launch.replicas if places is None else places.count
    device = "cuda" if (torch.cuda.is_available() if places is None else places.num_gpus) else "cpu"
    wide = ["--tensor-parallel-size", str(places.num_gpus)] if places is not None and places.num_gpus > 1 else []
    sleeps = setup.options.update == "sleep"
    if sleeps:
        _require_sleep(setup, client, launch, device=device)
    asks = _asks_for_routes(setup, client, device=device)
    more, beside = ([], {}) if setup.adapter is None else client.adapter_launch(setup.adapter, device=device)
    if places is None and device == "cuda" and count > 1 and not launch.devices:
        raise ConfigError(
            f"engine.launch.replicas is {launch.replicas} and engine.launch.devices does not assign GPUs to them; set "
            'engine.launch.devices, for example ["0,1", "2,3"]'
        )
    specs = []
    for number in range(count):
        devices = {"CUDA_VISIBLE_DEVICES": launch.devices[number]} if launch.devices else {}
        spec = command(
            python=launch.python or sys.executable,
            model=model_folder().path.resolve() if places is None else places.model,
            max_context=setup.max_context,
            device=device,
            sees=setup.media is not None,
            args=[*wide, *([FLAG] if asks else []), *([client.sleep_flag] if sleeps else []), *more, *launch.args],
            env={**devices, **(client.routes_env if asks else {}), **beside, **launch.env},
        )
        specs.append(dataclasses.replace(spec, ready_timeout_s=launch.ready_timeout_s, log=launch.log_of(number)))
    return specs


def _asks_for_routes(setup: EngineSetup, client: type[RemoteEngine], *, device: str) -> bool:
    """Return whether to start servers with reporting of experts. On a CPU a server would not start with it: vLLM needs
    Triton, which has no CPU backend, and SGLang needs memory registered with CUDA.

    Raises:
        ConfigError: routes are required on a CPU.
    """
    if setup.routes is None or device != "cpu":
        return setup.routes is not None
    why = f"{client.name} does not report the experts of tokens on a CPU"
    if setup.needs_routes:
        raise ConfigError(f"algorithm.routing.replay is on and {why}; set it to auto or off, or set engine.kind: embedded")
    logger.warning("%s; training uses the choices of its own routers, and counts these tokens (policy/router_missing)", why)
    return False
