"""One leader, many ranks: the leader runs the loop and says what to do, every rank does it on its share.

    leader   rollouts, tools, rewards, buffer, advantages, evaluation, checkpoints      once, however many ranks there are
      |  make, score, forward_backward, optim_step, save, load                     `RankGroup.call`: a share for each rank
    ranks    one `ModelBackend` over shards for each network

`RankedBackend` is the leader's `Backend`: it cuts a batch into shares that cost alike, and puts the answers together. Of the
policy it also keeps the whole weights in a model on the leader (the mirror): what an engine samples from, and what is
exported. A state stays in shards: each rank writes and reads its own part of a checkpoint, with any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.batching.microbatch import LayoutSettings
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, RankLostError
from polyturn.core.metrics import Mean, Metrics, merge
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.engines.weight_transport import buckets
from polyturn.training.backend import OWN
from polyturn.training.rank_group import RankGroup, assign, put_back
from polyturn.training.shards import METADATA
from polyturn.training.state import WeightChannel


class RankedBackend:
    """One network of a run over the ranks of a group; implements `Backend`."""

    def __init__(
        self,
        group: RankGroup,
        network: str,
        spec: Any = None,
        *,
        layout: LayoutSettings | None = None,
        start: Mapping[str, Tensor] | None = None,
        mirror: PreTrainedModel | None = None,
    ) -> None:
        """Let every rank make its share.

        Args:
            group: The ranks.
            network: Which one: a name that the ranks know how to make.
            spec: What they make it from.
            layout: How the ranks lay their samples out, for what each gets; None takes the defaults.
            start: The weights to begin with; None where the ranks load their own.
            mirror: The whole model on the leader; `gather` writes the trained weights into it, in place.
        """
        self.step_count = 0
        self._group = group
        self._network = network
        self._layout = layout or LayoutSettings()
        self._mirror = mirror
        self._folder = Path()
        """Where a checkpoint was last written to."""
        self._all("make", spec)
        if start is not None:
            for piece in buckets(start):
                self._all("take", piece)

    def score(self, samples: Sequence[TrainSample], scorer: str = OWN) -> list[Floats]:
        """Return for each sample [T] what `scorer` gives each weighted token, 0 elsewhere."""
        rows = self._assign(samples)
        return put_back(rows, self._rows("score", [([samples[i] for i in row], scorer) for row in rows]), len(samples))

    def forward_backward(
        self, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike], objective: str, kl_coef: float = 0.0
    ) -> PassResult:
        """Add the gradient of an objective over `samples`, each rank that of its share."""
        rows = self._assign(samples)
        shares = [([samples[i] for i in row], [np.asarray(coefs[i]) for i in row], objective, kl_coef) for row in rows]
        found: list[PassResult] = self._rows("forward_backward", shares)
        is_whole = all(part.logprobs is not None or not row for part, row in zip(found, rows, strict=True))
        logprobs = None
        if is_whole and any(part.logprobs for part in found):
            logprobs = put_back(rows, [part.logprobs or [] for part in found], len(samples))
        metrics = merge_ranks([part.metrics for part in found])
        return PassResult(metrics, logprobs, is_finite=all(part.is_finite for part in found))

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient on all ranks, or on none, and clear it.

        Raises:
            TrainingError: loss or gradient is not finite, once more in a row than such steps are skipped.
        """
        metrics: Metrics = self._all("optim_step")[0]
        self.step_count += 1
        return metrics

    def save(self, folder: Path) -> None:
        """Let every rank begin to write its part into `folder`, which all must see.

        Raises:
            CheckpointError: a rank is gone, and its shards with it.
        """
        try:
            self._all("save", folder.resolve())
        except RankLostError as problem:
            raise CheckpointError(f"no checkpoint can be made of the {self._network} now: {problem}") from problem
        self._folder = folder

    def is_saved(self) -> bool:
        """Return whether all ranks have written what `save` began.

        Raises:
            CheckpointError: one could not, or is gone.
        """
        try:
            is_done = all(self._all("is_saved"))
        except RankLostError as problem:
            raise CheckpointError(f"no checkpoint can be made of the {self._network} now: {problem}") from problem
        if is_done and not (self._folder / METADATA).is_file():
            raise CheckpointError(
                f"the ranks have written to {self._folder}, and it is not here; let `out` be a folder that all machines see"
            )
        return is_done

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, here or in a run of one process or another number of ranks.

        Raises:
            CheckpointError: the state is of another model.
        """
        self._all("load", folder.resolve())
        self.step_count = int(self._all("step_count")[0])
        self.gather()

    def gather(self) -> None:
        """Write the weights as they are on the ranks into the mirror, in place; with LoRA the adapter, all that changes."""
        if self._mirror is None:
            return
        own = self._mirror.state_dict()
        with torch.no_grad():
            for name, whole in self._all("whole_weights")[0].items():
                own[name].copy_(whole)

    def weights(self) -> dict[str, Tensor]:
        """Return name -> whole tensor without gradient, as `gather` last wrote it."""
        assert self._mirror is not None
        return {name: value.detach() for name, value in self._mirror.state_dict().items()}

    def live_weights(self) -> dict[str, Tensor]:
        """Return the tensors of the mirror."""
        return self.weights()

    def close(self) -> None:
        """Let the ranks end."""
        self._group.close()

    def _assign(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return assign(samples, settings=self._layout, num_shares=self._group.num_ranks // self._group.tensor_parallel)

    def _call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._group.call(f"{self._network}.{command}", shares)

    def _all(self, command: str, *share: Any) -> list[Any]:
        return self._call(command, [share] * self._group.num_ranks)

    def _rows(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call with a share for each row of ranks, and return what the first rank of each row returned."""
        width = self._group.tensor_parallel
        return self._call(command, [share for share in shares for _ in range(width)])[::width]


class GatheredWeights:
    """The way of the weights from the ranks to an engine, over the leader's whole copy."""

    def __init__(self, backend: RankedBackend, channel: WeightChannel) -> None:
        """Gather before `channel` publishes."""
        self._backend = backend
        self._channel = channel

    async def start(self, version: int) -> object:
        """Bring the first weights there, as `version`."""
        self._backend.gather()
        return await self._channel.start(version)

    async def publish(self, version: int) -> object:
        """Bring the weights as they are now, as `version`."""
        self._backend.gather()
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
