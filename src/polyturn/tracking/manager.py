"""Trackers: passes the metrics of a run on to trackers, whose failures do not affect the run.

    run ──► queue of 64 ──► thread ──► tensorboard           a tracker that raises:  one warning, counted, tried again
        └─► queue of 64 ──► thread ──► wandb                 one that hangs:         its queue fills; later records are lost

Each tracker has a daemon thread. `log` never waits, and `close` waits for a limited time. The run itself writes
`metrics.jsonl`, so the metrics are on disk in any case.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, one_line
from polyturn.core.protocols import Tracker
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.infra.live import NameOrObject
from polyturn.infra.plugins import Registry, wrong_kind
from polyturn.tracking.base import RunInfo, RunTracker, samples

logger = logging.getLogger(__name__)

trackers: Registry[Callable[..., Tracker]] = Registry("trackers")
"""Name -> tracker; a plug-in registers its own, or a configuration names it as `file.py:Class`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec:
    """One tracker of a run, with checked arguments; created when the run begins."""

    name: str
    make: Callable[..., Tracker]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 4
    """Number of trajectories of a step in the table of samples."""


def tracker_spec(name: NameOrObject, *, samples: int = 4, base: Path | None = None, **kwargs: Any) -> TrackerSpec:
    """Find a tracker and check its arguments, before a run begins.

    Args:
        name: A known or registered name, `package.module:Class` or `file.py:Class`.
        samples: Number of trajectories of a step in the table of samples.
        base: The folder that relative file paths are resolved against.
        **kwargs: Arguments of the tracker's constructor.

    Raises:
        ConfigError: the name is unknown, its library is not installed, or it does not take these arguments.
    """
    make = trackers.resolve(name, base=base, key="tracking")
    if not callable(make):
        needs = "a class that inherits polyturn.tracking.base.RunTracker, or has log and close"
        raise wrong_kind(trackers.group, name, make, where="tracking", needs=needs)
    try:
        inspect.signature(make).bind(None, **kwargs)
    except TypeError as problem:
        raise ConfigError(
            f"tracking: {name} cannot be created with the keys {sorted(kwargs)} ({problem}); its parameters are "
            f"{inspect.signature(make)}"
        ) from problem
    return TrackerSpec(name=str(name), make=make, kwargs=kwargs, samples=samples)


class Trackers:
    """The trackers of a run."""

    def __init__(self, specs: Sequence[TrackerSpec], run: RunInfo, *, queue_size: int = 64, close_s: float = 15.0) -> None:
        """Create the trackers; threads start with the first record.

        Args:
            specs: The trackers.
            run: The run.
            queue_size: Largest number of records waiting for a tracker; further ones are dropped and counted.
            close_s: Seconds that `close` waits for all trackers together.
        """
        self._run = run
        self._close_s = close_s
        self._senders = [_Sender(spec, queue_size) for spec in specs]

    @property
    def lost(self) -> dict[str, int]:
        """Tracker -> number of lost records."""
        return {sender.name: sender.num_lost for sender in self._senders}

    def resume(self, step: int) -> None:
        """Set the step after which the run continues; call it before the first record."""
        self._run = replace(self._run, resumed_step=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on the metrics of a step."""
        kept = dict(values)
        for sender in self._senders:
            sender.put(self._run, lambda tracker, sender: tracker.log(step, kept))

    def record(self, step: int, split: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Pass on the trajectories of a step, to trackers that inherit `RunTracker`."""

        def send(tracker: Tracker, sender: _Sender) -> None:
            if isinstance(tracker, RunTracker):
                tracker.log_groups(step, split, kept)
                if sender.samples and kept:
                    tracker.log_samples(step, split, samples(step, split, kept, sender.samples))

        kept = tuple(groups)
        for sender in self._senders:
            sender.put(self._run, send)

    def close(self) -> None:
        """Wait for a limited time until the trackers have finished, and log losses."""
        until = time.monotonic() + self._close_s
        for sender in self._senders:
            sender.end()
        for sender in self._senders:
            sender.join(max(0.1, until - time.monotonic()))


_Work = Callable[[Tracker, "_Sender"], None]


class _Sender:
    """The queue and the thread of one tracker."""

    def __init__(self, spec: TrackerSpec, size: int) -> None:
        self.name = spec.name
        self.samples = spec.samples
        self.num_lost = 0
        self._spec = spec
        self._queue: queue.Queue[_Work | None] = queue.Queue(size)
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._is_ending = threading.Event()

    def put(self, run: RunInfo, work: _Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, args=(run,), name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._lose("it is too slow, so records are dropped")

    def end(self) -> None:
        self._is_ending.set()
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the event ends the thread when the queue is empty
                self._queue.put_nowait(None)

    def join(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning("tracking: %s did not finish in time and was abandoned; metrics.jsonl has everything", self.name)
        if self.num_lost:
            logger.warning("tracking: %s lost %d records; metrics.jsonl has everything", self.name, self.num_lost)

    def _serve(self, run: RunInfo) -> None:
        try:
            tracker = self._spec.make(run, **self._spec.kwargs)
        except BaseException as problem:  # a library may also call sys.exit
            self._warn(f"it cannot be opened ({type(problem).__name__}: {one_line(problem)})")
            tracker = None
        while True:
            try:
                work = self._queue.get(timeout=0.5)
            except queue.Empty:
                if self._is_ending.is_set():
                    break
                continue
            if work is None:
                break
            if tracker is None:
                self.num_lost += 1
                continue
            try:
                work(tracker, self)
            except BaseException as problem:
                self._lose(f"{type(problem).__name__}: {one_line(problem)}")
        if tracker is not None:
            try:
                tracker.close()
            except BaseException as problem:
                self._warn(f"it cannot be closed ({type(problem).__name__}: {one_line(problem)})")

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        self._warn(why)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("tracking: %s fails: %s. The run continues, and metrics.jsonl has everything", self.name, why)
