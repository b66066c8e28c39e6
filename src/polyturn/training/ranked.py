"""One leader, many ranks: the leader runs the loop and says what to do, every rank does it on its share.

    leader   rollouts, tools, rewards, buffer, advantages, evaluation, checkpoints      once, however many ranks there are
      |  make, score, forward_backward, optim_step, save, load                     `RankGroup.call`: a share for each rank
    ranks    one `ModelBackend` over shards for each network

`RankedBackend` is the leader's `Backend`: it cuts a batch into shares that cost alike, and puts the answers together.
Weights it gives as a stream, a bucket at a time, and keeps no copy; only an embedded engine's model here follows them (the
mirror). A state stays in shards: each rank writes and reads its own part of a checkpoint, made by any number of ranks.
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
from polyturn.core.aio import OneThread
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, RankLostError
from polyturn.core.metrics import Mean, Metrics, merge
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.engines.update_gate import WeightChannel
from polyturn.engines.weight_transport import BUCKET_BYTES, StreamedTensors, TensorKind, buckets
from polyturn.training.backend import NO_WEIGHTS, OWN, TermWeights
from polyturn.training.rank_group import RankGroup, assign, put_back
from polyturn.training.shards import METADATA


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
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Let every rank make its share.

        Args:
            group: The ranks.
            network: Which one: a name that the ranks know how to make.
            spec: What they make it from.
            layout: How the ranks lay their samples out, for what each gets; None takes the defaults.
            start: The weights to begin with; None where the ranks load their own.
            mirror: A model of this process that `gather` writes the trained weights into, in place: the embedded engine's.
            bucket_bytes: Of the weights that are gathered at once.
        """
        self.step_count = 0
        self._group = group
        self._network = network
        self._layout = layout or LayoutSettings()
        self._mirror = mirror
        self._bucket_bytes = bucket_bytes
        self._folder = Path()
        """The folder of the latest checkpoint."""
        self._all("make", spec)
        if start is not None:
            for piece in buckets(start):
                self._all("take", piece)

    def score(self, samples: Sequence[TrainSample], scorer: str = OWN) -> list[Floats]:
        """Return for each sample [T] what `scorer` gives each weighted token, 0 elsewhere."""
        rows = self._assign(samples)
        return put_back(rows, self._rows("score", [([samples[i] for i in row], scorer) for row in rows]), len(samples))

    def forward_backward(
        self,
        samples: Sequence[TrainSample],
        coefs: Sequence[ArrayLike],
        objective: str,
        weights: TermWeights = NO_WEIGHTS,
    ) -> PassResult:
        """Add the gradient of an objective over `samples`, each rank that of its share."""
        rows = self._assign(samples)
        # Coefficients travel with their samples: they hold the average over the whole batch, which no rank sees.
        shares = [([samples[i] for i in row], [np.asarray(coefs[i]) for i in row], objective, weights) for row in rows]
        results: list[PassResult] = self._rows("forward_backward", shares)

        def whole(parts: Sequence[list[Floats] | None]) -> list[Floats] | None:
            # A rank without a sample gives no arrays, and none is missing.
            is_whole = any(parts) and all(part is not None or not row for part, row in zip(parts, rows, strict=True))
            return put_back(rows, [part or [] for part in parts], len(samples)) if is_whole else None

        logprobs, entropies = whole([part.logprobs for part in results]), whole([part.entropies for part in results])
        metrics = merge_ranks([part.metrics for part in results])
        return PassResult(metrics, logprobs, entropies, is_finite=all(part.is_finite for part in results))

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient on all ranks, or on none, and clear it.

        Raises:
            TrainingError: loss or gradient is not finite, once more in a row than such steps are skipped.
        """
        metrics: Metrics = self._all("optim_step")[0]  # the norm is of all shards, so every rank says the same
        self.step_count += 1
        return metrics

    def save(self, folder: Path) -> None:
        """Let every rank begin to write its part into `folder`, which all must see.

        Raises:
            CheckpointError: a rank is gone, and its shards with it.
        """
        self._shards("save", folder.resolve())
        self._folder = folder

    def is_saved(self) -> bool:
        """Return whether all ranks have written what `save` began.

        Raises:
            CheckpointError: one could not, or is gone.
        """
        is_done = all(self._shards("is_saved"))
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

    def weights(self) -> StreamedTensors:
        """Return name -> whole weight, an adapter merged into it, for an engine of another process."""
        return self._streamed(is_merged=True)

    def gather(self) -> None:
        """Write what training changes into the model of this process that follows the ranks, if there is one, in place."""
        if self._mirror is None:
            return
        own = self._mirror.state_dict()
        # A bucket at a time and in place, so that no second copy of the model is ever in memory here.
        with torch.no_grad():
            for bucket in self.trained().buckets():
                for name, whole in bucket.items():
                    own[name].copy_(whole)

    def trained(self) -> StreamedTensors:
        """Return name -> whole tensor of what training changes, for an engine of the same module: with LoRA the adapter."""
        return self._streamed(is_merged=False)

    def weight_groups(self, is_merged: bool = True) -> list[str]:
        """Return the groups of parameters that `shift_weights` moves."""
        groups: list[str] = self._all("weight_groups", is_merged)[0]
        return groups

    def shift_weights(self, group: str, scale: float) -> None:
        """Let every rank move its part of a group of weights."""
        self._all("shift_weights", group, scale)

    def free_cache(self) -> None:
        """Let every rank return cached, unused GPU memory."""
        self._all("free_cache")

    def close(self) -> None:
        """Let the ranks end."""
        self._group.close()

    def _assign(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return assign(samples, settings=self._layout, num_shares=self._group.num_ranks // self._group.row_width)

    def _call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._group.call(f"{self._network}.{command}", shares)

    def _all(self, command: str, *share: Any) -> list[Any]:
        return self._call(command, [share] * self._group.num_ranks)

    def _shards(self, command: str, *share: Any) -> list[Any]:
        try:
            return self._all(command, *share)
        except RankLostError as problem:
            raise CheckpointError(f"no checkpoint can be made of the {self._network} now: {problem}") from problem

    def _streamed(self, *, is_merged: bool) -> StreamedTensors:
        def bring(names: Sequence[str]) -> Mapping[str, Tensor]:
            tensors: Mapping[str, Tensor] = self._all("gathered", list(names), is_merged)[0]
            return tensors

        kinds: Mapping[str, TensorKind] = self._all("kinds", is_merged)[0]

        def write(pieces: Sequence[Sequence[str]], folder: Path) -> None:
            self._all("write", pieces, is_merged, folder)

        return StreamedTensors(kinds, bring, limit=self._bucket_bytes, write=write)

    def _rows(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call with a share for each row of ranks, and return the result of the first rank of each row."""
        width = self._group.row_width
        # Ranks of a row see the same samples and answer alike, so that one answer stands for all of them.
        return self._call(command, [share for share in shares for _ in range(width)])[::width]


class GatheredWeights:
    """The channel of weights from the ranks to an engine that samples from a model of this process."""

    def __init__(self, backend: RankedBackend, channel: WeightChannel, *, thread: OneThread | None = None) -> None:
        """Write them into it before `channel` publishes.

        `thread` is the trainer's, for an engine that goes on from a copy of that model. One that samples from it, in turns
        with the event loop, must not see half of them.
        """
        self._backend = backend
        self._channel = channel
        self._thread = thread

    async def start(self, version: int) -> object:
        """Bring the first weights there, as `version`."""
        await self._gather()
        return await self._channel.start(version)

    async def publish(self, version: int) -> object:
        """Bring the weights as they are now, as `version`."""
        await self._gather()
        return await self._channel.publish(version)

    async def _gather(self) -> None:
        if self._thread is None:
            self._backend.gather()
        else:
            await self._thread.run(self._backend.gather)


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
    # A mean over nothing is NaN: no rank had a token that it is of.
    return {name: m for name, m in {**merged, **summed}.items() if not math.isnan(m.value)} | times
