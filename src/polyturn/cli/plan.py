"""`polyturn plan CONFIG --gpus 64 --gpu-memory 80`: estimate the memory of each process on such GPUs.

The numbers are those of `train --dry-run` (`build/gpu_plan.py`), for GPUs that this machine need not have. No weights are
read.
"""

from __future__ import annotations

from typing import Annotated

import typer

from polyturn.cli.arguments import ConfigArgument, Overrides, declare
from polyturn.cli.console import Output
from polyturn.cli.dialects import load_native


@declare("plan")
def main(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=100_000, help="Number of GPUs.")] = 8,
    gpu_memory: Annotated[float, typer.Option("--gpu-memory", min=0.1, max=100_000, help="GB of memory per GPU.")] = 80.0,
    link: Annotated[float, typer.Option("--link", min=0.01, max=100_000, help="GB/s from the ranks to a server.")] = 50.0,
) -> None:
    """Estimate the memory of each process of a run. Suggests a layout that fits, and estimates the time of a weight sync
    over a link."""
    load_native(config, overrides or [], warns=False)
    from polyturn import build
    from polyturn.api.folders import open_source
    from polyturn.build.gpu_plan import GB, USABLE, counted, demand_of, layout_of, parameters_of, require_fit
    from polyturn.training.memory import server_bytes, sync_seconds

    source, _ = open_source(config, overrides or [])
    demand, layout, out = demand_of(source), layout_of(source.config), Output()
    limit, size = int(gpu_memory * GB * USABLE), demand.size

    def line(name: str, value: str) -> None:
        out.text(f"{name:<52}{value}")

    out.text(f"{parameters_of(size)}; {layout}\n")
    for title, bytes_by_part in demand.tables(layout).items():
        line(title, f"{sum(bytes_by_part.values()) / GB:.2f} GB")
        for name, num in bytes_by_part.items():
            if num:
                line(f"  {name}", f"{num / GB:.2f} GB")
    if demand.load.num_offloaded:  # masters, moments and summed gradients in float32
        line(
            "offloaded optimizers of all ranks, not on the GPUs",
            f"{demand.load.num_offloaded * size.trained * 16 / GB:.2f} GB",
        )
    if layout.servers:
        left = limit - demand.at_rest(layout)
        if layout.is_shared:
            line("share of a GPU that is left to a server", f"{max(0.0, left / (gpu_memory * GB)):.2f}")
        room = (left - demand.server(layout.width)["weights"]) * layout.width
        tokens = room // max(1, server_bytes(size, tokens=1)["KV cache"])
        line("room for conversations of a server", f"{max(0, tokens)} tokens")
        seconds = sync_seconds(size, link=link * GB, adapter_only=build.sends_adapter(source.config))
        line("new weights to all servers", f"{seconds:.2f} s over {link:g} GB/s")
    require_fit(demand, layout, gpus=gpus, limit=limit)
    line("fits", f"{layout.gpus} of {counted(gpus, 'GPU')} of {gpu_memory:g} GB, as --gpus and --gpu-memory say")
