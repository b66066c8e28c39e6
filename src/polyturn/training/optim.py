"""AdamW with a learning-rate schedule, gradient clipping, and skipping of gradients that are not finite.

Parameters are always updated in place, because an engine in this process may share the tensors. No code here allocates a new
parameter, not even to load a state.

Parameters in bfloat16 have float32 masters: gradients are summed, clipped and applied to the masters, and every step writes
the rounded masters into the parameters. So an engine samples from exactly the weights that the training forward pass uses.
With `offload`, the masters, their gradients and their moments stay on the CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from polyturn.core.errors import ConfigError, TrainingError
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.training.options import OptimSettings
from polyturn.training.shards import local_part

logger = logging.getLogger(__name__)

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""Names of AdamW's state of a parameter."""


def lr_factor(step: int, settings: OptimSettings) -> float:
    """Return the factor on the learning rate at `step`, counted from 0."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    schedule = settings.schedule
    if schedule.name == "constant" or schedule.total_steps is None:
        return 1.0
    share = min(1.0, (step - settings.warmup_steps) / (schedule.total_steps - settings.warmup_steps))
    fallen = 1.0 - share if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * fallen


class Optimizer:
    """AdamW over a model's trainable parameters."""

    def __init__(self, model: nn.Module, settings: OptimSettings) -> None:
        warmup, schedule = settings.warmup_steps, settings.schedule
        if schedule.name != "constant" and (schedule.total_steps is None or schedule.total_steps <= warmup):
            raise ConfigError(
                f"a {schedule.name} schedule needs total_steps above warmup_steps ({warmup}), not {schedule.total_steps}"
            )
        if 0 < warmup < 1:
            raise ConfigError(
                f"warmup_steps is {warmup}, a share of a run's steps; set the number of steps with settings.over(steps)"
            )
        self.settings = settings
        self.step_count = 0
        """Number of steps taken or skipped, by which the schedule advances."""
        self.skipped_in_a_row = 0
        self._problem: str | None = None
        live = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        own = {n: self._own(n, p) for n, p in live}
        self.masters = {n: nn.Parameter(self._master(p.detach())) for n, p in own.items() if p.dtype.itemsize < 4}
        """The float32 copies, by name, of the parameters that have fewer bits."""
        if settings.offload and not self.masters:
            raise ConfigError(
                "offload is true and the model is in float32, so there are no masters to keep on the CPU; set it to false"
            )
        self._copies = [(own[n], master) for n, master in self.masters.items()]
        self._named = [(n, self.masters.get(n, p)) for n, p in own.items()]
        # No decay for norms, whose neutral scale is not 0, and, as usual, none for biases.
        matrices = [p for _, p in self._named if p.ndim > 1]
        vectors = [p for _, p in self._named if p.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def before_step(self, hook: Callable[[], None]) -> None:
        """Call `hook` before every change of the parameters."""
        self._adamw.register_step_pre_hook(lambda *_: hook())

    def step(self) -> Metrics:
        """Clip the gradient, update the parameters, clear the gradient; skip a gradient that is not finite.

        Raises:
            TrainingError: too many consecutive gradients were not finite; the parameters are unchanged.
        """
        self.collect()
        params = [p for _, p in self._named]
        norm_tensor = self._total_norm(params)
        norm = float(norm_tensor)  # waits for the device, to decide whether to take the step
        lr = self.settings.lr * lr_factor(self.step_count, self.settings)
        is_finite = math.isfinite(norm)
        # One number decides for all parameters and ranks, so a step is taken completely or not at all.
        if is_finite:
            if self.settings.max_grad_norm is not None:
                self._clip(params, norm_tensor)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._write_back()
            self.skipped_in_a_row = 0
        else:
            self._skip(self._problem or self._non_finite_message(norm))
        self.zero_grad()
        self.step_count += 1  # also for a skipped step: the schedule follows the steps of the run
        metrics: Metrics = {"loss/lr": Mean(lr), "loss/skipped_steps": Sum(0.0 if is_finite else 1.0)}
        if is_finite:
            bound = self.settings.max_grad_norm
            metrics["loss/grad_norm"] = Mean(norm)
            metrics["loss/grad_norm_clipped"] = Mean(norm if bound is None else min(norm, bound))
        return metrics

    def collect(self) -> None:
        """Add the gradient of low-precision parameters to the gradient of their float32 masters, after every backward pass.
        Sums over micro-batches in bfloat16 would lose small terms."""
        for parameter, master in self._copies:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = self._master(parameter.grad)
            else:
                master.grad.add_(parameter.grad.to(master.device))
            parameter.grad = None

    def _master(self, tensor: Tensor) -> Tensor:
        """Return a float32 copy of a low-precision tensor, where the masters are."""
        return tensor.to("cpu" if self.settings.offload else tensor.device).float()

    def spoil(self, problem: str) -> None:
        """Make every rank skip the next step, by setting the gradient to NaN."""
        self._problem = problem
        # One NaN makes the norm NaN on all ranks, so all skip the step.
        parameter = self._named[0][1]
        parameter.grad = torch.full_like(parameter, math.nan)

    def _own(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return this process's part of a parameter, live."""
        return parameter

    def _write_back(self) -> None:
        """Write the updated values into the parameters."""
        with torch.no_grad():
            for parameter, master in self._copies:
                parameter.copy_(master)

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of the whole gradient."""
        return torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])

    def _clip(self, params: Sequence[nn.Parameter], norm: Tensor) -> None:
        """Scale the gradient, whose norm is `norm`, down to `max_grad_norm`."""
        assert self.settings.max_grad_norm is not None
        torch.nn.utils.clip_grads_with_norm_(params, self.settings.max_grad_norm, norm)

    def _skip(self, problem: str) -> None:
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row <= self.settings.max_skipped:
            logger.warning(
                "%s. The step is skipped (%d in a row, the run ends at %d)",
                problem,
                self.skipped_in_a_row,
                self.settings.max_skipped + 1,
            )
            return
        before = self.skipped_in_a_row - 1
        self.zero_grad()  # a caller that catches the error must not see this gradient
        raise TrainingError(problem + (f"; steps skipped before it: {before}" if before else ""))

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self._problem = None
        self._adamw.zero_grad(set_to_none=True)
        for parameter, _ in self._copies:
            parameter.grad = None

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps, and the number of consecutive skipped steps."""
        return {"step_count": self.step_count, "skipped": self.skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load the result of `state_dict`; the settings of the constructor stay."""
        self.step_count, self.skipped_in_a_row = state["step_count"], state["skipped"]
        self.zero_grad()

    def sections(self) -> dict[str, dict[str, Tensor]]:
        """Return the masters and each kind of moments as prefix -> name -> live tensor. Moments exist from the first
        gradient on."""
        moments = {name: self._adamw.state[param] for name, param in self._named if self._adamw.state.get(param)}
        return {"masters/": {name: master.detach() for name, master in self.masters.items()}} | {
            f"moments/{kind}/": {name: values[kind] for name, values in moments.items()} for kind in MOMENTS
        }

    def make_moments(self, is_wanted: Callable[[str], bool]) -> None:
        """Keep moments for exactly the parameters with wanted names; new moments are 0."""
        for name, param in self._named:
            if not is_wanted(name):
                self._adamw.state.pop(param, None)
            elif not self._adamw.state.get(param):
                step = torch.zeros((), dtype=torch.float32, device=local_part(param).device)
                self._adamw.state[param] = dict(
                    zip(MOMENTS, (step, torch.zeros_like(param), torch.zeros_like(param)), strict=True)
                )

    def _non_finite_message(self, norm: float) -> str:
        bad = [n for n, p in self._named if p.grad is not None and not torch.isfinite(p.grad).all()]
        named = f"first in {bad[0]!r}, in {len(bad)} of {len(self._named)} tensors" if bad else "only its norm overflows"
        return (
            f"the gradient's norm is {norm} at optimizer step {self.step_count} ({named}): look at the loss metrics of the "
            "last steps, or lower optim.lr"
        )
