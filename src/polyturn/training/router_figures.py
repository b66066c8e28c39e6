"""Metrics of a pass's routers: balance of the experts' load, and choices that differ from the engine's.

They are computed from the records of `engines/routers.py`, and stay on the device until the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyturn.algorithms.balance import balance_loss
from polyturn.batching.layout import MicroBatch
from polyturn.core.metrics import Mean, Metric
from polyturn.engines.routers import LIVE, RoutingPass

Figure = tuple[Tensor, Callable[..., Metric]]
"""Detached numbers on the device, and the function that makes a metric of them."""
Figures = Mapping[str, Figure]


class RouterFigures(NamedTuple):
    """Balance loss and metrics of the routers of a pass."""

    balance_S: Tensor
    """[S] for each target the balance loss of its sequence, averaged over layers."""
    figures: Figures


def router_figures(routing: RoutingPass, batch: MicroBatch, *, with_grad: bool, replays: bool) -> RouterFigures:
    """Return the balance loss of the routers, and the metrics of the pass.

    Args:
        routing: The routers' choices.
        batch: The micro-batch of the pass.
        with_grad: Whether the balance loss needs a gradient.
        replays: Whether to add the metrics of replayed routes.
    """
    row_S = sequence_of_targets(batch)
    # Keep a graph over the logits of all layers only if the balance is part of the loss.
    with torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
        balance_B = _balance(routing, batch)
        balance_S = balance_B[row_S.to(balance_B.device, non_blocking=True)]
    with torch.no_grad():
        return RouterFigures(balance_S, _metrics(routing, batch, balance_B, replays=replays))


def sequence_of_targets(batch: MicroBatch) -> Tensor:
    """Return [S] the index of each target's sequence."""
    return torch.from_numpy(np.cumsum(np.diff(batch.sample_S, prepend=batch.sample_S[:1]) != 0))


def tokens_of_sequences(batch: MicroBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [M] the flat index of each token of each sequence (shared tokens once per sequence), and [M] its sequence."""
    row_M = np.repeat(np.arange(len(batch.row_indices)), [len(p) for p in batch.row_indices])
    return np.concatenate(batch.row_indices), row_M


def _balance(routing: RoutingPass, batch: MicroBatch) -> Tensor:
    """Return [B] the balance loss of each row, averaged over layers."""
    device = batch.input_ids_BT.device
    index_M, row_M = (torch.from_numpy(one).to(device, non_blocking=True) for one in tokens_of_sequences(batch))
    of_layers = [
        balance_loss(logits, chosen, index_M, row_M, num_rows=len(batch.row_indices))
        for logits, chosen in zip(routing.logits, routing.chosen, strict=True)
        if logits is not None and chosen is not None
    ]
    return torch.stack(of_layers).mean(dim=0)


def _metrics(routing: RoutingPass, batch: MicroBatch, balance_B: Tensor, *, replays: bool) -> Figures:
    device = batch.input_ids_BT.device
    # Each token once, including those of shared prefixes, without padding.
    real = torch.from_numpy(np.unique(np.concatenate(batch.row_indices))).to(device, non_blocking=True)
    chosen = torch.stack([c for c in routing.chosen if c is not None], dim=1)[real]
    live = torch.stack([c for c in routing.live if c is not None], dim=1)[real]
    logits = torch.stack([t for t in routing.logits if t is not None], dim=1)[real].float()
    count, layers = chosen.shape[:2]
    loads_LE = torch.zeros(layers, routing.shape.num_experts, device=device)
    loads_LE.scatter_add_(
        1, chosen.permute(1, 0, 2).reshape(layers, -1), torch.ones(layers, chosen[:, 0].numel(), device=device)
    )
    log_probs = torch.log_softmax(logits, dim=-1)
    figures: dict[str, Figure] = {
        "policy/router_balance": (balance_B.sum(), partial(Mean, count=len(balance_B))),
        "policy/router_entropy": (-(log_probs.exp() * log_probs).sum(), partial(Mean, count=count * layers)),
        "policy/router_load_max": (
            (loads_LE.max(dim=1).values / loads_LE.mean(dim=1)).mean() * count,
            partial(Mean, count=count),
        ),
    }
    if not replays:
        return figures
    replayed = torch.zeros_like(chosen[:, :, 0], dtype=torch.bool)
    if routing.recorded is not None:
        replayed = routing.recorded[real, :, 0] != LIVE
    num_recorded = replayed[:, 0].sum()
    figures["policy/router_missing"] = count - num_recorded, partial(Mean, count=count)
    differs = (chosen.sort(dim=-1).values != live.sort(dim=-1).values).any(dim=-1) & replayed
    figures["policy/router_changed"] = torch.stack([differs.sum(), num_recorded * layers]), Mean
    figures["policy/router_changed_tokens"] = torch.stack([differs.any(dim=1).sum(), num_recorded]), Mean
    return figures
