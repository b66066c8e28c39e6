"""Whether a run fits into the memory of the machine that it starts on: said in a dry run, and before weights are loaded.

    verdict_of(config, size, held, layout=layout, max_context=4096)
      ->  "does not fit: at most 24.3 GB of 7.8 GB; lower engine.num_slots or rollout.limits.max_context (KV cache, 23.1 GB)"

A run whose weights, gradients and optimizer alone are larger than the memory would be killed in the middle of its start, so
it is refused. The other parts are upper estimates: lengths are the limits.
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
    "parameters": "take a smaller model (model.path)",
    "weights of the servers": "lower engine.launch.replicas, or take a smaller model (model.path)",
    "float32 masters": "set model.lora",
    "gradients": "set model.lora",
    "moments of AdamW": "set model.lora",
    "frozen models": "leave out the model that is only scored (algorithm.loss.kl, algorithm.loss.distill)",
    "KV cache of the engine": "lower engine.num_slots or rollout.limits.max_context",
    "KV cache of the servers": "lower rollout.limits.max_context",
}
"""What to change where a part needs most; all other parts grow with train.max_tokens_per_batch."""
_OF_A_BATCH = "lower train.max_tokens_per_batch, or set model.gradient_checkpointing"
_CERTAIN = ("parameters", "float32 masters", "gradients", "moments of AdamW")


class MemoryVerdict(NamedTuple):
    """Whether a run fits into memory."""

    needed: int
    """Bytes, at most."""
    available: int
    """Bytes of the machine, or of a GPU."""
    where: str
    """"this machine" or "a GPU"."""
    largest: str
    """The part that needs most."""
    largest_bytes: int

    @property
    def fits(self) -> bool:
        """Whether there is as much memory as the run may need."""
        return self.needed <= self.available

    def __str__(self) -> str:
        sizes = f"at most {self.needed / GB:.1f} GB of the {self.available / GB:.1f} GB of {self.where}"
        if self.fits:
            return f"fits: {sizes}"
        advice = _KEYS.get(self.largest, _OF_A_BATCH)
        return f"does not fit: {sizes}; {advice} ({self.largest}: {self.largest_bytes / GB:.1f} GB)"


def verdict_of(
    config: RunConfig, size: ModelSize, bytes_by_part: Mapping[str, int], *, layout: GpuLayout, max_context: int
) -> MemoryVerdict | None:
    """Return whether a run fits here; None if it would run on other machines, or on GPUs that are not here.

    Args:
        config: Of the run.
        size: Of its model.
        bytes_by_part: The bytes of each part of a rank, with the embedded engine's cache.
        layout: Its processes.
        max_context: Tokens of the longest conversation.
    """
    import torch

    launch = config.engine.launch if isinstance(config.engine, ServerOptions) else None
    if config.cluster.address is not None:
        return None
    if torch.cuda.is_available():
        if layout.is_shared:
            return None  # which phase needs most is what `polyturn plan` says
        return _verdict(bytes_by_part, available=torch.cuda.get_device_properties(0).total_memory, where="a GPU")
    if launch is not None and launch.devices:
        return None
    parts = {name: num * layout.ranks for name, num in bytes_by_part.items()}
    if layout.servers:
        each = server_bytes(size, tokens=max_context)
        parts |= {f"{name} of the servers": num * layout.servers for name, num in each.items()}
    return _verdict(parts, available=machine_memory(), where="this machine")


def require_memory(source: ConfigSource) -> None:
    """Refuse a run whose weights, gradients and optimizer alone are larger than the memory; no weights are read for it.

    Raises:
        ConfigError: they are, so the system would kill the run.
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
