"""Check the training backend, and build the ranks: the controller builds all parts, each rank its share of the model.

controller   build_parts, with a group of ranks      only it has tools, rewards, engine, tasks
rank         model_of, rank_of                       tokenizer and shards of the model, then the controller's commands
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.build.algorithm import build_distilled, build_loss, build_reference, critic_model, critic_options
from polyturn.build.model import build_codec, build_media, build_model, build_outline, set_up_torch
from polyturn.build.parts import Parts
from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.infra.plugins import load_plugins
from polyturn.training.options import BACKEND, Degrees, OptimSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from polyturn.tokens.multimodal import MediaProcessor
    from polyturn.training.model_backend import ModelBackend, Placement
    from polyturn.training.rank_group import Held, RankWorker


def row_width(config: RunConfig) -> int:
    """Return the number of ranks that share the same samples: the product of the tensor, pipeline and context degrees."""
    split = config.train.distributed
    return split.tensor_parallel * split.pipeline_parallel * split.context_parallel


def packs_rows(config: RunConfig, *, on_gpu: bool) -> bool:
    """Return whether samples are packed end to end.

    Raises:
        ConfigError: the layout is padded rows, and ranks split tokens.
    """
    name, parts = config.train.layout.name, config.train.distributed.context_parallel
    if name == "rows" and parts > 1:
        raise ConfigError(
            f"train.layout is rows, but train.distributed.context_parallel ({parts}) only splits packed rows; remove "
            "train.layout, or set context_parallel to 1"
        )
    return name == "packed" or (name == "auto" and (on_gpu or parts > 1))


def check_backend(source: ConfigSource) -> None:
    """Raise if the backend does not exist, is not installed, or cannot split the model, judged by the model's config."""
    from polyturn.training.backend import backends
    from polyturn.training.lora import add_lora

    config = source.config
    is_torch = config.train.backend == BACKEND
    packs_rows(config, on_gpu=False)
    _check_offload(config)
    degrees = config.train.distributed
    if is_torch and dataclasses.replace(degrees, ranks=1) == Degrees():
        return
    backend = backends.resolve(config.train.backend, base=source.base, key="train.backend")
    outline = build_outline(source, build_codec(source).tokenizer)
    if config.model.lora is not None:
        add_lora(outline, config.model.lora, seed=config.seed)
    backend.check(outline, degrees)


def _check_offload(config: RunConfig) -> None:
    """Raise if `offload` is set for an optimizer that cannot be offloaded, or that has little state to offload."""
    optims = {
        "train.optim": config.train.optim,
        "warm_start.optim": config.warm_start.optim,
        "algorithm.critic.optim": config.algorithm.critic.optim,
    }
    key = next((key for key, optim in optims.items() if optim.offload), None)
    if key is None:
        return
    split = config.train.distributed
    for is_so, why in (
        (config.model.lora is not None, "model.lora is set; the optimizer of an adapter is small, so remove offload"),
        (config.model.dtype == "float32", "model.dtype is float32, without master weights; set model.dtype: bfloat16"),
        (
            config.train.backend != BACKEND or split.tensor_parallel > 1,
            f"train.backend is {config.train.backend} with tensor_parallel {split.tensor_parallel}, whose optimizer "
            f"step sums gradients on the GPUs; set train.backend: {BACKEND} and tensor_parallel: 1",
        ),
    ):
        if is_so:
            raise ConfigError(f"{key}.offload is true and {why}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """The settings of a policy that differ between a warm start and training."""

    optim: OptimSettings
    """The optimizer, with warm-up and schedule in optimizer updates of the whole run (`OptimSettings.over`)."""
    max_tokens_per_batch: int


def policy_options(
    source: ConfigSource, spec: PolicySpec, model: PreTrainedModel, media: MediaProcessor | None, *, has_frozen: bool = True
) -> dict[str, Any]:
    """Return the options of the backend that trains `model`; with `has_frozen`, load frozen models too."""
    import torch

    from polyturn.batching.layout import LayoutSettings
    from polyturn.training.hf import checkpoint_activations

    train = source.config.train
    if source.config.model.gradient_checkpointing:
        checkpoint_activations(model)
    return {
        "optim": spec.optim,
        "loss": build_loss(source),
        "layout": LayoutSettings(
            max_tokens_per_batch=spec.max_tokens_per_batch,
            packed=packs_rows(source.config, on_gpu=torch.cuda.is_available()),
            shared_prefix=train.layout.shared_prefix == "auto",
        ),
        "media": media,
        "reference": build_reference(source, model) if has_frozen else False,
        "teacher": build_distilled(source, model) if has_frozen else None,
    }


def check_ranks(config: RunConfig) -> None:
    """Raise for configurations that their number of ranks cannot run: a small batch, or an option for one rank only."""
    train = config.train
    split = train.distributed
    num_ranks, wide = split.ranks, row_width(config)
    if num_ranks % wide:
        named = {name: size for name, size in dataclasses.asdict(split).items() if name.endswith("_parallel") and size > 1}
        sizes = ", ".join(f"{name} {size}" for name, size in named.items()).replace(" ", " is ", 1)
        raise ConfigError(f"train.distributed.{sizes} and there are {num_ranks} ranks; use a multiple of {wide} ranks")
    if num_ranks // split.pipeline_parallel % split.expert_parallel:
        raise ConfigError(
            f"train.distributed.expert_parallel is {split.expert_parallel} and {num_ranks // split.pipeline_parallel} ranks "
            "have a layer; their number must be a multiple of expert_parallel"
        )
    trajectories = train.groups_per_step * train.group_size
    if train.minibatches > trajectories:
        raise ConfigError(
            f"train.minibatches is {train.minibatches} and a step has {trajectories} trajectories (train.groups_per_step "
            f"{train.groups_per_step}, group_size {train.group_size}); lower minibatches to at most {trajectories}"
        )
    if num_ranks > 1 and isinstance(config.engine, ServerOptions) and config.engine.weights == "ipc":
        raise ConfigError(
            f"engine.weights is ipc and there are {num_ranks} ranks, each with a part of the weights; ipc works with "
            "one rank only, so set it to auto, which writes a checkpoint to this machine's memory"
        )
    batch, rows = trajectories // train.minibatches, num_ranks // wide
    if batch < rows:
        raise ConfigError(
            f"a batch of {batch} trajectories (train.groups_per_step {train.groups_per_step}, group_size "
            f"{train.group_size}, minibatches {train.minibatches}) is smaller than the {rows} ranks that divide it; raise "
            "groups_per_step, or use fewer ranks"
        )


def holds_weights(source: ConfigSource) -> bool:
    """Return whether the controller needs the whole model: because it trains alone, its engine or another policy uses the
    model, or there is no folder that ranks and servers can read."""
    config = source.config
    model, is_remote = config.model, config.cluster.address is not None
    if config.train.distributed.ranks == 1 and not is_remote:
        return True
    if not (is_remote or isinstance(config.engine, ServerOptions)) or config.policies:
        return True
    is_folder = isinstance(model.path, str) and Path(folder_or_name(model.path, source.base), "config.json").is_file()
    return not is_folder or (model.lora is not None and model.lora.adapter is not None)


def with_rank_here(parts: Parts) -> Parts:
    """Return the parts with the only rank in this process, for a backend that always needs a process group."""
    from polyturn.training.process_group import RankHere, join

    make_model = model_maker(parts.source, parts.tokenizer, model=parts.model)
    rank = rank_of(parts.source, make_model, parts.context.media, join(is_alone=True))
    return dataclasses.replace(parts, rank_group=RankHere(rank))


def model_of(source: ConfigSource) -> tuple[Callable[[], PreTrainedModel], MediaProcessor | None]:
    """Return a function that makes a rank's model, and the media processor, for a process without other parts."""
    load_plugins(source.config.plugins, base=source.base)
    set_up_torch(source.config)
    codec = build_codec(source)
    return model_maker(source, codec.tokenizer), build_media(source, codec, build_outline(source, codec.tokenizer))


def model_maker(
    source: ConfigSource, tokenizer: PreTrainedTokenizerFast, *, model: PreTrainedModel | None = None
) -> Callable[[], PreTrainedModel]:
    """Return a function that makes a rank's model: without weights if the rank can read them in parts, else a copy of
    `model`, the controller's."""
    path = source.config.model.path
    if isinstance(path, str):
        reading = dataclasses.replace(source, reads_parts=True)
        return lambda: build_model(reading, tokenizer)
    whole = model or build_model(source, tokenizer)
    return lambda: copy.deepcopy(whole)


def rank_of(
    source: ConfigSource, make_model: Callable[[], PreTrainedModel], media: MediaProcessor | None, device: torch.device
) -> RankWorker:
    """Return the worker that runs the controller's commands on this rank."""
    from polyturn.training.backend import backends
    from polyturn.training.critic import critic_backend
    from polyturn.training.hf import checkpoint_activations
    from polyturn.training.policy import policy_backend
    from polyturn.training.rank_group import RankWorker

    source, degrees = dataclasses.replace(source, reads_parts=True), source.config.train.distributed

    def placement(start: Mapping[str, torch.Tensor] | None) -> Placement:
        kind = backends.resolve(source.config.train.backend, base=source.base, key="train.backend")
        own_placement: Placement = kind.of(degrees, device, start=start)
        return own_placement

    def policy(spec: PolicySpec, held_models: Held) -> ModelBackend:
        model = make_model()
        began = placement(held_models.get("policy"))  # the weights after a warm start, if there was one
        return policy_backend(model, placement=began, **policy_options(source, spec, model, media))

    def critic(spec: None, held_models: Held) -> ModelBackend:
        model, start = make_model(), None
        if source.config.algorithm.critic.path is None:
            start = held_models["policy"]
        else:
            model = critic_model(source, like=model)
        if source.config.model.gradient_checkpointing:
            checkpoint_activations(model)
        return critic_backend(model, placement=placement(start), media=media, **critic_options(source))

    return RankWorker({"policy": policy, "critic": critic})
