"""From the `engine` section to an engine: the embedded one over the trainer's parameters, or a client of a server."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from polyturn.build.place import Place
from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from polyturn.engines.embedded import EmbeddedEngine
    from polyturn.engines.launcher import LaunchSpec
    from polyturn.engines.remote import RemoteEngine
    from polyturn.tokens.multimodal import MediaProcessor


def build_engine(
    place: Place,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast,
    media: MediaProcessor | None,
    max_context: int,
    checkpoint: Path | None,
) -> EmbeddedEngine | RemoteEngine:
    """Make the engine that `engine.kind` names. A server is started when it is first asked.

    Raises:
        ConfigError: the engine cannot do what the run needs, or is not installed.
    """
    from polyturn.engines.embedded import EmbeddedEngine

    config = place.config.engine
    if config.kind != "embedded":
        _check(place, has_media=media is not None)
        return _served(place, model, tokenizer=tokenizer, max_context=max_context, checkpoint=checkpoint)
    return EmbeddedEngine(
        model,
        media=media,
        num_slots=config.num_slots,
        max_context=max_context,
        prefill_chunk=config.prefill_chunk,
        deterministic=config.deterministic,
    )


def _check(place: Place, *, has_media: bool) -> None:
    config, sampling = place.config.engine, place.config.rollout.sampling
    if has_media:
        raise ConfigError(f"the {config.kind} client sends text only, and the model takes media; use engine.kind: embedded")
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
    place: Place,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast,
    max_context: int,
    checkpoint: Path | None,
) -> RemoteEngine:
    from polyturn.engines.sglang import SglangEngine
    from polyturn.engines.vllm import VllmEngine

    config = place.config.engine
    clients: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
    folder, is_temporary = _model_folder(place, model, tokenizer=tokenizer, checkpoint=checkpoint)
    return clients[config.kind](
        config.urls[0] if config.urls else "",
        vocab_size=int(model.config.get_text_config().vocab_size),
        max_context=max_context,
        max_in_flight=config.max_in_flight,
        timeout_s=config.timeout_s,
        model=folder,
        owns_model=is_temporary,
        launch=None if config.urls else _launch(place, folder, max_context=max_context),
    )


def _model_folder(
    place: Place, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerFast, checkpoint: Path | None
) -> tuple[Path, bool]:
    """Return a folder that a server can load the model from, and whether it was made for that."""
    from polyturn.training import hf

    path = place.config.model.path
    local = checkpoint or (None if path is None else place.base / path)
    if local is not None and (local / "config.json").is_file():
        return local, False
    folder = Path(tempfile.mkdtemp(prefix="polyturn-model-"))
    hf.save_model(model, folder, tokenizer=tokenizer)
    return folder, True


def _launch(place: Place, folder: Path, *, max_context: int) -> LaunchSpec:
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
    spec = SERVE_COMMANDS[kind](
        python=launch.python or sys.executable,
        model=folder.resolve(),
        max_context=max_context,
        device="cuda" if torch.cuda.is_available() else "cpu",
        args=launch.args,
        env=launch.env,
    )
    log = None if launch.log is None else Path(launch.log)
    return dataclasses.replace(spec, ready_timeout_s=launch.ready_timeout_s, log=log)
