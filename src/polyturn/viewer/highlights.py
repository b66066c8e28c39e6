"""Selects the most informative trajectories of a run: at most ten, each with the reason.

    repaired            g12/3   a turn scored 0, and 1 after the feedback
    broken tool call    g7/0    2 of its 3 tool calls failed

They are selected from the store's table. Only the selected ones, and at most `TRIED` candidates for "repaired", are read
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from polyturn.core.errors import DataError
from polyturn.store.schema import StoredTrajectory
from polyturn.store.stored_run import StoredRun

NUM_HIGHLIGHTS = 10
TRIED = 30
"""Largest number of trajectories to read in search of one that was repaired."""


class Highlight(NamedTuple):
    """A trajectory and the reason why it is shown."""

    title: str
    why: str
    record: StoredTrajectory


def highlights(store: StoredRun, num: int = NUM_HIGHLIGHTS) -> list[Highlight]:
    """Return at most `num` of a run's most informative trajectories, without duplicates."""
    rows = store.table().to_pylist()
    keys_shown: set[tuple[Any, ...]] = set()
    chosen: list[Highlight] = []
    kinds = [_kind(store, rows, keys_shown) for _kind in _KINDS]
    while kinds and len(chosen) < num:  # one of each kind, then a second of each
        for kind in list(kinds):
            one = next(kind, None)
            if one is None:
                kinds.remove(kind)
            elif len(chosen) < num:
                chosen.append(one)
    return chosen


_Rows = list[dict[str, Any]]


def _read(store: StoredRun, row: dict[str, Any], keys_shown: set[tuple[Any, ...]]) -> StoredTrajectory | None:
    key = (row["split"], row["step"], row["group"], row["id"])
    if key in keys_shown:
        return None
    try:
        record = store.record(row["id"], step=row["step"], split=row["split"])
    except DataError:
        return None  # its part is damaged or gone; another trajectory is shown instead
    keys_shown.add(key)
    return record


def _sorted(
    title: str, key: Callable[[dict[str, Any]], Any], keep: Callable[[dict[str, Any]], Any], why: str
) -> Callable[[StoredRun, _Rows, set[tuple[Any, ...]]], Iterator[Highlight]]:
    def kind(store: StoredRun, rows: _Rows, keys_shown: set[tuple[Any, ...]]) -> Iterator[Highlight]:
        for row in sorted((r for r in rows if keep(r)), key=key):
            record = _read(store, row, keys_shown)
            if record is not None:
                yield Highlight(title, why.format(**row), record)

    return kind


def _has_reward(row: dict[str, Any]) -> bool:
    return row["reward"] is not None and row["error"] is None


def _repaired(store: StoredRun, rows: _Rows, keys_shown: set[tuple[Any, ...]]) -> Iterator[Highlight]:
    likely = [r for r in rows if _has_reward(r) and r["num_turns"] > 1 and r["reward"] > 0]
    tried: set[tuple[Any, ...]] = set()
    for row in sorted(likely, key=lambda r: (-r["reward"], -r["step"]))[:TRIED]:
        record = _read(store, row, tried)
        if record is None:
            continue
        scores = [s for s in record.trajectory.turn_scores if s is not None]
        key = (row["split"], row["step"], row["group"], row["id"])
        if len(scores) > 1 and scores[-1] > scores[0] and key not in keys_shown:
            keys_shown.add(key)
            yield Highlight("repaired", f"a turn scored {scores[0]:g}, and {scores[-1]:g} after the feedback", record)


def _learned(store: StoredRun, rows: _Rows, keys_shown: set[tuple[Any, ...]]) -> Iterator[Highlight]:
    """Yield, for the evaluated tasks whose reward rose most, a trajectory of the first evaluation, then of the last."""
    by_task: dict[tuple[str, str], _Rows] = {}
    for row in rows:
        if row["split"].startswith("eval/") and _has_reward(row):
            by_task.setdefault((row["split"], row["task_id"]), []).append(row)
    gains = []
    for visits in by_task.values():
        visits.sort(key=lambda r: r["step"])
        if visits[-1]["step"] > visits[0]["step"] and visits[-1]["reward"] > visits[0]["reward"]:
            gains.append((visits[-1]["reward"] - visits[0]["reward"], visits[0], visits[-1]))
    for _, before, after in sorted(gains, key=lambda g: -g[0]):
        for word, row in (("before", before), ("after", after)):
            record = _read(store, row, keys_shown)
            if record is not None:
                why = (
                    f"one task: reward {before['reward']:g} at step {before['step']}, {after['reward']:g} at {after['step']}"
                )
                yield Highlight(f"{word} training", why, record)


_KINDS = (
    _sorted("best", lambda r: (-r["reward"], -r["step"]), _has_reward, "reward {reward:g}, the highest"),
    _sorted("worst", lambda r: (r["reward"], -r["step"]), _has_reward, "reward {reward:g}, the lowest"),
    _repaired,
    _sorted(
        "broken tool call",
        lambda r: (-r["num_tool_errors"], -r["step"]),
        lambda r: (r["num_tool_errors"] or 0) > 0,
        "{num_tool_errors} of its {num_tool_calls} tool calls failed",
    ),
    _learned,
    _sorted("failed", lambda r: -r["step"], lambda r: r["error"] is not None, "it failed and was left out of the loss"),
    _sorted("longest", lambda r: -r["num_tokens"], _has_reward, "{num_tokens} tokens in {num_turns} turns"),
    _sorted("most turns", lambda r: -r["num_turns"], _has_reward, "{num_turns} turns"),
)
