"""`polyturn plan CONFIG --gpus 64 --gpu-memory 80`: the memory of each process on such GPUs, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from polyturn import build
from polyturn.api.folders import open_place
from polyturn.build.backend import degrees_of
from polyturn.build.credit import build_estimator
from polyturn.build.model import build_outline
from polyturn.build.parts import max_context_of
from polyturn.cli.console import Output
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.training import lora
from polyturn.training.memory import ModelSize, RankLoad, rank_bytes, server_bytes, sync_seconds
from polyturn.training.options import BACKEND

GB = 10**9
USABLE = 0.9
"""The share of a GPU's memory that is counted on: the rest is CUDA's own, and gaps between blocks."""


class GpuLayout(NamedTuple):
    """The division of GPUs among ranks and servers; none is shared."""

    ranks: int
    servers: int
    width: int
    """GPUs of a server, by tensor parallelism."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the layout needs."""
        return self.ranks + self.servers * self.width

    def __str__(self) -> str:
        servers = f" and {self.servers} servers of {self.width} GPUs" if self.servers else ""
        return f"{self.ranks} ranks{servers}"


class Demand(NamedTuple):
    """A run's demands on its GPUs, whatever the layout."""

    size: ModelSize
    load: RankLoad
    context: int
    """Tokens of the longest conversation, for one of which a server's KV cache has room at least."""

    def rank(self, ranks: int) -> dict[str, int]:
        """Return what one of so many ranks holds."""
        return rank_bytes(self.size, replace(self.load, ranks=ranks))

    def server(self, width: int) -> dict[str, int]:
        """Return what each GPU of a server of so many holds."""
        return server_bytes(self.size, tensor_parallel=width, tokens=self.context)


def run(path: Path, overrides: Sequence[str], *, gpus: int, gpu_memory: float, link: float) -> None:
    """Print the plan.

    Args:
        path: A config.
        overrides: Changes of it, `section.key=value`.
        gpus: How many GPUs there are.
        gpu_memory: GB of each.
        link: GB a second between the ranks and a server.

    Raises:
        ConfigError: it does not fit; the message names the nearest layout that does.
    """
    place, _ = open_place(path, overrides)
    demand, layout, out = demand_of(place), layout_of(place.config), Output()
    limit = int(gpu_memory * GB * USABLE)
    out.text(
        f"{demand.size.parameters / 1e9:.2f} B parameters, {demand.size.trained / 1e9:.2f} B of them trained; {layout}\n"
    )
    _table(out, f"each of {layout.ranks} ranks", demand.rank(layout.ranks))
    if layout.servers:
        _table(out, f"each GPU of {layout.servers} servers, at least", demand.server(layout.width))
        room = (limit - demand.server(layout.width)["weights"]) * layout.width
        tokens = room // max(1, server_bytes(demand.size, tokens=1)["KV cache"])
        out.text(f"{'room for conversations of a server':<52}{max(0, tokens)} tokens")
        out.text(f"{'new weights to all servers':<52}{sync_seconds(demand.size, link=link * GB):.2f} s over {link:g} GB/s")
    require_fit(demand, layout, gpus=gpus, limit=limit)
    out.text(f"{'GPUs':<52}{layout.gpus} of {gpus}")


def demand_of(place: build.ConfigSource) -> Demand:
    """Return what a run asks of its GPUs; no weights are read for it."""
    config = place.config
    model = build_outline(place, build.build_codec(place).tokenizer)
    if config.model.lora is not None:
        lora.add_lora(model, config.model.lora, seed=config.seed)
    load = load_of(place, tokens=config.train.max_tokens_per_batch)
    return Demand(ModelSize.of(model), load, max_context_of(config.rollout.limits, model))


def load_of(place: build.ConfigSource, *, tokens: int, on_gpu: bool = True) -> RankLoad:
    """Return what a run asks of each rank, with so many `tokens` in a micro-batch."""
    from polyturn.algorithms.advantages import traits_of

    config = place.config
    split, is_torch = degrees_of(config), config.train.backend == BACKEND
    # An adapter's reference is the model itself.
    has_copy = config.algorithm.has_kl and (config.model.lora is None or config.model.reference is not None)
    return RankLoad(
        ranks=max(1, config.train.distributed.ranks),
        # Where ranks split matrices too, a plan takes all as split.
        expert_parallel=split.expert_parallel if is_torch and split.tensor_parallel == 1 else 1,
        megatron=None if is_torch else split,
        num_trained=1 + traits_of(build_estimator(place)).needs_values,
        num_frozen=has_copy + (config.algorithm.loss.distill is not None),
        tokens=tokens,
        recomputes=config.model.gradient_checkpointing,
        on_gpu=on_gpu,
    )


def layout_of(config: RunConfig) -> GpuLayout:
    """Return the layout that a config says, on one machine or on a cluster."""
    ranks, engine, actors = max(1, config.train.distributed.ranks), config.engine, config.cluster.engines
    if isinstance(engine, ServerOptions) and engine.urls:
        return GpuLayout(ranks, 0, 0)
    if "GPU" in actors.resources:
        return GpuLayout(ranks, actors.count, max(1, int(actors.resources["GPU"])))
    if not isinstance(engine, ServerOptions):
        return GpuLayout(ranks, 0, 0)
    launch = engine.launch
    replicas = 1 if launch is None else launch.replicas
    return GpuLayout(ranks, replicas, len(launch.devices[0].split(",")) if launch is not None and launch.devices else 1)


def require_fit(demand: Demand, layout: GpuLayout, *, gpus: int, limit: int) -> None:
    """Refuse a layout that asks for more GPUs, or for more memory on one, than there is.

    Raises:
        ConfigError: with the nearest layout that fits, if there is one.
    """
    rank, server = sum(demand.rank(layout.ranks).values()), sum(demand.server(layout.width or 1).values())
    wrong = []
    if layout.gpus > gpus:
        wrong.append(f"it takes {layout.gpus} GPUs and there are {gpus}")
    if rank > limit:
        wrong.append(f"a rank holds {rank / GB:.1f} GB")
    if layout.servers and server > limit:
        wrong.append(f"each GPU of a server holds {server / GB:.1f} GB")
    if not wrong:
        return
    found = nearest(demand, layout, gpus=gpus, limit=limit)
    add = "add GPUs" if demand.load.megatron is None else "raise tensor_parallel or pipeline_parallel (train.distributed)"
    advice = (
        f"{found} would fit (train.distributed.ranks, cluster.engines.count and resources)"
        if found is not None
        else f"no layout on {gpus} GPUs fits; lower train.max_tokens_per_batch, set gradient_checkpointing, or {add}"
    )
    raise ConfigError(f"{layout} do not fit: {'; '.join(wrong)}, of which {limit / GB:.1f} GB can be used. {advice}")


def nearest(demand: Demand, layout: GpuLayout, *, gpus: int, limit: int) -> GpuLayout | None:
    """Return the layout that fits with as few changes as can be: ranks are added before servers go, servers are widened."""
    wide = (w for w in _doubled(layout.width, gpus) if sum(demand.server(w).values()) <= limit)
    width = next(wide, None) if layout.servers else 0
    row = demand.load.expert_parallel
    ranks = next((n for n in range(layout.ranks, gpus + 1, row) if sum(demand.rank(n).values()) <= limit), None)
    if ranks is None or width is None:
        return None
    servers = min(layout.servers, (gpus - ranks) // width) if width else 0
    return GpuLayout(ranks, servers, width) if ranks <= gpus and (servers or not layout.servers) else None


def _doubled(width: int, most: int) -> list[int]:
    found = [max(1, width)]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _table(out: Output, title: str, held: dict[str, int]) -> None:
    out.text(f"{title:<52}{sum(held.values()) / GB:.2f} GB")
    for name, num in held.items():
        if num:
            out.text(f"  {name:<50}{num / GB:.2f} GB")
