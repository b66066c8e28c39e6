"""From the section `engine` to a pool of servers of one kind: those that run already, or those that it starts.

{kind: vllm, urls: ["http://a:8000"]}   ->  EnginePool([VllmEngine("http://a:8000")])
{kind: sglang, launch: {replicas: 2}}   ->  EnginePool of two clients; each starts its server when it is first asked
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from polyturn.core.errors import ConfigError
from polyturn.core.secret import bearer, token_from
from polyturn.engines.base import EngineSetup
from polyturn.engines.launcher import LaunchSpec, Server
from polyturn.engines.options import LaunchOptions, ServerOptions
from polyturn.engines.order import make_policy
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.served_routes import FLAG
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.weight_files import WeightFolder, WeightStore
from polyturn.engines.weight_transport import choose_way

logger = logging.getLogger(__name__)

_FOR_PROBES = 16
"""Places on a server beyond those of the rollout, so that looking at its weights never waits for an episode."""


def build_servers(setup: EngineSetup, client: type[RemoteEngine], command: Callable[..., LaunchSpec]) -> EnginePool:
    """Make a pool of servers; those that are to be started are when they are first asked.

    Args:
        setup: What the run gives.
        client: The client of one server.
        command: Returns how a server is started; see `serve_commands.py`.

    Raises:
        ConfigError: the section asks for what servers cannot do, or the server is not installed.
    """
    import torch

    options: ServerOptions = setup.options
    launch, places = options.launch or LaunchOptions(), setup.places
    way = choose_way(options.weights, options.urls, has_gpu=torch.cuda.is_available())
    root = None if options.weights_folder is None else setup.base / options.weights_folder
    if root is not None and not root.is_dir():
        raise ConfigError(f"engine.weights_folder is {root}, which is no folder; make it where the servers see it too")
    order = make_policy(options.order, base=setup.base, **options.order_kwargs)
    folder = setup.model_folder()
    key = token_from({"token_env": options.api_key_env}, where="engine.api_key_env")
    launches = [] if options.urls else _launches(launch, setup, client, command, folder.path)
    starters = [Server.start if places is None else places.starter(number) for number in range(len(launches))]
    supervisors = [
        ServerSupervisor(spec, max_restarts=launch.max_restarts, start=start)
        for spec, start in zip(launches, starters, strict=True)
    ]
    model = ServedModel(
        vocab_size=int(setup.model.config.get_text_config().vocab_size),
        max_context=setup.max_context,
        media=setup.media,
        routes=setup.routes,
        needs_routes=setup.needs_routes,
    )
    sent = dataclasses.replace(options, max_in_flight=options.max_in_flight + _FOR_PROBES)
    clients = [
        client(url, model, options=sent, way=way, headers=bearer(key), supervisor=supervisor)
        for url, supervisor in [*((url, None) for url in options.urls), *(("", one) for one in supervisors)]
    ]
    if places is not None and launches and way == "shared_memory":
        files: WeightStore = places.store()
        if folder.is_temporary:
            shutil.rmtree(folder.path, ignore_errors=True)
    else:
        root = None if root is None else root.resolve()
        files = WeightFolder(folder.path, root=root, owns_model=folder.is_temporary)
    return EnginePool(
        clients,
        policy=order,
        slots=options.max_in_flight,
        max_tries=options.max_tries,
        patience_s=options.patience_s,
        files=files,
    )


def _launches(
    launch: LaunchOptions,
    setup: EngineSetup,
    client: type[RemoteEngine],
    command: Callable[..., LaunchSpec],
    folder: Path,
) -> list[LaunchSpec]:
    import torch

    places = setup.places
    if places is None and launch.python is None and importlib.util.find_spec(client.name) is None:
        missing = (
            f"{client.name} is not installed here; set engine.launch.python to the interpreter of an environment that has "
            "it, or engine.urls to a server that runs"
        )
        if not setup.is_plan:
            raise ConfigError(missing)
        logger.warning("on this machine the run would not start: %s", missing)
    count = launch.replicas if places is None else places.count
    device = "cuda" if (torch.cuda.is_available() if places is None else places.num_gpus) else "cpu"
    wide = ["--tensor-parallel-size", str(places.num_gpus)] if places is not None and places.num_gpus > 1 else []
    asks = _asks_for_routes(setup, client, device=device)
    if places is None and device == "cuda" and count > 1 and not launch.devices:
        raise ConfigError(
            f"engine.launch.replicas is {launch.replicas} and nothing says which GPUs each server gets; set "
            'engine.launch.devices, for example ["0,1", "2,3"]'
        )
    specs = []
    for number in range(count):
        devices = {"CUDA_VISIBLE_DEVICES": launch.devices[number]} if launch.devices else {}
        spec = command(
            python=launch.python or sys.executable,
            model=folder.resolve() if places is None else places.model,
            max_context=setup.max_context,
            device=device,
            sees=setup.media is not None,
            args=[*wide, *([FLAG] if asks else []), *launch.args],
            env={**devices, **(client.routes_env if asks else {}), **launch.env},
        )
        specs.append(dataclasses.replace(spec, ready_timeout_s=launch.ready_timeout_s, log=launch.log_of(number)))
    return specs


def _asks_for_routes(setup: EngineSetup, client: type[RemoteEngine], *, device: str) -> bool:
    """Return whether servers are started so that they say which experts tokens went to. Asked on a CPU they end: vLLM needs
    Triton for it, which has no backend there, and SGLang memory that CUDA has registered.

    Raises:
        ConfigError: it is needed there.
    """
    if setup.routes is None or device != "cpu":
        return setup.routes is not None
    why = f"{client.name} does not say on a CPU which experts tokens went to"
    if setup.needs_routes:
        raise ConfigError(f"algorithm.routing.replay is on and {why}; set it to auto or off, or take engine.kind embedded")
    logger.warning("%s; training sends them where its own routers do, and counts them (policy/router_missing)", why)
    return False
