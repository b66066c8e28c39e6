"""From an `optim` section to the optimizer's settings: the same for policy, warm start and critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyturn.config.models import OptimConfig

if TYPE_CHECKING:
    from polyturn.training.optim import OptimSettings


def optim_settings(optim: OptimConfig, *, steps: int) -> OptimSettings:
    """Return the optimizer's settings for a run of `steps`."""
    from polyturn.training.optim import OptimSettings

    warmup = optim.warmup_steps or int(optim.warmup_ratio * steps)
    return OptimSettings(
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        max_skipped=optim.max_skipped,
        warmup_steps=warmup,
        schedule=optim.schedule,
        total_steps=max(steps, warmup + 1),
        min_lr_ratio=optim.min_lr_ratio,
    )
