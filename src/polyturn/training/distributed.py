"""One leader, many ranks: the leader runs the loop and says what to do, every rank does it on its share.

    leader   rollouts, tools, rewards, buffer, advantages, evaluation, checkpoints      once, however many ranks there are
      |  make, load, score, forward_backward, optim_step, state, weights           `RankGroup.call`: a share for each rank
    ranks    one ShardedPolicy each

`DistributedPolicy` is the leader's `Policy`: it computes coefficients over the global batch, cuts the batch into shares that
cost alike, and puts the answers together. It also keeps the whole weights in a model on the leader (the mirror): what an
engine samples from, and what is exported. A state is whole as well, so a checkpoint loads with any number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.kl import FixedKl, KlController
from polyturn.batching.microbatch import LayoutSettings
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, RankLostError, TrainingError
from polyturn.core.metrics import Mean, Metrics, Sum, merge
from polyturn.core.sample import TrainSample
from polyturn.training.local import with_marks
from polyturn.training.lora import adapter_tensors, has_lora
from polyturn.training.loss_terms import LossSettings
from polyturn.training.rank_group import RankGroup, assign, put_back
from polyturn.training.shards import require_same_shapes
from polyturn.training.state import WeightChannel


class DistributedPolicy:
    """The policy of a whole team; implements `core.protocols.Policy`."""

    def __init__(
        self,
        team: RankGroup,
        spec: Any,
        *,
        mirror: PreTrainedModel,
        loss: LossSettings,
        layout: LayoutSettings | None = None,
        kl: KlController | None = None,
    ) -> None:
        """Let every rank make its share of `mirror`, with the weights that it has now.

        Args:
            team: The ranks.
            spec: What each rank makes its policy from.
            mirror: The whole model on the leader; `gather` writes the trained weights into it, in place.
            loss: The loss that the ranks use, for what is computed over the global batch.
            layout: How the ranks lay their samples out, for what each gets; None takes the defaults.
            kl: Steers the weight of the KL term on all ranks; None keeps it at `loss.kl_coef`.
        """
        self._team = team
        self._loss = loss
        self._layout = layout or LayoutSettings()
        self.kl = kl or FixedKl(coef=loss.kl_coef)
        self.model = mirror
        self.step_count = 0
        self.train_seconds = 0.0
        self.optim_seconds = 0.0
        self.last_logprobs: list[Floats] | None = None
        self._all("make", spec)
        self._load({"model": self.weights()})

    @property
    def num_rows(self) -> int:
        """How many ranks see different samples."""
        return self._team.num_ranks // self._team.tensor_parallel

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[Floats]:
        """Return for each sample [T] the log-probability of each weighted token, 0 elsewhere."""
        began = time.perf_counter()
        rows = assign(samples, settings=self._layout, num_shares=self.num_rows)
        found = self._rows("score", [([samples[i] for i in row], reference) for row in rows])
        self.train_seconds += time.perf_counter() - began
        return put_back(rows, found, len(samples))

    def forward_backward(self, samples: Sequence[TrainSample], *, coefs: Sequence[ArrayLike] | None = None) -> Metrics:
        """Add the gradient of the policy loss over `samples`, everything that one optimizer step trains on.

        Raises:
            TrainingError: the samples lack what the loss needs.
        """
        loss = self._loss
        lacking = next((s.id for s in samples if s.advantages is None), None)
        if lacking is not None:
            raise TrainingError(f"sample {lacking} has no advantages; run an advantage estimator before forward_backward")
        if loss.kl_coef and any(s.ref_logprobs is None for s in samples):
            scores = self.score(samples, reference=True)
            samples = [s.replace(ref_logprobs=lp) for s, lp in zip(samples, scores, strict=True)]
        samples = with_marks(samples, loss, score=self.score, seed=self.step_count)
        if coefs is None:
            coefs = loss_coefs(
                samples, mode=loss.aggregation, norm_length=loss.norm_length, segment_weight=loss.segment_weight
            )
        return self._accumulate("forward_backward", samples, coefs, self.kl.coef)

    def sft_forward_backward(self, samples: Sequence[TrainSample], *, coefs: Sequence[ArrayLike] | None = None) -> Metrics:
        """Add the gradient of the weighted cross-entropy over `samples`, averaged over the weight of the whole batch."""
        return self._accumulate("sft", samples, loss_coefs(samples, mode="token-mean") if coefs is None else coefs)

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient on all ranks, or on none, and clear it.

        Raises:
            TrainingError: loss or gradient is not finite, once more in a row than such steps are skipped.
        """
        began = time.perf_counter()
        metrics: Metrics = self._all("optim_step")[0]
        self.step_count += 1
        seconds = time.perf_counter() - began
        self.optim_seconds += seconds
        return metrics | {"time/optim": Sum(seconds)}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on the CPU, the same that one process would return.

        Raises:
            CheckpointError: a rank is gone, and its shards with it.
        """
        try:
            state: dict[str, Any] = self._all("state")[0]
        except RankLostError as problem:
            raise CheckpointError(f"no checkpoint can be made of the weights now: {problem}") from problem
        return {**state, "kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in a run of one process or another number of ranks.

        Raises:
            CheckpointError: the state is of another model.
        """
        require_same_shapes(state["model"], adapter_tensors(self.model) if has_lora(self.model) else self.model.state_dict())
        self._load(state)
        self.kl.load_state_dict(state.get("kl", {}))
        self.step_count = int(state["optimizer"]["step_count"])
        self.gather()

    def gather(self) -> None:
        """Write the weights as they are on the ranks into the mirror, in place; with LoRA the adapter, all that changes."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, whole in self._all("weights")[0].items():
                own[name].copy_(whole)

    def weights(self) -> dict[str, Tensor]:
        """Return name -> whole tensor without gradient, as `gather` last wrote it."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def close(self) -> None:
        """Let the ranks end."""
        self._team.close()

    def _accumulate(self, command: str, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike], *more: float) -> Metrics:
        began = time.perf_counter()
        rows = assign(samples, settings=self._layout, num_shares=self.num_rows)
        shares = [([samples[i] for i in row], [np.asarray(coefs[i]) for i in row], *more) for row in rows]
        found = self._rows(command, shares)
        self.train_seconds += time.perf_counter() - began
        logprobs = [lp for _, lp in found]
        is_whole = all(lp is not None or not row for lp, row in zip(logprobs, rows, strict=True))
        self.last_logprobs = (
            put_back(rows, [lp or [] for lp in logprobs], len(samples)) if is_whole and any(logprobs) else None
        )
        return merge_ranks([metrics for metrics, _ in found])

    def _load(self, state: Mapping[str, Any]) -> None:
        self._team.call("load", [(state,), *[(None,)] * (self._team.num_ranks - 1)])

    def _all(self, command: str, *share: Any) -> list[Any]:
        return self._team.call(command, [share] * self._team.num_ranks)

    def _rows(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call with a share for each row of ranks, and return what the first rank of each row returned."""
        width = self._team.tensor_parallel
        return self._team.call(command, [share for share in shares for _ in range(width)])[::width]


class GatheredWeights:
    """The way of the weights from the ranks to an engine, over the leader's whole copy."""

    def __init__(self, policy: DistributedPolicy, channel: WeightChannel) -> None:
        """Gather before `channel` publishes."""
        self._policy = policy
        self._channel = channel

    async def start(self, version: int) -> object:
        """Bring the first weights there, as `version`."""
        self._policy.gather()
        return await self._channel.start(version)

    async def publish(self, version: int) -> object:
        """Bring the weights as they are now, as `version`."""
        self._policy.gather()
        return await self._channel.publish(version)


def merge_ranks(parts: Sequence[Metrics]) -> Metrics:
    """Merge what the ranks say about one step: losses add up, times are those of the slowest."""
    times = {name: m for part in parts for name, m in part.items() if name.startswith("time/")}
    for part in parts:
        for name, metric in part.items():
            if name in times and metric.value > times[name].value:
                times[name] = metric
    merged = merge({n: m for n, m in part.items() if not n.startswith("time/")} for part in parts)
    # A loss is the sum of what its tokens contribute, already divided over the global batch.
    summed: Metrics = {
        name: Mean(metric.total) for name, metric in merged.items() if name.startswith("loss/") and isinstance(metric, Mean)
    }
    return {name: m for name, m in {**merged, **summed}.items() if not math.isnan(m.value)} | times
