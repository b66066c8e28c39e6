"""From the `engine` section to an engine: the embedded one over the trainer's parameters, or a pool of servers."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.build.config_source import ConfigSource
from polyturn.core.errors import ConfigError
from polyturn.core.secret import bearer, token_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from polyturn.engines.embedded import EmbeddedEngine
    from polyturn.engines.launcher import LaunchSpec
    from polyturn.engines.order import OrderPolicy
    from polyturn.engines.pool import EnginePool
    from polyturn.engines.process import ProcessEngine
    from polyturn.engines.remote import RemoteEngine
    from polyturn.engines.weight_files import WeightFolder
    from polyturn.tokens.multimodal import MediaProcessor


_FOR_PROBES = 16
"""Places on a server beyond those of the rollout, so that looking at its weights never waits for an episode."""


def build_engine(
    place: ConfigSource,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast,
    media: MediaProcessor | None,
    max_context: int,
    checkpoint: Path | None,
) -> EmbeddedEngine | ProcessEngine | EnginePool:
    """Make the engine that `engine.kind` names. Servers are started when they are first asked.

    Raises:
        ConfigError: the engine cannot do what the run needs, or is not installed.
    """
    from polyturn.engines.embedded import EmbeddedEngine

    config = place.config.engine
    if config.kind != "embedded":
        _check(place)
        return _served(place, model, tokenizer=tokenizer, media=media, max_context=max_context, checkpoint=checkpoint)
    options: dict[str, Any] = {
        "media": media,
        "num_slots": config.num_slots,
        "max_context": max_context,
        "prefill_chunk": config.prefill_chunk,
        "deterministic": config.deterministic,
    }
    if config.process == "own" or (config.process == "auto" and place.config.train.max_staleness > 0):
        from polyturn.engines.process import ProcessEngine

        return ProcessEngine(model, num_threads=config.num_threads, **options)
    if config.num_threads is not None:
        raise ConfigError(
            f"engine.num_threads is {config.num_threads} and the embedded engine shares the trainer's process; set "
            "engine.process: own, or num_threads for both"
        )
    return EmbeddedEngine(model, **options)


def _check(place: ConfigSource) -> None:
    config, sampling = place.config.engine, place.config.rollout.sampling
    if config.deterministic:
        raise ConfigError(
            f"engine.deterministic is for the embedded engine; a {config.kind} server does not promise equal bits"
        )
    if config.kind == "vllm" and sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ConfigError(
            f"rollout.sampling has top_p {sampling.top_p} and top_k {sampling.top_k}, and vLLM's logprobs are then those "
            "after the cut, which training must not use; leave both off, or use engine.kind: sglang or embedded"
        )


def _served(
    place: ConfigSource,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast,
    media: MediaProcessor | None,
    max_context: int,
    checkpoint: Path | None,
) -> EnginePool:
    from polyturn.config.models import LaunchConfig
    from polyturn.engines.order import make_policy
    from polyturn.engines.sglang import SglangEngine
    from polyturn.engines.vllm import VllmEngine
    from polyturn.engines.weight_files import WeightFolder
    from polyturn.engines.weight_transport import choose_way

    config = place.config.engine
    way = choose_way(config.weights, config.urls, has_gpu=_has_cuda())
    root = None if config.weights_folder is None else place.base / config.weights_folder
    if root is not None and not root.is_dir():
        raise ConfigError(f"engine.weights_folder is {root}, which is no folder; make it where the servers see it too")
    order = make_policy(config.order, base=place.base, **config.order_kwargs)
    clients: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
    folder, is_temporary = _model_folder(place, model, tokenizer=tokenizer, media=media, checkpoint=checkpoint)
    key = token_from({"token_env": config.api_key_env}, where="engine.api_key_env")
    launches = [] if config.urls else _launches(place, folder, max_context=max_context, sees=media is not None)
    servers = [(url, None) for url in config.urls] + [("", spec) for spec in launches]
    engines = [
        clients[config.kind](
            url,
            vocab_size=int(model.config.get_text_config().vocab_size),
            max_context=max_context,
            max_in_flight=config.max_in_flight + _FOR_PROBES,
            timeout_s=config.timeout_s,
            health_s=config.health_s,
            way=way,
            headers=bearer(key),
            media=media,
            launch=launch,
            max_restarts=(config.launch or LaunchConfig()).max_restarts,
        )
        for url, launch in servers
    ]
    files = WeightFolder(folder, root=None if root is None else root.resolve(), owns_model=is_temporary)
    return _pool(place, engines, policy=order, files=files)


def _pool(place: ConfigSource, engines: Sequence[RemoteEngine], *, policy: OrderPolicy, files: WeightFolder) -> EnginePool:
    from polyturn.engines.pool import EnginePool

    config = place.config.engine
    return EnginePool(
        engines,
        policy=policy,
        slots=config.max_in_flight,
        max_tries=config.max_tries,
        patience_s=config.patience_s,
        files=files,
    )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _model_folder(
    place: ConfigSource,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast,
    media: MediaProcessor | None,
    checkpoint: Path | None,
) -> tuple[Path, bool]:
    """Return a folder that a server can load the model from, and whether it was made for that."""
    from polyturn.training import hf

    path = place.config.model.path
    local = checkpoint or (None if path is None else place.base / path)
    lora = place.config.model.lora
    is_whole = checkpoint is not None or lora is None or lora.adapter is None
    has_all = local is not None and (local / "config.json").is_file() and (media is None or checkpoint is None)
    if local is not None and is_whole and has_all:
        return local, False
    folder = Path(tempfile.mkdtemp(prefix="polyturn-model-"))
    hf.save_model(model, folder, tokenizer=tokenizer)
    if media is not None:
        media.processor.save_pretrained(folder)
    return folder, True


def _launches(place: ConfigSource, folder: Path, *, max_context: int, sees: bool) -> list[LaunchSpec]:
    import dataclasses

    import torch

    from polyturn.config.models import LaunchConfig
    from polyturn.engines.serve_commands import SERVE_COMMANDS

    kind = place.config.engine.kind
    launch = place.config.engine.launch or LaunchConfig()
    if launch.python is None and importlib.util.find_spec(kind) is None:
        raise ConfigError(
            f"{kind} is not installed here; set engine.launch.python to the interpreter of an environment that has it, or "
            "engine.urls to a server that runs"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and launch.replicas > 1 and not launch.devices:
        raise ConfigError(
            f"engine.launch.replicas is {launch.replicas} and nothing says which GPUs each server gets; set "
            'engine.launch.devices, for example ["0,1", "2,3"]'
        )
    specs = []
    for number in range(launch.replicas):
        devices = {"CUDA_VISIBLE_DEVICES": launch.devices[number]} if launch.devices else {}
        spec = SERVE_COMMANDS[kind](
            python=launch.python or sys.executable,
            model=folder.resolve(),
            max_context=max_context,
            device=device,
            sees=sees,
            args=launch.args,
            env={**devices, **launch.env},
        )
        log = None if launch.log is None else Path(launch.log if number == 0 else f"{launch.log}.{number}")
        specs.append(dataclasses.replace(spec, ready_timeout_s=launch.ready_timeout_s, log=log))
    return specs
