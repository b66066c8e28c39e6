"""The interface of a policy loss, and the terms that several losses share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyturn.core.arrays import Floats
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, TrainingError, did_you_mean, plugin_errors_as
from polyturn.core.reward import brief
from polyturn.core.sample import TrainSample
from polyturn.infra.plugin_shape import has_parameter, required, takes_any_keyword
from polyturn.infra.plugins import Registry

MAX_LOG_RATIO = 20.0
"""Bound of log ratios, applied before `exp` because exp(89) is infinite in float32. It is far beyond the clip of every loss
that clips. A token whose log ratio is beyond it gets no gradient through its ratio: with its gradient, which is
e^20 times that of other tokens, it alone would decide the direction of the clipped step."""


USUAL_CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
"""Values for the parameters of a loss that have these names and no default; they are the defaults of `ppo_clip`."""


class TokenLoss(NamedTuple):
    """The result of a policy loss: the loss of each token, and per-token numbers that become metrics."""

    loss_T: Tensor
    stats: Mapping[str, Tensor] = MappingProxyType({})
    """Name -> [T], detached. The mean over all tokens of a step is the metric `policy/<name>`, such as clip_fraction or
    ratio."""


PolicyLoss = Callable[..., TokenLoss]
"""(logprobs_T, old_logprobs_T, advantages_T, **options) -> TokenLoss. If the loss has a parameter `sequence_T`, it receives
[T] a number that is equal for the tokens of one sample; a sample is a segment and is never cut by a micro-batch. If the loss
has a parameter `marks_T`, it receives [T] 1 at the tokens that the loss's selection chose (`marks`), 0 elsewhere."""

policy_losses: Registry[PolicyLoss] = Registry("losses")


Selection = Callable[..., NDArray[np.bool_]]
"""(old_logprobs_N, advantages_N, rng, **options) -> [N] whether each token is marked; N are the trained tokens of a step."""

_selections: dict[PolicyLoss, Selection] = {}


def marks(selection: Selection) -> Callable[[PolicyLoss], PolicyLoss]:
    """Return a decorator for a loss with a parameter `marks_T`: [T] 1 at the tokens that `selection` chose of a whole step.

    A loss sees only one micro-batch. So a choice that depends on the whole batch is made by a separate function, before the
    batch is cut into micro-batches (I7).
    """

    def add(loss: PolicyLoss) -> PolicyLoss:
        _selections[loss] = selection
        return loss

    return add


def selection_of(loss: PolicyLoss, *, kwargs: Mapping[str, Any]) -> Selection | None:
    """Return the selection of `loss`, with its options from `kwargs` bound; None if the loss has no selection."""
    selection = _selections.get(loss)
    if selection is None:
        return None
    return functools.partial(selection, **{k: v for k, v in kwargs.items() if has_parameter(selection, k)})


def mark(samples: Sequence[TrainSample], selection: Selection, *, seed: int) -> list[Floats]:
    """Return for each sample [T] 1 at the trained tokens that `selection` chooses among the trained tokens of all samples.

    Args:
        samples: All samples of one optimizer step, with advantages and old_logprobs.
        selection: The result of `selection_of`.
        seed: Seed of the random choice; pass the number of the step.

    Raises:
        TrainingError: a sample has no advantages or no old_logprobs.
    """
    indices = [np.flatnonzero(s.loss_weights) for s in samples]
    for sample in samples:
        if sample.advantages is None or sample.old_logprobs is None:
            raise TrainingError(
                f"the policy loss chooses tokens by advantages and old_logprobs, and sample {sample.id} lacks one of them"
            )
    chosen = [np.zeros(len(s), np.float32) for s in samples]
    if any(len(p) for p in indices):
        old_N = np.concatenate([np.asarray(s.old_logprobs, np.float64)[p] for s, p in zip(samples, indices, strict=True)])
        advantages_N = np.concatenate(
            [np.asarray(s.advantages, np.float64)[p] for s, p in zip(samples, indices, strict=True)]
        )
        marked_N = selection(old_N, advantages_N, np.random.default_rng(seed))
        cuts = np.cumsum([len(p) for p in indices])[:-1]
        for out, index, marked in zip(chosen, indices, np.split(marked_N, cuts), strict=True):
            out[index] = marked
    return chosen


def takes_option(loss: PolicyLoss, name: str) -> bool:
    """Return whether `name` is an option of `loss` or of its selection."""
    selection = _selections.get(loss)
    is_its_own = has_parameter(loss, name) or takes_any_keyword(loss)
    return is_its_own or (selection is not None and has_parameter(selection, name))


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return [T] log(probability / old probability), clamped to `MAX_LOG_RATIO`."""
    return (logprobs_T - old_logprobs_T.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_stats(log_ratio_T: Tensor, is_clipped_T: Tensor | None = None) -> dict[str, Tensor]:
    """Return the statistics that every loss with a ratio reports: ratio, approx_kl and, if given, clip_fraction."""
    log_T = log_ratio_T.detach()
    # k3 of KL(old policy || policy), Schulman 2020: E_old[(r - 1) - log r].
    stats = {"ratio": log_T.exp(), "approx_kl": torch.expm1(log_T) - log_T}
    return stats if is_clipped_T is None else {"clip_fraction": is_clipped_T.to(log_T.dtype), **stats}


def sequence_mean(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return [T] for each token the mean of `values_T` over the tokens of its sequence."""
    row_T = _rows(sequence_T)
    # `index_add` is differentiable, so the mean carries the gradient of every token of the sequence.
    blank_T = torch.zeros_like(values_T)
    counts_T = blank_T.index_add(0, row_T, torch.ones_like(values_T)).clamp(min=1)
    return (blank_T.index_add(0, row_T, values_T) / counts_T)[row_T]


def sequence_sum(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return [T] for each token the sum of `values_T` over the tokens of its sequence."""
    row_T = _rows(sequence_T)
    return torch.zeros_like(values_T).index_add(0, row_T, values_T)[row_T]


def _rows(sequence_T: Tensor) -> Tensor:
    """Return [T] for each token the index of its sequence, from 0. `torch.unique` would wait for the device, to learn the
    number of sequences, which is at most T."""
    sorted_T, order_T = sequence_T.sort(stable=True)
    is_first_T = torch.diff(sorted_T, prepend=sorted_T[:1]) != 0
    return torch.empty_like(order_T).scatter_(0, order_T, is_first_T.cumsum(0))


def bind(loss: PolicyLoss, *, kwargs: Mapping[str, Any]) -> PolicyLoss:
    """Return `loss` with its options bound, called as (logprobs_T, old_logprobs_T, advantages_T, sequence_T, marks_T).

    Args:
        loss: The policy loss.
        kwargs: Its options. A clip bound that has no default and is not given is taken from `USUAL_CLIPS`.

    Raises:
        ConfigError: neither the loss nor its selection has a parameter for one of `kwargs`.
    """
    selection = _selections.get(loss)
    for name in kwargs:
        if not takes_option(loss, name):
            known = [n for fn in (loss, selection) if fn is not None for n in inspect.signature(fn).parameters]
            options = [n for n in known if not n.endswith(("_T", "_N")) and n != "rng"]
            raise ConfigError(f"the policy loss takes no option {name!r}.{did_you_mean(name, options)}")
    own = kwargs if takes_any_keyword(loss) else {k: v for k, v in kwargs.items() if has_parameter(loss, k)}
    bound = {**{k: v for k, v in USUAL_CLIPS.items() if k in required(loss)}, **own}
    needs_sequences = has_parameter(loss, "sequence_T")  # looked up once, not for every micro-batch

    def call(
        logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        sequence_T: Tensor,
        marks_T: Tensor | None = None,
    ) -> TokenLoss:
        extra = {"sequence_T": sequence_T} if needs_sequences else {}
        if selection is not None:
            extra["marks_T"] = torch.zeros_like(advantages_T) if marks_T is None else marks_T
        with plugin_errors_as("the policy loss", TrainingError):
            result = loss(logprobs_T, old_logprobs_T, advantages_T, **extra, **bound)
        if not isinstance(result, TokenLoss) or np.shape(result.loss_T) != logprobs_T.shape:
            raise TrainingError(
                f"the policy loss returned {brief(result)}; return TokenLoss(loss_T, stats){defined_at(loss)}"
            )
        for name, stat in result.stats.items():
            if not isinstance(stat, Tensor) or stat.shape != logprobs_T.shape:
                raise TrainingError(
                    f"the policy loss returned the figure {name!r} as {brief(stat)}; return a tensor with a number for each "
                    f"token, as long as logprobs_T{defined_at(loss)}"
                )
        return result

    return call
