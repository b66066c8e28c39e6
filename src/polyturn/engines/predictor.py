"""WorkPredictor: the remaining work of an episode, learned while episodes run.

Work is seconds in the engine and between turns, without the waiting in the pool's queue. What is left is predicted as

    turns still to come    chance to go on after each turn: of the group where it has ended episodes, else of all
    x work of a turn       of the episode itself, pulled to its group's turns, pulled to those of all

Turns teach as soon as they are over, so a group is known after the first turns of a few siblings, long before one of them
ends; only the number of turns has to wait for ends. A group is what comes before the last "/" of a session id (`g12/3` is
number 3 of group g12).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from polyturn.core.generation import GenerateRequest

_TURNS_OF_ALL = 2.0
"""The mean of all groups weighs as much as so many turns of the group."""
_TURNS_OF_GROUP = 4.0
"""The mean of its group weighs as much as so many turns of the episode."""
_ENDS_OF_ALL = 4.0
"""The chance to end of all groups weighs as much as so many episodes of the group that reached the turn."""
_MAX_GROUPS = 8192
"""Groups that are remembered, the newest: more than ever run at once."""


@dataclass(slots=True)
class _TurnStats:
    """Work and number of turns, over finished turns."""

    work_s: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.work_s += seconds
        self.count += 1

    def mean(self, otherwise: float, weight: float) -> float:
        """Return the mean work of a turn, pulled to `otherwise` as by `weight` turns of that length."""
        return (self.work_s + weight * otherwise) / (self.count + weight)


@dataclass(slots=True)
class _LiveEpisode:
    """An episode under way."""

    group: _Group
    began: float
    queued_s: float = 0.0
    work_s: float = 0.0
    asked_at_s: float = 0.0
    """Work that it had done when its present turn was asked for."""
    turn: int = -1
    is_admitted: bool = False
    turns: _TurnStats = field(default_factory=_TurnStats)


@dataclass(slots=True)
class _Group:
    """Episodes of which one tells about the others."""

    turns: _TurnStats = field(default_factory=_TurnStats)
    reached: list[int] = field(default_factory=list)
    """Number of episodes that asked for turn k."""
    ended: list[int] = field(default_factory=list)
    """Number of episodes that ended with turn k."""
    num_started: int = 0
    still: tuple[int, list[float]] = (-1, [])
    """(episodes that had ended when this was worked out, turns still to come at turn k, k included)."""

    def reach(self, turn: int) -> None:
        while len(self.reached) <= turn:
            self.reached.append(0)
            self.ended.append(0)
        self.reached[turn] += 1

    def ends_at(self, turn: int, *, otherwise: float, weight: float) -> float:
        """Return the chance to end with turn `turn`, of those that went on from it or ended."""
        ended = self.ended[turn] if turn < len(self.ended) else 0
        went_on = self.reached[turn + 1] if turn + 1 < len(self.reached) else 0
        return (ended + weight * otherwise) / (ended + went_on + weight)


class WorkPredictor:
    """Told by the pool of each turn's beginning and end, and of each session's end."""

    def __init__(self) -> None:
        self._live: dict[str, _LiveEpisode] = {}
        self._all = _Group()
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self.num_finished = 0

    def arrived(self, request: GenerateRequest, *, now: float) -> None:
        """Note that an episode asks for a turn."""
        live = self._live.get(request.session_id)
        if live is None:
            group = request.session_id.rpartition("/")[0] or request.session_id
            live = self._live[request.session_id] = _LiveEpisode(self._group(group), now)
        else:
            live.work_s = now - live.began - live.queued_s
            self._end_turn(live)
        live.asked_at_s = live.work_s
        live.turn += 1
        self._all.reach(live.turn)
        live.group.reach(live.turn)

    def admitted(self, request: GenerateRequest, *, waited_s: float) -> None:
        """Note that a turn was sent to a server after `waited_s` in the queue."""
        if (live := self._live.get(request.session_id)) is not None:
            live.group.num_started += not live.is_admitted
            live.is_admitted = True
            live.queued_s += waited_s

    def answered(self, request: GenerateRequest, *, now: float) -> None:
        """Note that a turn is there."""
        if (live := self._live.get(request.session_id)) is not None:
            live.work_s = now - live.began - live.queued_s

    def ended(self, session_id: str) -> None:
        """Learn from a session that ended, with its last answer."""
        live = self._live.pop(session_id, None)
        if live is None:
            return
        self.num_finished += 1
        self._end_turn(live)
        for group in (self._all, live.group):
            group.ended[live.turn] += 1

    def remaining_s(self, request: GenerateRequest) -> float:
        """Return the predicted work of the request's episode from this turn on, in seconds."""
        live = self._live.get(request.session_id)
        if live is None or not self._all.turns.count:
            return 0.0
        of_group = live.group.turns.mean(self._all.turns.work_s / self._all.turns.count, _TURNS_OF_ALL)
        still = self._still(live.group)
        return live.turns.mean(of_group, _TURNS_OF_GROUP) * still[min(live.turn, len(still) - 1)]

    def num_started(self, request: GenerateRequest) -> int:
        """Return how many episodes of the request's group have been sent to a server."""
        live = self._live.get(request.session_id)
        return 0 if live is None else live.group.num_started

    def _end_turn(self, live: _LiveEpisode) -> None:
        for turns in (live.turns, live.group.turns, self._all.turns):
            turns.add(live.work_s - live.asked_at_s)

    def _still(self, group: _Group) -> list[float]:
        """Return how many turns a member of `group` is expected to have still, by the index of the present one."""
        if group.still[0] == self.num_finished:
            return group.still[1]
        still = [1.0]
        for turn in reversed(range(len(self._all.reached))):
            of_all = self._all.ends_at(turn, otherwise=0.3, weight=1.0)
            ends = group.ends_at(turn, otherwise=of_all, weight=_ENDS_OF_ALL)
            still.append(1.0 + (1.0 - ends) * still[-1])
        still.reverse()
        group.still = self.num_finished, still
        return still

    def _group(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group()
            if len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)
        return group
