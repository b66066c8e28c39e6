"""Groups of metrics that are drawn in one panel.

    loss/grad_norm, loss/grad_norm_clipped   ->   "Gradient norm, before and after clipping"

A panel is shown if a run has at least two of its metrics. Every other metric has a separate panel.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Panel(NamedTuple):
    """One panel and its metrics."""

    title: str
    names: tuple[str, ...]
    """Patterns of metrics, in drawing order."""
    is_stacked: bool = False
    """Whether the metrics are parts of one sum, drawn as a stack."""


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
