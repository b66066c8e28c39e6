"""DropStats: the lengths of trajectories dropped before training, which show a bias against long answers.

    buffer/dropped_decile_0 ... _9    dropped trajectories, by the decile of their length within the step

Without a bias the ten numbers are about equal. Over-sampling cuts off the slowest groups, which are long, so the numbers
rise. A trajectory that was cut off counts with the length it had reached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from polyturn.core.trajectory import TrajectoryGroup

NUM_DECILES = 10


class DropStats:
    """Counts of one step; `read` ends the step."""

    def __init__(self) -> None:
        self._dropped: list[int] = []
        """Sampled tokens of each trajectory of the dropped groups."""
        self._groups: dict[str, list[int]] = {}
        """Reason -> sampled tokens of each group dropped for that reason."""

    def add(self, lengths: Iterable[int], *, reason: str) -> None:
        """Count a dropped group, given the sampled tokens of each of its trajectories."""
        kept = list(lengths)
        self._dropped += kept
        self._groups.setdefault(reason, []).append(sum(kept))

    def add_group(self, group: TrajectoryGroup, *, reason: str) -> None:
        """Count a finished group that is dropped."""
        self.add(lengths_of([group]), reason=reason)

    def read(self, taken: Sequence[TrajectoryGroup], *, left_out: Collection[str] = ()) -> dict[str, float]:
        """Return the metrics of the step and reset the counts.

        Args:
            taken: The groups that the step took.
            left_out: Ids of the trajectories of `taken` without a trained token, for whatever reason: failed, in a group of
                equal rewards, truncated, rejected. Other metrics count their tokens.
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
    """Return the number of `lengths` in each decile of the lengths `of`."""
    every = np.sort(np.asarray(of, np.int64))
    sorted_lengths = np.asarray(lengths, np.int64)
    # Equal lengths share the middle of their ranks. Putting all of them into the first decile they touch would look like a
    # bias.
    middle = (np.searchsorted(every, sorted_lengths, "left") + np.searchsorted(every, sorted_lengths, "right")) / 2
    tenth = np.minimum(NUM_DECILES * middle / max(1, len(every)), NUM_DECILES - 1).astype(np.int64)
    return [int(n) for n in np.bincount(tenth, minlength=NUM_DECILES)]


def lengths_of(groups: Iterable[TrajectoryGroup]) -> list[int]:
    """Return the number of sampled tokens of each trajectory."""
    return [t.num_sampled_tokens for group in groups for t in group.trajectories]
