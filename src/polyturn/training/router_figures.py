"""Metrics of a pass's routers: the balance of the experts' load, and the difference from the engine's choice.

They are computed from the records of `engines/routers.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyturn.algorithms.balance import balance_loss
from polyturn.batching.layout import MicroBatch
from polyturn.core.metrics import Mean, Metrics
from polyturn.engines.routers import LIVE, RoutingPass


class RouterFigures(NamedTuple):
    """Balance loss and metrics of the routers of a pass."""

    balance_S: Tensor
    """[S] for each target the balance loss of its sequence, averaged over layers."""
    metrics: Metrics


def router_figures(routing: RoutingPass, batch: MicroBatch, *, with_grad: bool, replays: bool) -> RouterFigures:
    """Return the balance loss of the routers, and the metrics of the pass.

    Args:
        routing: The pass, still open.
        batch: The micro-batch of the pass.
        with_grad: Whether the balance loss needs a gradient.
        replays: Whether routes are replayed, so that a missing one is counted.
    """
    row_S = sequence_of_targets(batch)
    # Keep a graph over the logits of all layers only if the balance is part of the loss.
    with torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
        balance_B = _balance(routing, batch)
        balance_S = balance_B[row_S.to(balance_B.device)]
    with torch.no_grad():
        return RouterFigures(balance_S, _metrics(routing, batch, balance_B, replays=replays))


def sequence_of_targets(batch: MicroBatch) -> Tensor:
    """Return [S] the index of each target's sequence."""
    return torch.from_numpy(np.cumsum(np.diff(batch.sample_S, prepend=batch.sample_S[:1]) != 0))


def tokens_of_sequences(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return [M] the indices on axis N of the tokens of all sequences (shared tokens once per sequence), and [M] their
    sequences."""
    device = batch.input_ids_BT.device
    index_M = torch.from_numpy(np.concatenate(batch.row_indices)).to(device)
    row_M = torch.from_numpy(np.repeat(np.arange(len(batch.row_indices)), [len(p) for p in batch.row_indices])).to(device)
    return index_M, row_M


def _balance(routing: RoutingPass, batch: MicroBatch) -> Tensor:
    """Return [B] the balance loss of each row, averaged over layers."""
    index_M, row_M = tokens_of_sequences(batch)
    of_layers = [
        balance_loss(logits, chosen, index_M, row_M, num_rows=len(batch.row_indices))
        for logits, chosen in zip(routing.logits, routing.chosen, strict=True)
        if logits is not None and chosen is not None
    ]
    return torch.stack(of_layers).mean(dim=0)


def _metrics(routing: RoutingPass, batch: MicroBatch, balance_B: Tensor, *, replays: bool) -> Metrics:
    device = batch.input_ids_BT.device
    # Each token once, including those of shared prefixes, without padding.
    real = torch.from_numpy(np.unique(np.concatenate(batch.row_indices))).to(device)
    chosen = torch.stack([c for c in routing.chosen if c is not None], dim=1)[real]
    live = torch.stack([c for c in routing.live if c is not None], dim=1)[real]
    logits = torch.stack([t for t in routing.logits if t is not None], dim=1)[real].float()
    count, layers = chosen.shape[:2]
    loads_LE = torch.zeros(layers, routing.shape.num_experts, device=device)
    loads_LE.scatter_add_(
        1, chosen.permute(1, 0, 2).reshape(layers, -1), torch.ones(layers, chosen[:, 0].numel(), device=device)
    )
    log_probs = torch.log_softmax(logits, dim=-1)
    metrics: Metrics = {
        "policy/router_balance": Mean(float(balance_B.sum()), len(balance_B)),
        "policy/router_entropy": Mean(float(-(log_probs.exp() * log_probs).sum()), count * layers),
        "policy/router_load_max": Mean(float((loads_LE.max(dim=1).values / loads_LE.mean(dim=1)).mean()) * count, count),
    }
    if not replays:
        return metrics
    replayed = None if routing.recorded is None else routing.recorded[real, :, :1] != LIVE
    num_recorded = 0 if replayed is None else int(replayed[:, 0].sum())
    metrics["policy/router_missing"] = Mean(count - num_recorded, count)
    if replayed is not None and num_recorded:
        differs = ((chosen.sort(dim=-1).values != live.sort(dim=-1).values).any(dim=-1)) & replayed[:, :, 0]
        metrics["policy/router_changed"] = Mean(float(differs.sum()), num_recorded * layers)
        metrics["policy/router_changed_tokens"] = Mean(float(differs.any(dim=1).sum()), num_recorded)
    return metrics
