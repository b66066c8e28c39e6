"""Distributions of values of trajectories and tokens over steps, and the components of the reward.

    600 steps of 128 rewards  ->  counts in at most 60 columns of steps x 24 bins

Values of trajectories come from the store's table. Values of tokens (advantages, log-probabilities) come from its arrays, at
most 64 evenly spaced ones per trajectory, so that long trajectories do not dominate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from polyturn.store.part_file import PartFile
from polyturn.store.stored_run import Rows

Values = NDArray[np.float64]
COLUMNS, BINS = 60, 24
TOKENS = 64
"""Largest number of tokens to count per trajectory."""
OF_TRAJECTORIES = {
    "reward": "Reward",
    "num_sampled_tokens": "Length: sampled tokens of a trajectory",
    "num_turns": "Turns",
    "staleness": "Staleness: policy versions between a trajectory's oldest token and its update",
}
OF_TOKENS = {
    "advantages": "Advantages of tokens",
    "difference": "Log-probabilities of tokens, engine minus trainer",
}


class TokenValues(NamedTuple):
    """Values of tokens of one part."""

    row: Rows
    """[N] row of each value in the part."""
    value: NDArray[np.float32]
    """[N] the values, which may be non-finite."""


def token_values(file: PartFile) -> dict[str, TokenValues]:
    """Return name of `OF_TOKENS` -> values of a part's tokens."""
    names = ["advantages", "logprobs", "policy_logprobs"]
    table = file.read(names)
    (row, _, advantages), engine, trainer = (spaced(table[name].combine_chunks()) for name in names)
    same = np.isin(engine.row, np.flatnonzero(engine.length == trainer.length))
    both = np.isin(trainer.row, np.flatnonzero(engine.length == trainer.length))
    difference = engine.value[same] - trainer.value[both]
    return {"advantages": TokenValues(row, advantages), "difference": TokenValues(engine.row[same], difference)}


class _Spaced(NamedTuple):
    row: Rows
    length: Rows
    """[rows] number of tokens of each list."""
    value: NDArray[np.float32]


def spaced(lists: pa.ListArray) -> _Spaced:
    """Return at most `TOKENS` evenly spaced values of each list."""
    length = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    taken, start = np.minimum(length, TOKENS), np.cumsum(length) - length
    row = np.repeat(np.arange(len(length)), taken)
    number = np.arange(len(row)) - np.repeat(np.cumsum(taken) - taken, taken)
    index = start[row] + number * length[row] // np.maximum(taken[row], 1)
    return _Spaced(row, length, lists.flatten().to_numpy(zero_copy_only=False)[index].astype(np.float32))


def of_trajectories(table: pa.Table) -> dict[str, tuple[Rows, Values]]:
    """Return name of `OF_TRAJECTORIES` -> (steps [N], values [N])."""
    step = table["step"].to_numpy()
    staleness = pc.subtract(pc.subtract(table["step"], 1), table["min_version"].cast(pa.int64()))
    is_trained = pc.starts_with(table["split"], "train")  # an evaluation updates nothing, so it has no staleness
    staleness = pc.if_else(is_trained, staleness, pa.scalar(None, pa.int64()))
    columns = {name: table[name] if name in table.column_names else staleness for name in OF_TRAJECTORIES}
    return {name: (step, column.cast(pa.float64()).to_numpy()) for name, column in columns.items()}


def of_tokens(name: str, parts: Iterable[tuple[pa.Table, Rows, dict[str, TokenValues]]]) -> tuple[Rows, Values]:
    """Return (steps [N], values [N]) of tokens from parts that `StoredRun.scan` yields."""
    steps, values = [np.empty(0, np.int64)], [np.empty(0, np.float64)]
    for table, rows, known in parts:
        if name not in known or not len(rows):
            continue
        step_of = np.full(max(int(rows.max()), int(known[name].row.max(initial=0))) + 1, -1, np.int64)
        step_of[rows] = table["step"].to_numpy()
        mine = step_of[known[name].row]
        steps.append(mine[mine >= 0])
        values.append(known[name].value[mine >= 0].astype(np.float64))
    return np.concatenate(steps), np.concatenate(values)


def distribution(step: Rows, value: Values) -> dict[str, Any] | None:
    """Return the number of values in each bin of each column of steps; None if no value is finite.

    Args:
        step: [N] steps, at least 0.
        value: [N] values; non-finite ones are left out. The lowest and highest thousandth go to the outermost bins.
    """
    known = np.isfinite(value)
    step, value = step[known], value[known]
    if not len(value):
        return None
    low, high = np.quantile(value, (0.001, 0.999)).tolist()
    if low == high:
        low, high = low - 0.5, high + 0.5
    starts = columns_of(step)
    at = np.searchsorted(starts, step, side="right") - 1
    bins = np.clip(((value - low) / (high - low) * BINS).astype(np.int64), 0, BINS - 1)
    counts = np.zeros((len(starts), BINS), np.int64)
    np.add.at(counts, (at, bins), 1)
    mean = np.bincount(at, value, len(starts)) / counts.sum(1)
    return {"steps": starts.tolist(), "low": low, "high": high, "counts": counts.tolist(), "mean": mean.tolist()}


def columns_of(step: Rows) -> Rows:
    """Return the first step of each column: every step, or at most `COLUMNS` columns with equally many steps."""
    steps = np.unique(step)
    return steps[:: -(-len(steps) // COLUMNS)] if len(steps) else steps


def reward_parts(table: pa.Table, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the mean of each reward component in each column of steps; 0 if no trajectory has the component.

    If the weighted components add up to the rewards (`is_sum`), the means are weighted, and components of weight 0 are left
    out.
    """
    step = table["step"].to_numpy()
    starts = columns_of(step)
    at = np.searchsorted(starts, step, side="right") - 1
    column = table["components"].combine_chunks()
    length = np.diff(column.offsets.to_numpy()) * column.is_valid().to_numpy(zero_copy_only=False)
    row, names, values = np.repeat(np.arange(len(step)), length), column.keys.to_numpy(zero_copy_only=False), column.items
    value, trajectories = values.to_numpy(zero_copy_only=False).astype(np.float64), np.bincount(at, minlength=len(starts))
    reward = table["reward"].to_numpy().astype(np.float64)

    def mean(column: NDArray[np.int64], of: Values) -> Values:
        known = np.isfinite(of)
        return np.bincount(column[known], of[known], len(starts)) / np.maximum(trajectories, 1)

    means = {name: mean(at[row[names == name]], value[names == name]) for name in sorted(set(names.tolist()))[:12]}
    by_weight = {name: weights[name] * of for name, of in means.items() if weights.get(name)}
    is_sum = bool(by_weight) and np.allclose(sum(by_weight.values()), mean(at, reward), atol=1e-6)
    parts = {name: of.tolist() for name, of in (by_weight if is_sum else means).items()}
    return {"steps": starts.tolist(), "parts": parts, "is_sum": is_sum}
