"""Build the engine of the section `engine`."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.core.errors import ConfigError, did_you_mean, plugin_errors_as
from polyturn.core.generation import SamplingParams
from polyturn.core.protocols import Engine
from polyturn.core.routing import RouteShape
from polyturn.engines.base import EngineSetup, ModelFolder, ServerPlaces, engines
from polyturn.engines.foreign import ForeignEngine
from polyturn.engines.options import OwnEngineOptions, ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.infra.live import LiveObject
from polyturn.infra.plugin_shape import takes_any_keyword
from polyturn.infra.plugins import wrong_kind
from polyturn.infra.writable import check_file_writable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from polyturn.tokens.multimodal import MediaProcessor

logger = logging.getLogger(__name__)

_FEED_FORWARD = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


def build_engine(
    source: ConfigSource,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast,
    media: MediaProcessor | None,
    max_context: int,
    checkpoint: Path | None,
    places: Callable[[ModelFolder], ServerPlaces] | None = None,
    follows: int = 0,
) -> Engine:
    """Make the engine `engine.kind`. A server starts at the first call to it.

    `places` makes, from the model's folder, the object that starts servers on other machines; None starts them on this
    machine. For `follows` see `EngineSetup`.
    """
    from polyturn.training.lora import adapter_settings

    config = source.config
    build = find_engine(source)
    if source.trains and config.model.lora is not None and isinstance(config.engine, ServerOptions) and not follows:
        _explain_merged(config.engine, _adapter_problem(config.engine, model))
    routes = route_shape(source, model)

    def folder() -> ModelFolder:
        return servable_folder(source, model, tokenizer=tokenizer, media=media, checkpoint=checkpoint)

    own_places = None if places is None else places(folder())
    setup = EngineSetup(
        options=config.engine,
        model=model,
        media=media,
        max_context=max_context,
        sampling=SamplingParams.of(config.rollout.sampling),
        base=source.base,
        model_folder=lambda: folder() if own_places is None else own_places.config,
        routes=routes,
        needs_routes=config.algorithm.routing.replay == "on",
        # A rollout worker sends no weights, and its model has no adapter.
        adapter=adapter_settings(model) if not follows and sends_adapter(source, model) else None,
        places=own_places,
        trains_on_gpu=None if config.cluster.address is None else bool(config.cluster.rank_resources.get("GPU")),
        follows=follows,
        obstacles=None if not source.is_plan else source.obstacles if config.cluster.address is None else [],
    )
    engine = _foreign(build, setup, config.engine) if isinstance(config.engine, OwnEngineOptions) else build(setup)
    # Capabilities are known only after the engine is made.
    engine.capabilities.check_temperature(config.rollout.sampling.temperature, key="rollout.sampling.temperature")
    if config.rollout.sampling.keep_support and not engine.capabilities.support:
        raise ConfigError(
            f"rollout.sampling.keep_support is true and engine.kind {config.engine.kind!r} does not record the tokens that "
            "top_p and top_k keep; use the engine embedded or vllm, or remove keep_support"
        )
    if routes is not None and config.algorithm.routing.replay == "on" and not engine.capabilities.routes:
        raise ConfigError(
            f"algorithm.routing.replay is on and engine.kind {config.engine.kind!r} does not report the experts of "
            "tokens; set replay to auto or off, or use the engine embedded, vllm or sglang"
        )
    return engine


def sends_adapter(source: ConfigSource, model: PreTrainedModel) -> bool:
    """Return whether servers are sent only the adapter of `model`, and keep the base weights."""
    engine = source.config.engine
    if not source.trains or source.config.model.lora is None or not isinstance(engine, ServerOptions):
        return False
    if engine.weights != "auto" or engine.kind != "sglang":
        return engine.weights == "adapter"
    return _adapter_problem(engine, model) is None


def _adapter_problem(engine: ServerOptions, model: PreTrainedModel) -> str | None:
    """Return why SGLang servers cannot serve the adapter of `model`; None if they can. vLLM servers report it themselves."""
    from polyturn.engines.routers import beside_experts
    from polyturn.training.lora import adapted_layers
    from polyturn.training.modality_encoders import encoders_of

    if engine.kind != "sglang":
        return None
    if engine.update == "sleep":
        return "engine.update is sleep, in which a server drops its base weights"
    layers = adapted_layers(model)
    if (problem := _module_problem(engine, layers)) is not None:
        return problem
    inside = {module for encoder in encoders_of(model) for module in encoder.modules()}
    if not inside.isdisjoint(layers.values()):
        return "SGLang adapts only the language model, and model.lora also adapts an encoder of images or sound"
    if any(name.endswith(_FEED_FORWARD) for name in layers) and any(beside_experts(layer)[0] for layer in model.modules()):
        return "SGLang adapts only attention in a model with experts, and model.lora also adapts feed-forward layers"
    return None


def _module_problem(engine: ServerOptions, names: Iterable[str]) -> str | None:
    """Return why SGLang servers cannot serve an adapter of these modules, judged by the last part of each name, or None."""
    from polyturn.engines.sglang import SglangEngine

    return None if engine.kind != "sglang" else SglangEngine.adapter_problem({name.rpartition(".")[2] for name in names})


def _explain_merged(engine: ServerOptions, problem: str | None) -> None:
    """Refuse the transport `adapter` because of `problem`; for `auto`, log why the merged weights are sent."""
    if problem is not None and engine.weights == "adapter":
        raise ConfigError(f"engine.weights is adapter, and {problem}; remove engine.weights to send the merged weights")
    if problem is not None and engine.weights == "auto":
        logger.warning("servers are sent the adapter merged into the weights: %s", problem)


def untrained(source: ConfigSource) -> ConfigSource:
    """Return the configuration for a command without training: servers load the whole model and are sent no weights."""
    engine = source.config.engine
    if isinstance(engine, ServerOptions) and engine.weights == "adapter":
        engine = dataclasses.replace(engine, weights="auto")
    return dataclasses.replace(source, config=source.config.model_copy(update={"engine": engine}), trains=False)


def _foreign(build: Callable[..., Any], setup: EngineSetup, options: OwnEngineOptions) -> Engine:
    """Make a user's engine, wrapped to contain its failures; a pool is returned as it is."""
    with plugin_errors_as(f"engine.kind: {options.kind!r} cannot be made; it", ConfigError):
        engine = build(setup, **options.kwargs)
        # `isinstance` evaluates the protocol's properties, which are the user's code and may raise.
        is_engine, is_pool = isinstance(engine, Engine), isinstance(engine, EnginePool)
    if not is_engine:
        needs = "a function that returns an engine with all members of polyturn.core.protocols.Engine"
        raise wrong_kind(engines.group, options.kind, engine, where="engine.kind", needs=needs)
    vocab_size = int(setup.model.config.get_text_config().vocab_size)
    return engine if is_pool else ForeignEngine(engine, vocab_size=vocab_size, timeout_s=options.timeout_s)


def route_shape(source: ConfigSource, model: PreTrainedModel) -> RouteShape | None:
    """Return the shape of the model's routes if training replays them; None otherwise.

    Raises:
        ConfigError: `algorithm.routing` is set for a model without experts.
    """
    from polyturn.engines.routers import Routers

    routing = source.config.algorithm.routing
    if routing.replay == "off" and not routing.balance_coef:
        return None
    routers = Routers.of(model)
    if routers is None and (routing.replay == "on" or routing.balance_coef):
        name = "replay is on" if routing.replay == "on" else f"balance_coef is {routing.balance_coef:g}"
        raise ConfigError(
            f"algorithm.routing.{name} and {type(model).__name__} has no experts; remove algorithm.routing, or train a "
            "mixture of experts"
        )
    return None if routers is None or routing.replay == "off" else routers.shape


def check_engine(source: ConfigSource) -> None:
    """Check before weights are loaded that the engine exists, can be sent an adapter if it must, and can write its logs."""
    find_engine(source)
    options = source.config.engine
    if isinstance(options, ServerOptions) and options.weights == "adapter":
        lora = source.config.model.lora
        if lora is None:
            raise ConfigError(
                "engine.weights is adapter, and model.lora is not set, so there is no adapter to send; set model.lora, or "
                "remove engine.weights"
            )
        if not isinstance(lora.target_modules, str):  # a text such as all-linear selects modules only once there is a model
            _explain_merged(options, _module_problem(options, lora.target_modules))
    if isinstance(options, ServerOptions) and options.launch is not None:
        for number in range(options.launch.replicas):
            if (log := options.launch.log_of(number)) is not None:
                check_file_writable(log, instead="name another engine.launch.log")


def find_engine(source: ConfigSource) -> Callable[..., Any]:
    """Return the function that makes the engine `engine.kind`."""
    config = source.config.engine
    build = engines.resolve(config.kind, base=source.base, key="engine.kind")
    if not callable(build):
        needs = "a function (setup, **kwargs) that returns an engine"
        raise wrong_kind(engines.group, config.kind, build, where="engine.kind", needs=needs)
    known = list(inspect.signature(build).parameters)[1:]
    kwargs = config.kwargs if isinstance(config, OwnEngineOptions) else {}
    for name in kwargs:
        if name not in known and not takes_any_keyword(build):
            hint = did_you_mean(name, known) if known else " It has no arguments."
            raise ConfigError(f"engine.kwargs: the engine {config.kind!r} has no argument {name!r}.{hint}")
    try:
        inspect.signature(build).bind(None, **kwargs)
    except TypeError as problem:
        raise ConfigError(f"engine.kwargs: the engine {config.kind!r} cannot be made with them ({problem})") from problem
    return build


def servable_folder(
    source: ConfigSource,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast,
    media: MediaProcessor | None,
    checkpoint: Path | None,
) -> ModelFolder:
    """Return a folder from which a server can load the model, without the adapter if that is sent separately."""
    from polyturn.training import hf

    path = source.config.model.path
    local = checkpoint or (None if path is None or isinstance(path, LiveObject) else Path(folder_or_name(path, source.base)))
    lora = source.config.model.lora
    alone = checkpoint is None and sends_adapter(source, model)
    is_whole = checkpoint is not None or lora is None or lora.adapter is None or alone
    has_all = local is not None and (local / "config.json").is_file() and (media is None or checkpoint is None)
    if local is not None and is_whole and has_all:
        return ModelFolder(local, is_temporary=False)
    folder = Path(tempfile.mkdtemp(prefix="polyturn-model-"))
    hf.save_model(model, folder, tokenizer=tokenizer, merged=not alone)
    if media is not None:
        media.processor.save_pretrained(folder)
    return ModelFolder(folder, is_temporary=True)
