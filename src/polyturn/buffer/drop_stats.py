"""DropStats: lengths of samples that are dropped before training, to show whether long answers are left out.

    buffer/dropped_decile_0 ... _9    dropped trajectories, by the decile of their length within the step

Without a bias the ten numbers are about equal. Over-sampling that cuts off the rest drops long trajectories, so the numbers
rise. A trajectory that was cut off counts with the length that it had reached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from polyturn.core.trajectory import TrajectoryGroup

NUM_DECILES = 10


class DropStats:
    """Counts over one step; `read` ends it."""

    def __init__(self) -> None:
        self._dropped: list[int] = []
        """The lengths of the trajectories of dropped groups."""
        self._groups: dict[str, list[int]] = {}
        """Reason -> the sampled tokens of each group that was dropped for it."""

    def add(self, lengths: Iterable[int], *, reason: str) -> None:
        """Count a group that is dropped, by the tokens that its trajectories had."""
        kept = list(lengths)
        self._dropped += kept
        self._groups.setdefault(reason, []).append(sum(kept))

    def add_group(self, group: TrajectoryGroup, *, reason: str) -> None:
        """Count a complete group that is dropped."""
        self.add(lengths_of([group]), reason=reason)

    def read(self, taken: Sequence[TrajectoryGroup], *, left_out: Collection[str] = ()) -> dict[str, float]:
        """Return the metrics of the step and begin the next.

        Args:
            taken: The groups that the step was given.
            left_out: The ids of those of their trajectories that no token of was trained, whatever for: failed, in a group
                of equal rewards, truncated, rejected; their tokens are counted elsewhere.
        """
        dropped = [*self._dropped, *(t.num_sampled_tokens for g in taken for t in g.trajectories if t.id in left_out)]
        every = [*self._dropped, *lengths_of(taken)]
        metrics = {f"buffer/dropped_decile_{i}": float(n) for i, n in enumerate(deciles(dropped, of=every))}
        for reason, tokens in self._groups.items():
            metrics[f"buffer/groups_{reason}"] = float(len(tokens))
            metrics[f"tokens/dropped_{reason}"] = float(sum(tokens))
        self._dropped, self._groups = [], {}
        return metrics


def deciles(lengths: Sequence[int], *, of: Sequence[int]) -> list[int]:
    """Return the number of `lengths` in each tenth of the lengths `of`; equal ones share the middle of their ranks."""
    every = np.sort(np.asarray(of, np.int64))
    sorted_lengths = np.asarray(lengths, np.int64)
    # The middle rank of equal lengths: all of them in the first decile they touch would look like a bias.
    middle = (np.searchsorted(every, sorted_lengths, "left") + np.searchsorted(every, sorted_lengths, "right")) / 2
    tenth = np.minimum(NUM_DECILES * middle / max(1, len(every)), NUM_DECILES - 1).astype(np.int64)
    return [int(n) for n in np.bincount(tenth, minlength=NUM_DECILES)]


def lengths_of(groups: Iterable[TrajectoryGroup]) -> list[int]:
    """Return the number of sampled tokens of every trajectory."""
    return [t.num_sampled_tokens for group in groups for t in group.trajectories]
