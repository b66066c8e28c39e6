"""Check whether a run fits into the memory of its machine, in a dry run and before weights are loaded.

    verdict_of(config, size, bytes_by_part, layout=layout, max_context=4096)
      ->  "does not fit: about 24.3 GB are needed and this machine has 7.8 GB; lower engine.num_slots or
          rollout.limits.max_context (KV cache of the engine: 23.1 GB)"

If the weights, gradients and optimizer alone exceed the memory, the system would kill the run, so `require_memory` raises.
The other parts are estimates, computed from the limits of turns, so they only count in the dry run's verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polyturn.build.gpu_plan import GB, GpuLayout, load_of
from polyturn.build.model import outline_of
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.infra.machine_memory import machine_memory
from polyturn.training import lora
from polyturn.training.memory import ModelSize, rank_bytes, server_bytes

_KEYS = {
    "parameters": "use a smaller model (model.path)",
    "weights of the servers": "lower engine.launch.replicas, or use a smaller model (model.path)",
    "float32 masters": "set model.lora",
    "gradients": "set model.lora",
    "moments of AdamW": "set model.lora",
    "whole gradient until the last micro-batch": "set model.lora",
    "gathered blocks": "use a smaller model (model.path)",
    "buffer of the largest gradient": "use a smaller model (model.path)",
    "frozen models": "remove the reference or teacher (algorithm.kl, algorithm.loss.distill)",
    "KV cache of the engine": "lower engine.num_slots or rollout.limits.max_context",
    "KV cache of the servers": "lower rollout.limits.max_context",
}
"""Largest part -> advice."""
_OF_A_BATCH = "lower train.max_tokens_per_batch, or set model.gradient_checkpointing"
"""Advice for all other parts."""
_CERTAIN = ("parameters", "float32 masters", "gradients", "moments of AdamW")


class MemoryVerdict(NamedTuple):
    """The memory that a run needs, and the memory that is available."""

    needed: int
    """Upper bound, in bytes."""
    available: int
    """Bytes of the machine or of a GPU."""
    where: str
    """"this machine" or "a GPU"."""
    largest: str
    """The part that needs the most memory."""
    largest_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the available memory is enough."""
        return self.needed <= self.available

    def __str__(self) -> str:
        sizes = f"about {self.needed / GB:.1f} GB are needed and {self.where} has {self.available / GB:.1f} GB"
        if self.fits:
            return f"fits: {sizes}"
        advice = _KEYS.get(self.largest, _OF_A_BATCH)
        return f"does not fit: {sizes}; {advice} ({self.largest}: {self.largest_bytes / GB:.1f} GB)"


def verdict_of(
    config: RunConfig, size: ModelSize, bytes_by_part: Mapping[str, int], *, layout: GpuLayout, max_context: int
) -> MemoryVerdict | None:
    """Return the verdict for this machine; None if the run uses other machines, GPUs that this machine
    lacks, or GPUs that ranks share with servers.

    Args:
        config: The run's configuration.
        size: Sizes of the model.
        bytes_by_part: The bytes of each part of a rank, with the embedded engine's cache.
        layout: The run's processes.
        max_context: Tokens of the longest conversation.
    """
    import torch

    launch = config.engine.launch if isinstance(config.engine, ServerOptions) else None
    if config.cluster.address is not None:
        return None
    if torch.cuda.is_available():
        if layout.is_shared:
            return None  # `--dry-run --gpus` shows the memory of each phase
        return _verdict(bytes_by_part, available=torch.cuda.get_device_properties(0).total_memory, where="a GPU")
    if launch is not None and launch.devices:
        return None
    parts = {name: num * layout.ranks for name, num in bytes_by_part.items()}
    if layout.servers:
        each = server_bytes(size, tokens=max_context)
        parts |= {f"{name} of the servers": num * layout.servers for name, num in each.items()}
    return _verdict(parts, available=machine_memory(), where="this machine")


def require_memory(source: ConfigSource) -> None:
    """Raise if weights, gradients and optimizer alone exceed the memory. This reads no weights.

    Raises:
        ConfigError: they exceed it, so the system would kill the run.
    """
    import torch

    config = source.config
    if config.cluster.address is not None or not isinstance(config.model.path, str):
        return
    model = outline_of(source, config.model.path)
    if config.model.lora is not None:
        lora.add_lora(model, config.model.lora, seed=config.seed)
    on_gpu = torch.cuda.is_available()
    bytes_by_part = rank_bytes(ModelSize.of(model), load_of(source, tokens=0, on_gpu=on_gpu))
    certain = {name: bytes_by_part[name] for name in _CERTAIN}
    where = "a GPU" if on_gpu else "this machine"
    available = torch.cuda.get_device_properties(0).total_memory if on_gpu else machine_memory()
    verdict = _verdict(certain, available=available, where=where)
    if not verdict.fits:
        raise ConfigError(
            f"model.path is {config.model.path!r}, which needs {verdict.needed / GB:.1f} GB for weights, gradients and the "
            f"optimizer alone, and {where} has {available / GB:.1f} GB; {_KEYS[verdict.largest]}"
        )


def _verdict(parts: Mapping[str, int], *, available: int, where: str) -> MemoryVerdict:
    largest = max(parts, key=lambda name: parts[name])
    return MemoryVerdict(sum(parts.values()), available, where, largest, parts[largest])
