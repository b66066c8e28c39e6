"""RunObserver: everything a run leaves behind and shows, in one place: metrics, trajectories, alarms, lines, progress bars.

    runs/quickstart/metrics.jsonl                  one object a step, evaluations included
                    trajectories/part-*.parquet    every trajectory of training and evaluation
                    alarms.jsonl                   what looked wrong, and when

It decides nothing. Everything that it records is on disk by the end of the step.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from polyturn.core.lifecycle import EpisodeState
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.repeated import flat, repeated_metrics
from polyturn.evaluation.report import EvalReport
from polyturn.store.options import StoreSettings
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.schema import Trained
from polyturn.tracking.alarms import Alarm, Alarms
from polyturn.tracking.base import RunInfo
from polyturn.tracking.console import ConsoleTracker, Progress, duration, stops
from polyturn.tracking.dump import TrajectoryDump
from polyturn.tracking.jsonl import JsonlTracker, read_metrics
from polyturn.tracking.live import LiveStatus
from polyturn.tracking.manager import Trackers, TrackerSpec
from polyturn.tracking.plugin_alarms import PluginAlarms
from polyturn.tracking.system import SystemSampler
from polyturn.training.end_alarms import EndAlarms
from polyturn.training.observer_base import Observer

logger = logging.getLogger(__name__)

_LONG_S = 60.0
"""A step whose episodes take longer is announced."""
_OFTEN_S = 300.0
"""Without a terminal, seconds in which a run says how far it is at least every two seconds; afterwards it does every ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoRecord:
    """The records of a run beside its metrics and trajectories."""

    train_dump: TrajectoryDump | None = None
    eval_dump: TrajectoryDump | None = None
    store: StoreSettings = field(default_factory=StoreSettings)
    """The trajectories that are kept."""
    trackers: Sequence[TrackerSpec] = ()
    """Programs that the numbers are passed on to."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, for trackers whose settings are there."""
    has_many_sets: bool = False
    """Whether there are several evaluation sets, so that each has a folder of its own in `eval_dump`."""
    on_step: Callable[[int, Mapping[str, float]], object] = lambda step, metrics: None
    """Called with each step's metrics once they are written."""
    eval_metrics: Callable[[str, Sequence[TrajectoryGroup]], Mapping[str, float]] = lambda name, groups: {}
    """Further numbers of an evaluation set, from its name and its groups."""


class RunObserver(Observer):
    """Writes into the folder of a run."""

    def __init__(
        self, folder: Path, *, total_steps: int, console: Console | None = None, also: AlsoRecord | None = None
    ) -> None:
        """Open the records of the run.

        Args:
            folder: The run's folder.
            total_steps: How many steps it is going to take, for the time left.
            console: Where progress bars are drawn; the one that log lines go to.
            also: What is recorded beside them.
        """
        self._also = also or AlsoRecord()
        self._folder = folder
        self._bars = console
        self._console = ConsoleTracker(total_steps)
        self._began = time.monotonic()
        self._live: LiveStatus | None = None
        if console is not None and (console.is_terminal or console.is_jupyter) and total_steps > 0:
            self._live = LiveStatus(total_steps, console)
        self._metrics: JsonlTracker | None = None
        self._sft_metrics: JsonlTracker | None = None
        self._sft_last = "no step"
        self._store = ParquetStore(folder, self._also.store)
        about = RunInfo(name=folder.resolve().name, folder=folder, environ=self._also.environ)
        self._trackers = Trackers(self._also.trackers, about)
        self._alarms = Alarms()
        self._plugin_alarms = PluginAlarms()
        self._end_alarms = EndAlarms()
        self._progress: Progress | None = None
        self._running: Mapping[EpisodeState, int] = {}
        self._has_begun = False
        """Whether the first rollout of training has."""
        self._first_step: tuple[float, int] | None = None
        """When the first rollout of training began, and how many of its episodes are done; None before and afterwards."""
        self._system = SystemSampler() if total_steps > 0 else None

    def __enter__(self) -> Self:
        if self._system is not None:
            self._system.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_phase()
        if self._live is not None:
            self._live.stop()
        if self._system is not None:
            self._system.__exit__(kind, error, trace)
        self._store.close()
        self._trackers.close()
        for tracker in (self._metrics, self._sft_metrics):
            if tracker is not None:
                tracker.close()

    def watch(self, running: Mapping[EpisodeState, int]) -> None:
        """Show from now on how many episodes are in each state."""
        self._running = running
        if self._live is not None:
            self._live.running = running

    def resume(self, step: int) -> None:
        """Go on after `step`: metrics and trajectories of later steps, which are taken again, are dropped."""
        self._store.forget_after(step)
        path = self._folder / "metrics.jsonl"
        taken = [line["step"] for line in read_metrics(path)] if path.exists() else []
        if (last := max(taken, default=step)) > step:
            again = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
            logger.warning("the last checkpoint is of step %d; %s done again", step, again)
        self._metrics = JsonlTracker(path, resumed_step=step)
        self._trackers.resume(step)
        # Alarms compare a run with its own early steps, which a resumed one has behind it.
        for earlier in read_metrics(path):
            self._alarms.feed(earlier["step"], earlier)

    def on_sft(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """A supervised step is done."""
        if self._sft_metrics is None:
            # A warm start that goes on begins behind step 1; lines of steps that are taken again are dropped.
            resumed = step - 1 if step > 1 else None
            self._sft_metrics = JsonlTracker(self._folder / "sft_metrics.jsonl", resumed_step=resumed)
        self._sft_metrics.log(step, metrics)
        self._sft_last = f"{step} of {total} steps, loss {metrics.get('loss/total', math.nan):.4f}"
        self._advance("warm start", total)

    def end_sft(self) -> None:
        """Supervised training is done."""
        self._end_phase()
        logger.info("warm start: %s", self._sft_last)

    def begin_phase(self, phase: str, total: int | None) -> None:
        """A phase of `total` groups or episodes has begun; None where it does not count them."""
        if phase == "rollout" and not self._has_begun:
            self._has_begun, self._first_step = True, (time.monotonic(), 0)
        if self._live is not None:
            self._live.begin(phase, total)
        else:
            self._begin_progress(phase, total)

    def on_episode(self, *, total: int) -> None:
        """An episode of the `total` of a training step is done."""
        self._advance("rollout", total)
        self._tell_pace(total)

    def _tell_pace(self, total: int) -> None:
        """Say once, from the first episodes of a run, how long those of a step take, where that is long."""
        if self._first_step is None:
            return
        began, done = self._first_step
        self._first_step = began, done + 1
        if done + 1 < max(2, total // 16):
            return
        self._first_step = None
        seconds = (time.monotonic() - began) / (done + 1) * total
        if seconds >= _LONG_S:
            logger.info(
                "at the pace of the first %d episodes, the %d of a step take about %s, and training comes on top; fewer: "
                "train.groups_per_step, train.group_size, rollout.limits.max_tokens_per_turn",
                done + 1,
                total,
                duration(seconds),
            )

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        """A group is done; `phase` is "rollout" or "eval/<set>", `total` the number of groups of the phase."""
        self._advance(phase, total)

    def on_rollout(self, group: TrajectoryGroup, *, total: int) -> None:
        """A group that belongs to no training is done: it is written, whatever happens to the others."""
        self._advance("rollout", total)
        self._store.add(group, step=0, split="rollout")

    def end_rollout(self, groups: Sequence[TrajectoryGroup]) -> None:
        """All groups of a rollout without training are done."""
        self._end_phase()
        self._warn(0, self._end_alarms.feed(groups, during="rollout"))

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained] | None = None,
    ) -> None:
        """A training step is done: its metrics and its trajectories are written, with what it made of each, by its id."""
        self._end_phase()
        self._record(groups, step=step, split="train", trained=trained)
        if self._also.train_dump is not None:
            self._also.train_dump.write(step, groups)
        if self._system is not None:
            metrics = {**metrics, **self._system.read()}
        self._track(step, "train", metrics, groups)
        self._console.log(step, metrics)
        if self._live is not None:
            left = self._console.eta(step, metrics.get("time/step_s", 0.0))
            self._live.step(step, metrics, eta="" if left is None else duration(left))
        self._warn(step, self._alarms.feed(step, metrics))
        self._warn(step, self._plugin_alarms.feed(step, groups))
        self._warn(step, self._end_alarms.feed(groups, during=f"step {step}"))
        self._also.on_step(step, metrics)

    def on_failed_step(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """The update of a step raised: its trajectories are written, for what they show; the step has no metrics."""
        self._end_phase()
        self._record(groups, step=step, split="train")
        num = sum(len(group.trajectories) for group in groups)
        logger.warning("step %d could not be trained; its %d trajectories are in %s", step, num, self._folder)

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        """An evaluation set is done: its numbers and its trajectories are written."""
        self._end_phase()
        self._record(groups, step=step, split=f"eval/{name}")
        if self._also.eval_dump is not None:
            self._also.eval_dump.write(step, groups, name=name if self._also.has_many_sets else "")
        metrics = report.to_metrics(f"eval/{name}")
        if any(len(group.trajectories) > 1 for group in groups):
            metrics |= {f"eval/{name}/{key}": value for key, value in flat(repeated_metrics(groups)).items()}
        self._track(step, f"eval/{name}", {**metrics, **self._also.eval_metrics(name, groups)}, groups)
        calls = "" if math.isnan(report.valid_tool_calls) else f"  valid calls {report.valid_tool_calls:.3f}"
        repairs = f"  repaired {report.repaired:.3f} (of {report.num_repairable})" if report.num_repairable else ""
        ended = [trajectory.is_failed for group in groups for trajectory in group.trajectories]
        failed = f"  FAILED {sum(ended)} of {len(ended)}" if any(ended) else ""
        stopped = "".join(f"  {words}" for words in stops(cut=report.cut, out_of_turns=report.out_of_turns))
        logger.info(
            "eval %-10s success %.3f  first turn %.3f  turns %.2f%s%s%s%s",
            name, report.success, report.first_turn_success, report.mean_turns, stopped, calls, repairs, failed,
        )  # fmt: skip
        self._warn(step, self._end_alarms.feed(groups, during=f"eval {name}"))

    def _warn(self, step: int, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            logger.warning("%s", alarm.message)
            with (self._folder / "alarms.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "alarm": alarm.name, "message": alarm.message}) + "\n")

    def _track(self, step: int, split: str, metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup]) -> None:
        if self._metrics is None:  # made with the first line, so that a run which takes none leaves no empty file
            self._metrics = JsonlTracker(self._folder / "metrics.jsonl")
        self._metrics.log(step, metrics)
        self._trackers.log(step, metrics)
        self._trackers.record(step, split, groups)

    def _record(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        step: int,
        split: str,
        trained: Mapping[str, Trained] | None = None,
    ) -> None:
        for group in groups:
            self._store.add(group, step=step, split=split, trained=trained)
        self._store.flush()  # before the step's metrics: a line of these promises that its trajectories can be read

    def _advance(self, phase: str, total: int) -> None:
        if self._live is not None:
            self._live.advance(phase, total)
            return
        if self._progress is None or self._progress.title != phase:
            self._begin_progress(phase, total)
        assert self._progress is not None
        self._progress.advance()

    def _begin_progress(self, phase: str, total: int | None) -> None:
        self._end_phase()
        is_young = time.monotonic() - self._began < _OFTEN_S
        every_s = 1.5 if is_young else 10.0
        self._progress = Progress(phase, total, console=self._bars, every_s=every_s, running=self._running)
        self._progress.__enter__()

    def _end_phase(self) -> None:
        if self._live is not None:
            self._live.end_phase()
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None
