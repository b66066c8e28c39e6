"""Metrics that are read together, and so are drawn in one panel.

    loss/grad_norm, loss/grad_norm_clipped   ->   "Gradient norm, before and after clipping"

A panel is shown where a run has at least two of its metrics; all others have a panel of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Panel(NamedTuple):
    """Metrics in one panel."""

    title: str
    names: tuple[str, ...]
    """Patterns, in the order in which the metrics are drawn."""
    is_stacked: bool = False
    """Whether they are parts of one sum."""


PANELS = (
    Panel("Success in evaluations", ("eval/*/success",)),
    Panel("Stop reasons: trajectories of a step", ("rollout/stop_*",), is_stacked=True),
    Panel("KL divergences", ("policy/approx_kl", "policy/kl_to_reference", "policy/rollout_k3")),
    Panel(
        "Log-probabilities, engine and trainer: differences",
        ("policy/rollout_difference", "policy/rollout_difference_p99", "policy/rollout_difference_max"),
    ),
    Panel("Probability ratio", ("policy/ratio", "policy/ratio_max")),
    Panel(
        "Parts of the loss",
        ("loss/policy", "loss/kl", "loss/entropy", "loss/distill", "loss/observation", "loss/router_balance"),
    ),
    Panel("Gradient norm, before and after clipping", ("loss/grad_norm", "loss/grad_norm_clipped")),
    Panel("Critic's gradient norm, before and after clipping", ("critic/grad_norm", "critic/grad_norm_clipped")),
    Panel("Seconds of a step", ("time/step_s", "time/generate_s", "time/train_s", "time/prepare_s")),
    Panel("Processors and memory of the machine", ("system/cpu_share", "system/memory_share")),
    Panel("GPUs: time busy", ("system/gpu*/busy_share",)),
    Panel("GPUs: memory in use", ("system/gpu*/memory_share",)),
    Panel("GPUs: power (W)", ("system/gpu*/power_w",)),
)  # fmt: skip


def panels_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the panels of a run's metrics: `title`, `names` and `stacked`."""
    known = list(names)
    panels = []
    for panel in PANELS:
        mine = [name for pattern in panel.names for name in known if fnmatchcase(name, pattern)]
        if len(mine) > 1:
            panels.append({"title": panel.title, "names": mine, "stacked": panel.is_stacked})
    return panels
