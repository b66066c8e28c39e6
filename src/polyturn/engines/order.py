"""Order: which waiting request goes next, and where. Policies are small classes; the pool asks, they answer.

    fifo            in the order of arrival, to its session's server where that has a place, else to the next one in turn
    least_loaded    in the order of arrival; a session starts where the least runs
    longest_first   the longest predicted remaining work first (see `predictor.py`), aged, and least loaded

Ageing: under `fifo` a request that finds q others waiting is admitted as number q + 1; that is its fair share of waiting.
`longest_first` lets nothing wait longer than three times that: from twice its share on it goes first, the oldest debt first.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from polyturn.core.errors import ConfigError, one_line
from polyturn.core.generation import GenerateRequest
from polyturn.core.plugins import Registry
from polyturn.engines.predictor import WorkPredictor


class OrderedRequest(Protocol):
    """A request that waits in the pool."""

    request: GenerateRequest
    is_gone: bool
    """Whether it waits no more: its caller was cancelled."""


class OrderedServer(Protocol):
    """A server of the pool, as a policy sees it."""

    index: int

    @property
    def load(self) -> int:
        """Number of requests that run there."""
        ...


class OrderPolicy(ABC):
    """Holds the waiting requests and hands them out; one object per pool."""

    def __init__(self) -> None:
        self.predictor = WorkPredictor()

    @abstractmethod
    def push(self, waiting: OrderedRequest) -> None:
        """Take a request."""

    @abstractmethod
    def pop(self) -> OrderedRequest | None:
        """Return the request to admit now; None if none waits."""

    def place(self, home: OrderedServer | None, free: Sequence[OrderedServer]) -> OrderedServer:
        """Return one of `free`; `home` is where the session's prefix is cached, if it is among them."""
        return home or min(free, key=lambda place: (place.load, place.index))

    def priority(self, request: GenerateRequest) -> float:
        """Return the priority that the server is told; higher goes first."""
        return request.priority


policies: Registry[type[OrderPolicy]] = Registry("engine_orders")


@policies.register("least_loaded")
class LeastLoaded(OrderPolicy):
    """First come, first served; new sessions go where the least runs."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, OrderedRequest]] = []
        self._count = 0

    def push(self, waiting: OrderedRequest) -> None:
        """Take a request; those with a higher priority of their own go first."""
        self._count += 1
        heapq.heappush(self._heap, (-waiting.request.priority, self._count, waiting))

    def pop(self) -> OrderedRequest | None:
        """Return the oldest."""
        while self._heap:
            waiting = heapq.heappop(self._heap)[2]
            if not waiting.is_gone:
                return waiting
        return None


@policies.register("fifo")
class Fifo(LeastLoaded):
    """First come, first served; new sessions go to the servers in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def place(self, home: OrderedServer | None, free: Sequence[OrderedServer]) -> OrderedServer:
        """Return `home`, or the next server in turn."""
        if home is not None:
            return home
        self._next += 1
        return free[self._next % len(free)]


class _Entry:
    """A request in the queue of `LongestFirst`."""

    __slots__ = ("arrival", "due", "is_taken", "waiting")

    def __init__(self, waiting: OrderedRequest, *, arrival: int, due: int) -> None:
        self.waiting, self.arrival, self.due, self.is_taken = waiting, arrival, due, False


@policies.register("longest_first")
class LongestFirst(OrderPolicy):
    """The longest predicted remaining work first, aged."""

    def __init__(self, *, age: float = 2.0) -> None:
        """Take at how many fair shares of waiting a request goes first; the rest up to 3 is for the others that are due.

        Raises:
            ConfigError: with that age something could wait longer.
        """
        super().__init__()
        if not 0 < age <= 2:
            raise ConfigError(f"age is {age}; over 2, a request could wait more than 3 times its fair share; 0 is its own")
        self.age = age
        self._by_work: list[tuple[tuple[float, ...], int, _Entry]] = []
        self._by_due: list[tuple[int, int, _Entry]] = []
        self._num_waiting = self._num_arrived = self._num_admitted = self._learned = 0

    def push(self, waiting: OrderedRequest) -> None:
        """Take a request and predict what its episode still has to do."""
        self._num_arrived += 1
        share = self._num_waiting + 1
        entry = _Entry(waiting, arrival=self._num_arrived, due=self._num_admitted + int(self.age * share))
        self._num_waiting += 1
        heapq.heappush(self._by_work, (self._key(entry), entry.arrival, entry))
        heapq.heappush(self._by_due, (entry.due, entry.arrival, entry))

    def pop(self) -> OrderedRequest | None:
        """Return what is due, else the longest."""
        self._predict_again()
        for entry in self._next():
            entry.is_taken = True
            self._num_waiting -= 1
            if not entry.waiting.is_gone:
                self._num_admitted += 1
                return entry.waiting
        return None

    def priority(self, request: GenerateRequest) -> float:
        """Return the predicted remaining work."""
        return request.priority + self.predictor.remaining_s(request)

    def _next(self) -> Iterator[_Entry]:
        while self._num_waiting:
            for heap in (self._by_work, self._by_due):
                while heap and heap[0][2].is_taken:
                    heapq.heappop(heap)  # type: ignore[misc, arg-type]
            is_due = self._by_due[0][0] <= self._num_admitted
            yield heapq.heappop(self._by_due)[2] if is_due else heapq.heappop(self._by_work)[2]

    def _key(self, entry: _Entry) -> tuple[float, ...]:
        request = entry.waiting.request
        # Of equals, first the one whose group has the fewest runs so far: it tells us about its siblings.
        return -request.priority, -self.predictor.remaining_s(request), self.predictor.num_started(request)

    def _predict_again(self) -> None:
        """Predict anew for all that wait, once enough was learned to be worth it."""
        if self.predictor.num_finished - self._learned < max(4, self._num_waiting // 16):
            return
        self._learned = self.predictor.num_finished
        entries = [entry for _, _, entry in self._by_work if not entry.is_taken]
        self._by_work = [(self._key(entry), entry.arrival, entry) for entry in entries]
        heapq.heapify(self._by_work)


def make_policy(name: str | OrderPolicy, *, base: Path | None = None, **options: Any) -> OrderPolicy:
    """Return the policy that `name` stands for, with an empty queue.

    Args:
        name: A registered name, `file.py:Class`, or a policy.
        base: Where files are looked for.
        **options: Arguments of the policy's class.

    Raises:
        UnknownNameError: there is no such policy.
        ConfigError: it does not take these options.
    """
    if isinstance(name, OrderPolicy):
        return name
    made: Any = policies.resolve(name, base=base)
    try:
        return made(**options)  # type: ignore[no-any-return]
    except TypeError as problem:
        raise ConfigError(f"the order {name!r} does not take {options} ({one_line(problem)})") from problem
