"""WorkPredictor: how much work an episode still has, learned while episodes run.

Work is seconds in the engine and between turns, without the waiting in the pool's queue. Three sources, from the most to
the least specific, each counted by how many finished episodes it rests on:

    the group's siblings and earlier runs of the task     what they still had to do behind the same number of turns
    all episodes                                          the same, over everything
    the episode itself                                    a floor: siblings still running have done at least so much

A group is what comes before the last "/" of a session id (`g12/3` is number 3 of group g12).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from polyturn.core.generation import GenerateRequest

_PRIOR = 1.0
"""How many finished episodes of the same task weigh as much as everything that is known of all others."""
_MAX_TASKS = 100_000


@dataclass(slots=True)
class _Live:
    """An episode under way."""

    group: str
    began: float
    queued_s: float = 0.0
    marks: list[float] = field(default_factory=list)
    """Work done when each turn was asked for."""
    work_s: float = 0.0


@dataclass(slots=True)
class _Means:
    """Remaining work at each turn index, over finished episodes."""

    sums: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_started: int = 0
    best_live_s: float = 0.0
    """The most work that any of its episodes has done so far."""

    def add(self, marks: list[float], total: float) -> None:
        while len(self.sums) < len(marks):
            self.sums.append(0.0)
            self.counts.append(0)
        for turn, done in enumerate(marks):
            self.sums[turn] += total - done
            self.counts[turn] += 1

    def at(self, turn: int) -> tuple[float, int]:
        """Return the mean remaining work at `turn` and on how many episodes it rests."""
        if turn < len(self.sums) and self.counts[turn]:
            return self.sums[turn] / self.counts[turn], self.counts[turn]
        return 0.0, 0


class WorkPredictor:
    """Told by the pool of each turn's beginning and end, and of each session's end."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._all = _Means()
        self._groups: OrderedDict[str, _Means] = OrderedDict()
        self.num_finished = 0

    def arrived(self, request: GenerateRequest, *, now: float) -> None:
        """Note that an episode asks for a turn."""
        live = self._live.get(request.session_id)
        if live is None:
            group = request.session_id.rpartition("/")[0] or request.session_id
            live = self._live[request.session_id] = _Live(group, now)
        live.work_s = now - live.began - live.queued_s
        live.marks.append(live.work_s)
        means = self._group(live.group)
        means.best_live_s = max(means.best_live_s, live.work_s)

    def admitted(self, request: GenerateRequest, *, waited_s: float) -> None:
        """Note that a turn was sent to a server after `waited_s` in the queue."""
        if (live := self._live.get(request.session_id)) is not None:
            if not live.queued_s and len(live.marks) == 1:
                self._group(live.group).num_started += 1
            live.queued_s += waited_s

    def answered(self, request: GenerateRequest, *, now: float) -> None:
        """Note that a turn is there."""
        if (live := self._live.get(request.session_id)) is not None:
            live.work_s = now - live.began - live.queued_s

    def ended(self, session_id: str) -> None:
        """Learn from a session that ended, with its last answer."""
        live = self._live.pop(session_id, None)
        if live is None or not live.marks:
            return
        self.num_finished += 1
        self._all.add(live.marks, live.work_s)
        self._group(live.group).add(live.marks, live.work_s)

    def remaining_s(self, request: GenerateRequest) -> float:
        """Return the predicted work of the request's episode from this turn on, in seconds."""
        live = self._live.get(request.session_id)
        if live is None:
            return 0.0
        turn = max(len(live.marks) - 1, 0)
        means = self._group(live.group)
        common, num_common = self._all.at(turn)
        own, num_own = means.at(turn)
        if not num_common and self._all.counts:  # longer than any before: as much again as the last part of the others
            common = self._all.at(len(self._all.counts) - 1)[0]
        guess = (own * num_own + common * _PRIOR) / (num_own + _PRIOR)
        return max(guess, means.best_live_s - live.work_s)

    def num_started(self, request: GenerateRequest) -> int:
        """Return how many episodes of the request's group have been sent to a server."""
        live = self._live.get(request.session_id)
        return 0 if live is None else self._group(live.group).num_started

    def _group(self, name: str) -> _Means:
        means = self._groups.get(name)
        if means is None:
            means = self._groups[name] = _Means()
            if len(self._groups) > _MAX_TASKS:
                self._groups.popitem(last=False)
        return means
