"""Choose and check the training backend, from `train.backend` and `train.distributed`."""

from __future__ import annotations

import dataclasses

from polyturn.build.model import build_codec, build_outline
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.training.options import BACKEND, Degrees


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
    """Raise if the backend does not exist or cannot split the model, judged by the model's config.

    Raises:
        ConfigError: the backend does not exist, is not installed, or cannot split the model.
    """
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
    """Raise if `offload` is set for an optimizer that cannot be offloaded, or that has little state to offload.

    Raises:
        ConfigError: `offload` cannot be used.
    """
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
