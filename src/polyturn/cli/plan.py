"""`polyturn plan CONFIG --gpus 64 --gpu-memory 80`: the memory of each process on such GPUs, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyturn import build
from polyturn.api.folders import open_source
from polyturn.build.gpu_plan import GB, USABLE, counted, demand_of, layout_of, require_fit
from polyturn.cli.console import Output
from polyturn.training.memory import server_bytes, sync_seconds


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
    source, _ = open_source(path, overrides)
    demand, layout, out = demand_of(source), layout_of(source.config), Output()
    limit = int(gpu_memory * GB * USABLE)
    out.text(
        f"{demand.size.parameters / 1e9:.2f} B parameters, {demand.size.trained / 1e9:.2f} B of them trained; {layout}\n"
    )
    for title, bytes_by_part in demand.tables(layout).items():
        _table(out, title, bytes_by_part)
    if layout.servers:
        left = limit - demand.at_rest(layout)
        if layout.is_shared:
            out.text(f"{'share of a GPU that is left to a server':<52}{max(0.0, left / (gpu_memory * GB)):.2f}")
        room = (left - demand.server(layout.width)["weights"]) * layout.width
        tokens = room // max(1, server_bytes(demand.size, tokens=1)["KV cache"])
        out.text(f"{'room for conversations of a server':<52}{max(0, tokens)} tokens")
        seconds = sync_seconds(demand.size, link=link * GB, adapter_only=build.sends_adapter(source.config))
        out.text(f"{'new weights to all servers':<52}{seconds:.2f} s over {link:g} GB/s")
    require_fit(demand, layout, gpus=gpus, limit=limit)
    out.text(f"{'fits':<52}{layout.gpus} of {counted(gpus, 'GPU')} of {gpu_memory:g} GB, as --gpus and --gpu-memory say")


def _table(out: Output, title: str, bytes_by_part: dict[str, int]) -> None:
    out.text(f"{title:<52}{sum(bytes_by_part.values()) / GB:.2f} GB")
    for name, num in bytes_by_part.items():
        if num:
            out.text(f"  {name:<50}{num / GB:.2f} GB")
