"""A warm start: supervised training on conversations before reinforcement learning, with its own checkpoints.

    warm_start(parts, observer, signals, folder=…)  ->  Spent(steps=200, train_s=31.5)

Used by training runs and by `polyturn sft`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from polyturn import build
from polyturn.api.signals import Signals
from polyturn.core.errors import CheckpointError
from polyturn.training.checkpoint import WARM_START, Checkpoints, SavingClock
from polyturn.training.observer import RunObserver
from polyturn.training.ranked import RankedBackend
from polyturn.training.sft import run_sft

logger = logging.getLogger(__name__)


class Spent(NamedTuple):
    """The cost of a warm start."""

    steps: int = 0
    train_s: float = 0.0
    """Seconds in forward and backward passes."""


def warm_checkpoints(folder: Path) -> Checkpoints:
    """Return the checkpoints of a warm start; the first checkpoint of training replaces them."""
    return Checkpoints(folder / WARM_START, keep=1)


def warm_start(
    parts: build.Parts,
    observer: RunObserver,
    signals: Signals,
    *,
    folder: Path,
    again: str,
    on_resume: Callable[[], object],
) -> Spent:
    """Train on the conversations of `warm_start`, if any; resume an interrupted warm start.

    A signal ends the warm start after the current step with a checkpoint, and the process with 128 + the signal's number;
    `again` is the command that resumes the run. `on_resume` is called after a checkpoint is loaded.

    Raises:
        CheckpointError: the checkpoint cannot be resumed.
    """
    sft = parts.source.config.warm_start
    checkpoints = warm_checkpoints(folder)
    latest = checkpoints.latest()
    if sft.steps == 0 and latest is None:
        return Spent()
    first, spent_s = (0, 0.0) if latest is None else _taken(checkpoints, latest, num_steps=sft.steps)
    samples = build.warm_start_samples(parts)
    policy = build.build_policy(parts, sft.optim.over(sft.steps), max_tokens_per_batch=sft.max_tokens_per_batch)
    if latest is not None:
        policy.load(latest / "policy")
        on_resume()
        logger.info("warm start: resuming at step %d", first)
    clock = SavingClock(parts.source.config.train.checkpoint_every_s)

    def save(step: int) -> None:
        with clock.saving():
            state = {"step": step, "seconds": time.monotonic() - began}
            checkpoints.save(step, state, stored={"policy": policy}, export=build.stored_exporter(parts))

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        observer.on_sft(step, sft.steps, metrics)
        if clock.is_due():
            save(step)

    began = time.monotonic() - spent_s
    steps = run_sft(
        policy,
        samples,
        sft,
        seed=parts.source.config.seed,
        on_step=on_step,
        first_step=first,
        spent_s=spent_s,
        should_stop=lambda: bool(signals.received),
    )
    observer.end_sft()
    if isinstance(policy.backend, RankedBackend):
        policy.backend.gather()  # training starts from the whole weights
    if signals.received:
        save(steps)
        logger.warning("interrupted at step %d of the warm start; resume with: %s", steps, again)
        raise SystemExit(128 + signals.received[0])
    return Spent(steps, policy.train_seconds)


def _taken(checkpoints: Checkpoints, latest: Path, *, num_steps: int) -> tuple[int, float]:
    """Return the number of steps that a warm start of `num_steps` has taken, and their seconds.

    Raises:
        CheckpointError: the checkpoint is past the last step.
    """
    state = checkpoints.load(latest)
    first = int(state["step"])
    if first > num_steps:
        raise CheckpointError(
            f"the checkpoint {latest} is of step {first} of the warm start, and warm_start.steps is {num_steps}; set "
            "at least as many steps, or start a new run"
        )
    return first, float(state.get("seconds", 0.0))  # an older checkpoint has none
