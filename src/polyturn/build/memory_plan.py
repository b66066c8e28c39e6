"""Estimate the memory of each process of a run, compare it with this machine's, and find the nearest layout that fits.

    demand_of(source).tables(layout_of(config))  ->  {"each of 4 ranks": {"parameters": …, …}, …}
    verdict_of(config, size, bytes_by_part, layout=layout, max_context=4096)
      ->  "does not fit: about 24.3 GB are needed and this machine has 7.8 GB; lower engine.num_slots or
          rollout.limits.max_context (KV cache of the engine: 23.1 GB)"

Used by the dry run, for this machine or for the GPUs of `--gpus`. Before weights are loaded, `require_memory` raises if the
weights, gradients and optimizer alone exceed the memory, because the system would kill the run. The other parts are
estimates, computed from the limits of turns, so they only count in the dry run's verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from polyturn.build.algorithm import build_estimator
from polyturn.build.engine import sends_adapter
from polyturn.build.model import build_codec, build_outline, max_context_of, outline_of
from polyturn.build.ranks import row_width
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.infra.machine_memory import machine_memory
from polyturn.training import lora
from polyturn.training.memory import ModelSize, RankLoad, rank_bytes, server_bytes, shared_bytes, sync_seconds
from polyturn.training.options import BACKEND

GB = 10**9
USABLE = 0.9
"""Share of a GPU's memory that is usable; the rest is for CUDA and for gaps between blocks."""
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


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parameters_of(size: ModelSize) -> str:
    """Return the number of parameters in millions or billions: "134.52 M parameters, 0.46 M of them trained"."""

    def short(number: int) -> str:
        return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.2f} M"

    return f"{short(size.parameters)} parameters, {short(size.trained)} of them trained"


class GpuLayout(NamedTuple):
    """How GPUs are divided among ranks and servers."""

    ranks: int
    servers: int
    width: int
    """Number of GPUs of a server, by tensor parallelism."""
    is_shared: bool = False
    """Whether the servers are on the ranks' GPUs, and sleep during an update."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the layout needs."""
        servers = self.servers * self.width
        return max(self.ranks, servers) if self.is_shared else self.ranks + servers

    def __str__(self) -> str:
        servers = f" and {counted(self.servers, 'server')} of {counted(self.width, 'GPU')}" if self.servers else ""
        return f"{counted(self.ranks, 'rank')}{servers}{', on the same GPUs' if self.is_shared else ''}"


class Demand(NamedTuple):
    """A run's memory demands, independent of the layout."""

    size: ModelSize
    load: RankLoad
    context: int
    """Tokens of the longest conversation; a server's KV cache must have room for at least one."""
    row: int = 1
    """Number of ranks that see the same samples; the number of ranks is a multiple of it."""
    adapter_only: bool = False
    """Whether servers are sent only the adapter."""

    def rank(self, ranks: int) -> dict[str, int]:
        """Return the bytes of one of `ranks` ranks, by part."""
        return rank_bytes(self.size, replace(self.load, ranks=ranks))

    def server(self, width: int) -> dict[str, int]:
        """Return the bytes on each GPU of a server over `width` GPUs, by part."""
        return server_bytes(self.size, tensor_parallel=width, tokens=self.context)

    def tables(self, layout: GpuLayout) -> dict[str, dict[str, int]]:
        """Return the bytes, by part, of each kind of process, or if they share GPUs, of a GPU in each phase."""
        if layout.is_shared:
            load = replace(self.load, ranks=layout.ranks)
            phases = shared_bytes(self.size, load, tensor_parallel=layout.width, tokens=self.context)
            return {f"each GPU {phase}": bytes_by_part for phase, bytes_by_part in phases.items()}
        tables = {"each rank": self.rank(layout.ranks)}
        if layout.servers:
            tables["each GPU of a server, at least"] = self.server(layout.width)
        return tables

    def fits(self, layout: GpuLayout, *, limit: int) -> bool:
        """Return whether no GPU of a layout ever holds more than `limit` bytes."""
        return all(sum(bytes_by_part.values()) <= limit for bytes_by_part in self.tables(layout).values())

    def at_rest(self, layout: GpuLayout) -> int:
        """Return the bytes that other processes keep on a server's GPU during rollout; 0 if the server has it alone."""
        if not layout.is_shared:
            return 0
        return sum(self.tables(layout)["each GPU in rollout"].values()) - sum(self.server(layout.width).values())


def memory_of(tables: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Return the parts and the total of each process as text: {"each rank: gradients": "12.29 GB"}."""
    lines: dict[str, str] = {}
    for title, bytes_by_part in tables.items():
        lines |= {f"{title}: {name}": _amount(num) for name, num in bytes_by_part.items() if num}
        lines[f"{title}: total"] = _amount(sum(bytes_by_part.values()))
    return lines


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB // 10 else f"{num_bytes / 10**6:.2f} MB"


def columns(lines: Mapping[str, str]) -> str:
    """Return names and values as lines in two columns."""
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in lines.items())


class Gpus(NamedTuple):
    """The kind of GPUs that a run is planned for."""

    memory: float
    """Memory of each GPU, in GB."""
    link: float
    """Bandwidth from the ranks to a server, in GB/s."""

    @property
    def limit(self) -> int:
        """Usable bytes of each GPU."""
        return int(self.memory * GB * USABLE)

    def estimates(self, config: RunConfig, demand: Demand, layout: GpuLayout) -> dict[str, str]:
        """Return the memory of each process of a run, the room of its servers and the time of a weight sync, as text."""
        lines = {"model": parameters_of(demand.size), "layout": str(layout)} | memory_of(demand.tables(layout))
        if num_offloaded := demand.load.num_offloaded:  # masters, moments and summed gradients in float32
            lines["offloaded optimizers of all ranks, not on the GPUs"] = _amount(num_offloaded * demand.size.trained * 16)
        if layout.servers:
            left = self.limit - demand.at_rest(layout)
            if layout.is_shared:
                lines["share of a GPU that is left to a server"] = f"{max(0.0, left / (self.memory * GB)):.2f}"
            room = left - demand.server(layout.width)["weights"]
            tokens = room // max(1, server_bytes(demand.size, tensor_parallel=layout.width, tokens=1)["KV cache"])
            lines["room for conversations of a server"] = f"{max(0, tokens)} tokens"
            seconds = sync_seconds(demand.size, link=self.link * GB, adapter_only=demand.adapter_only)
            lines["new weights to all servers"] = f"{seconds:.2f} s over {self.link:g} GB/s"
        return lines


def demand_of(source: ConfigSource) -> Demand:
    """Return a run's demands, without reading weights."""
    config = source.config
    model = build_outline(source, build_codec(source).tokenizer)
    if config.model.lora is not None:
        lora.add_lora(model, config.model.lora, seed=config.seed)
    load = load_of(source, tokens=config.train.max_tokens_per_batch)
    context = max_context_of(config.rollout.limits.max_context, model)
    size = ModelSize.of(model, engine=config.engine.kind)
    return Demand(size, load, context, row_width(config), sends_adapter(source, model))


def load_of(source: ConfigSource, *, tokens: int, on_gpu: bool = True) -> RankLoad:
    """Return the load of each rank, with `tokens` per micro-batch."""
    from polyturn.algorithms.advantages import traits_of

    config = source.config
    split, is_torch = config.train.distributed, config.train.backend == BACKEND
    needs_values = traits_of(build_estimator(source)).needs_values
    # With an adapter, the reference is the model without the adapter, so there is no copy.
    has_copy = config.algorithm.has_kl and (config.model.lora is None or config.model.reference is not None)
    return RankLoad(
        ranks=max(1, config.train.distributed.ranks),
        expert_parallel=split.expert_parallel if is_torch else 1,
        context_parallel=split.context_parallel,
        megatron=None if is_torch else split,
        num_trained=1 + needs_values,
        num_offloaded=config.train.optim.offload + (needs_values and config.algorithm.critic.optim.offload),
        num_frozen=has_copy + (config.algorithm.loss.distill is not None),
        tokens=tokens,
        recomputes=config.model.gradient_checkpointing,
        keeps_whole_gradient=split.gradient_sync == "last",
        on_gpu=on_gpu,
    )


def layout_of(config: RunConfig) -> GpuLayout:
    """Return the configured layout, on one machine or on a cluster."""
    ranks, engine, actors = max(1, config.train.distributed.ranks), config.engine, config.cluster.engines
    if isinstance(engine, ServerOptions) and engine.urls:
        return GpuLayout(ranks, 0, 0)
    is_shared = engine.update == "sleep"
    if "GPU" in actors.resources:
        return GpuLayout(ranks, actors.count, max(1, int(actors.resources["GPU"])), is_shared)
    if not isinstance(engine, ServerOptions):
        return GpuLayout(ranks, 0, 0)
    launch = engine.launch
    replicas = 1 if launch is None else launch.replicas
    width = len(launch.devices[0].split(",")) if launch is not None and launch.devices else 1
    return GpuLayout(ranks, replicas, width, is_shared)


def require_fit(demand: Demand, layout: GpuLayout, *, gpus: int, limit: int) -> None:
    """Raise if a layout needs more GPUs, or more memory on a GPU, than available; the error names the nearest that fits."""
    takes = f"it takes {counted(layout.gpus, 'GPU')} and there {'is' if gpus == 1 else 'are'} {gpus}"
    wrong = [takes] if layout.gpus > gpus else []
    for title, bytes_by_part in demand.tables(layout).items():
        if (num := sum(bytes_by_part.values())) > limit:
            wrong.append(f"{title} holds {num / GB:.1f} GB")
    if not wrong:
        return
    layout_that_fits = nearest(demand, layout, gpus=gpus, limit=limit)
    add = "add GPUs" if demand.load.megatron is None else "raise tensor_parallel or pipeline_parallel (train.distributed)"
    advice = f"no layout on {gpus} GPUs fits; lower train.max_tokens_per_batch, set gradient_checkpointing, or {add}"
    if layout_that_fits is not None:
        advice = f"{layout_that_fits} would fit (train.distributed.ranks, cluster.engines.count and resources)"
    elif (split := with_split_context(demand, layout, gpus=gpus, limit=limit)) is not None:
        advice = f"{split[1]} would fit with train.distributed.context_parallel: {split[0]}, which splits long conversations"
    raise ConfigError(
        f"the layout, {layout}, does not fit: {'; '.join(wrong)}; {limit / GB:.1f} GB of a GPU can be used. {advice}"
    )


def nearest(demand: Demand, layout: GpuLayout, *, gpus: int, limit: int) -> GpuLayout | None:
    """Return the nearest layout that fits: first add ranks, then remove servers or widen them; None if there is none."""
    if layout.is_shared:
        more = range(layout.ranks, gpus + 1, demand.row)
        same = (GpuLayout(n, n // w, w, is_shared=True) for n in more for w in _doubled(layout.width, n) if n % w == 0)
        return next((one for one in same if demand.fits(one, limit=limit)), None)
    wide = (w for w in _doubled(layout.width, gpus) if sum(demand.server(w).values()) <= limit)
    width = next(wide, None) if layout.servers else 0
    ranks = next((n for n in range(layout.ranks, gpus + 1, demand.row) if sum(demand.rank(n).values()) <= limit), None)
    if ranks is None or width is None:
        return None
    servers = min(layout.servers, (gpus - ranks) // width) if width else 0
    return GpuLayout(ranks, servers, width) if ranks <= gpus and (servers or not layout.servers) else None


def with_split_context(demand: Demand, layout: GpuLayout, *, gpus: int, limit: int) -> tuple[int, GpuLayout] | None:
    """Return the smallest context_parallel with which a layout fits, and that layout; None if there is none."""
    for parts in _doubled(2 * demand.load.context_parallel, gpus):
        row = demand.row // demand.load.context_parallel * parts
        of_rows = layout._replace(ranks=-(-layout.ranks // row) * row)
        split = demand._replace(load=replace(demand.load, context_parallel=parts), row=row)
        if (layout_that_fits := nearest(split, of_rows, gpus=gpus, limit=limit)) is not None:
            return parts, layout_that_fits
    return None


def _doubled(width: int, most: int) -> list[int]:
    widths = [max(1, width)]
    while widths[-1] * 2 <= most:
        widths.append(widths[-1] * 2)
    return widths


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
    """Return the verdict for this machine; None if the run uses other machines, GPUs that this machine lacks, or GPUs that
    ranks share with servers.

    `bytes_by_part` has the parts of a rank, with the embedded engine's cache.
    """
    import torch

    launch = config.engine.launch if isinstance(config.engine, ServerOptions) else None
    if config.cluster.address is not None:
        return None
    if torch.cuda.is_available():  # for shared GPUs, `--dry-run --gpus` shows the memory of each phase
        return None if layout.is_shared else _verdict(bytes_by_part, on_gpu=True)
    if launch is not None and launch.devices:
        return None
    parts = {name: num * layout.ranks for name, num in bytes_by_part.items()}
    if layout.servers:
        each = server_bytes(size, tokens=max_context)
        parts |= {f"{name} of the servers": num * layout.servers for name, num in each.items()}
    return _verdict(parts, on_gpu=False)


def require_memory(source: ConfigSource) -> None:
    """Raise if weights, gradients and optimizer alone exceed the memory. This reads no weights."""
    import torch

    config = source.config
    if config.cluster.address is not None or not isinstance(config.model.path, str):
        return
    model = outline_of(source, config.model.path)
    if config.model.lora is not None:
        lora.add_lora(model, config.model.lora, seed=config.seed)
    on_gpu = torch.cuda.is_available()
    bytes_by_part = rank_bytes(ModelSize.of(model), load_of(source, tokens=0, on_gpu=on_gpu))
    verdict = _verdict({name: bytes_by_part[name] for name in _CERTAIN}, on_gpu=on_gpu)
    if not verdict.fits:
        raise ConfigError(
            f"model.path is {config.model.path!r}, which needs {verdict.needed / GB:.1f} GB for weights, gradients and the "
            f"optimizer alone, and {verdict.where} has {verdict.available / GB:.1f} GB; {_KEYS[verdict.largest]}"
        )


def _verdict(parts: Mapping[str, int], *, on_gpu: bool) -> MemoryVerdict:
    import torch

    available = torch.cuda.get_device_properties(0).total_memory if on_gpu else machine_memory()
    largest = max(parts, key=lambda name: parts[name])
    return MemoryVerdict(sum(parts.values()), available, "a GPU" if on_gpu else "this machine", largest, parts[largest])
