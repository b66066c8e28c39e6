"""RankedBackend: the controller runs the loop and sends commands; every rank runs them on its share.

    controller   rollouts, tools, rewards, buffer, advantages, evaluation, checkpoints     once, for any number of ranks
        |  make, score, forward_backward, optim_step, save, load                   `RankGroup.call`: a share for each rank
    ranks        one `ModelBackend` over shards for each network

`RankedBackend` is the controller's `Backend`: it cuts a batch into shares of equal cost and combines the answers. It streams
weights in buckets and keeps no copy, except in the model of an embedded engine (the mirror). A state stays in shards: each
rank writes and reads its part of a checkpoint, which any number of ranks may have written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.batching.microbatch import LayoutSettings
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError
from polyturn.core.metrics import Mean, Metrics, merge
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.engines.weights.stream import BUCKET_BYTES, StreamedTensors, TensorKind
from polyturn.training.backend import NO_WEIGHTS, OWN, TermWeights
from polyturn.training.rank_group import RankGroup, assign, put_back
from polyturn.training.shards import absent_file


class RankedBackend:
    """A network over the ranks of a group; implements `Backend`."""

    def __init__(
        self,
        group: RankGroup,
        network: str,
        spec: Any = None,
        *,
        layout: LayoutSettings | None = None,
        mirror: PreTrainedModel | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Make the network on every rank.

        Args:
            group: The ranks.
            network: Name of the network, a key of `RankWorker`'s `make`.
            spec: Argument for the ranks' function that makes the network.
            layout: The ranks' layout, to divide samples by cost; None takes the defaults.
            mirror: The embedded engine's model in this process, into which `gather` writes the trained weights in place.
            bucket_bytes: Bytes of weights to gather at a time.
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

    def score(self, samples: Sequence[TrainSample], scorer: str = OWN) -> list[Floats]:
        """Return for each sample [T] the result of `scorer` at each weighted token, 0 elsewhere."""
        rows = self._assign(samples)
        return put_back(rows, self._rows("score", [([samples[i] for i in row], scorer) for row in rows]), len(samples))

    def forward_backward(
        self,
        samples: Sequence[TrainSample],
        coefs: Sequence[ArrayLike],
        objective: str,
        weights: TermWeights = NO_WEIGHTS,
    ) -> PassResult:
        """Add the gradient of an objective over `samples`, each rank for its share."""
        rows = self._assign(samples)
        # Coefficients are sent with their samples: they average over the whole batch, which no rank sees.
        shares = [([samples[i] for i in row], [np.asarray(coefs[i]) for i in row], objective, weights) for row in rows]
        results: list[PassResult] = self._rows("forward_backward", shares)

        def whole(parts: Sequence[list[Floats] | None]) -> list[Floats] | None:
            # A rank without a sample returns no arrays, which does not make the result incomplete.
            is_whole = any(parts) and all(part is not None or not row for part, row in zip(parts, rows, strict=True))
            return put_back(rows, [part or [] for part in parts], len(samples)) if is_whole else None

        logprobs, entropies = whole([part.logprobs for part in results]), whole([part.entropies for part in results])
        metrics = merge_ranks([part.metrics for part in results])
        return PassResult(metrics, logprobs, entropies, is_finite=all(part.is_finite for part in results))

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, or skip it on all ranks, and clear the gradient.

        Raises:
            TrainingError: more consecutive steps had a loss or gradient that is not finite than may be skipped.
        """
        metrics: Metrics = self._all("optim_step")[0]  # the norm covers all shards, so all ranks return the same
        self.step_count += 1
        return metrics

    def save(self, folder: Path) -> None:
        """Start writing every rank's part to `folder`, which must be visible to all.

        Raises:
            RankLostError: a rank is gone with its shards.
        """
        self._all("save", folder.resolve())
        self._folder = folder

    def is_saved(self) -> bool:
        """Return whether all ranks have written their part.

        Raises:
            CheckpointError: a rank could not write.
            RankLostError: a rank is gone.
        """
        is_done = all(self._all("is_saved"))
        if is_done and (lacking := absent_file(self._folder)) is not None:
            raise CheckpointError(
                f"the ranks have written {lacking} to {self._folder}, which this machine does not see; set `out` to a "
                "folder that all machines share"
            )
        return is_done

    def load(self, folder: Path) -> None:
        """Load the state from `folder`, written by one process or any number of ranks.

        Raises:
            CheckpointError: the state is of another model.
        """
        self._all("load", folder.resolve())
        self.step_count = int(self._all("step_count")[0])
        self.gather()

    def weights(self) -> StreamedTensors:
        """Return name -> whole weight with an adapter merged, for an engine in another process."""
        return self._streamed(is_merged=True)

    def gather(self) -> None:
        """Write the trained tensors into the mirror in place, if there is one."""
        if self._mirror is None:
            return
        own = self._mirror.state_dict()
        # A bucket at a time and in place, so that this process never holds a second copy of the model.
        with torch.no_grad():
            for bucket in self.trained().buckets():
                for name, whole in bucket.items():
                    own[name].copy_(whole)

    def trained(self) -> StreamedTensors:
        """Return name -> whole tensor that training changes (with LoRA, the adapter's), for an engine with the same
        module."""
        return self._streamed(is_merged=False)

    def weight_groups(self, is_merged: bool = True) -> list[str]:
        """Return the groups of parameters for `shift_weights`."""
        groups: list[str] = self._all("weight_groups", is_merged)[0]
        return groups

    def shift_weights(self, group: str, scale: float) -> None:
        """Shift a group of weights on every rank."""
        self._all("shift_weights", group, scale)

    def free_cache(self) -> None:
        """Release cached, unused GPU memory on every rank."""
        self._all("free_cache")

    def close(self) -> None:
        """End the ranks."""
        self._group.close()

    def _assign(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return assign(samples, settings=self._layout, num_shares=self._group.num_ranks // self._group.row_width)

    def _call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._group.call(f"{self._network}.{command}", shares)

    def _all(self, command: str, *share: Any) -> list[Any]:
        return self._call(command, [share] * self._group.num_ranks)

    def _streamed(self, *, is_merged: bool) -> StreamedTensors:
        def bring(names: Sequence[str]) -> Mapping[str, Tensor]:
            tensors: Mapping[str, Tensor] = self._all("gathered", list(names), is_merged)[0]
            return tensors

        kinds: Mapping[str, TensorKind] = self._all("kinds", is_merged)[0]

        def use_there(pieces: Sequence[Sequence[str]], use: Callable[..., Any]) -> Any:
            return self._all("over", pieces, is_merged, use)[0]

        return StreamedTensors(kinds, bring, limit=self._bucket_bytes, use_there=use_there)

    def _rows(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call with one share per row of ranks, and return the result of the first rank of each row."""
        width = self._group.row_width
        # Ranks of a row see the same samples and return the same answer.
        return self._call(command, [share for share in shares for _ in range(width)])[::width]


_ONCE = ("time/", "tokens/packing_refused")
"""Beginnings of the names of metrics that are not summed over ranks."""


def merge_ranks(parts: Sequence[Metrics]) -> Metrics:
    """Merge the ranks' metrics of a step: losses are summed, and the slowest rank's times count."""
    once = {name: m for part in parts for name, m in part.items() if name.startswith(_ONCE)}
    for part in parts:
        for name, metric in part.items():
            if name in once and metric.value > once[name].value:
                once[name] = metric
    merged = merge({n: m for n, m in part.items() if n not in once} for part in parts)
    # A loss is a sum over tokens that is already normalised over the global batch.
    summed: Metrics = {
        name: Mean(metric.total) for name, metric in merged.items() if name.startswith("loss/") and isinstance(metric, Mean)
    }
    # A mean is NaN if no rank had a token for it.
    return {name: m for name, m in {**merged, **summed}.items() if not math.isnan(m.value)} | once
