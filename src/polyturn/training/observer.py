"""RunObserver: all records and output of a run: metrics, trajectories, alarms, log lines, progress bars.

    runs/quickstart/metrics.jsonl                  one object a step, evaluations included
                    trajectories/part-*.parquet    every trajectory of training and evaluation
                    alarms.jsonl                   alarms with their steps

It never changes the run. All records of a step are on disk by the end of the step.
"""

from __future__ import annotations

import contextlib
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
from polyturn.infra.console import stderr_console
from polyturn.store.options import StoreSettings
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.schema import Trained
from polyturn.tracking.alarms import Alarm, Alarms, PluginAlarms
from polyturn.tracking.base import RunInfo
from polyturn.tracking.console import LONGEST_PAUSE_S, PAUSE_S, ConsoleTracker, Progress, duration, stops
from polyturn.tracking.dump import TrajectoryDump
from polyturn.tracking.jsonl import JsonlTracker, read_metrics
from polyturn.tracking.live import LiveStatus
from polyturn.tracking.manager import Trackers, TrackerSpec
from polyturn.tracking.system import SystemSampler
from polyturn.training.end_alarms import EndAlarms
from polyturn.training.observer_base import Observer

logger = logging.getLogger(__name__)

_LONG_S = 60.0
"""Seconds of a step's episodes above which the expected duration is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoRecord:
    """Further records of a run, in addition to metrics and trajectories."""

    train_dump: TrajectoryDump | None = None
    eval_dump: TrajectoryDump | None = None
    store: StoreSettings = field(default_factory=StoreSettings)
    """Which trajectories are stored."""
    trackers: Sequence[TrackerSpec] = ()
    """Trackers that receive the metrics."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with settings of trackers."""
    has_many_sets: bool = False
    """Whether there are several evaluation sets, so that each gets a folder in `eval_dump`."""
    on_step: Callable[[int, Mapping[str, float]], object] = lambda step, metrics: None
    """Called with step and metrics once they are written."""
    eval_metrics: Callable[[str, Sequence[TrajectoryGroup]], Mapping[str, float]] = lambda name, groups: {}
    """Returns further metrics of an evaluation set, from its name and groups."""
    success_at: float = 1.0
    """The smallest outcome that counts as success."""


class RunObserver(Observer):
    """Writes to the folder of a run."""

    def __init__(
        self, folder: Path, *, total_steps: int, console: Console | None = None, also: AlsoRecord | None = None
    ) -> None:
        """Open the records of the run.

        Args:
            folder: The run's folder.
            total_steps: Number of steps of the run, to estimate the remaining time.
            console: Console of the live status and of progress bars, the same as for log lines. None shows no live status;
                bars then use the console of stderr.
            also: Further records.
        """
        self._also = also or AlsoRecord()
        self._folder = folder
        self._bars = console or stderr_console()
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
        self._end_alarms = EndAlarms(success_at=self._also.success_at)
        self._progress: Progress | None = None
        self._running: Mapping[EpisodeState, int] = {}
        self._has_begun = False
        """Whether the first rollout of training has begun."""
        self._first_step: float | None = None
        """Start time of the first rollout of training; None before it and once its duration is estimated."""
        self._first_ends: list[float] = []
        """Times at which the first episodes of that rollout ended."""
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
        with contextlib.ExitStack() as closing:  # which closes all, in reverse order, even if the disk is full
            for one in (self._metrics, self._sft_metrics, self._trackers, self._store):
                if one is not None:
                    closing.callback(one.close)

    def watch(self, running: Mapping[EpisodeState, int]) -> None:
        """Show the number of episodes in each state from now on."""
        self._running = running

    def resume(self, step: int) -> None:
        """Resume after `step`: drop metrics and trajectories of later steps, which will run again."""
        self._store.forget_after(step)
        path = self._folder / "metrics.jsonl"
        taken = [line["step"] for line in read_metrics(path)] if path.exists() else []
        if (last := max(taken, default=step)) > step:
            again = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
            logger.warning("the last checkpoint is of step %d; %s repeated", step, again)
        self._metrics = JsonlTracker(path, resumed_step=step)
        self._end_alarms.resume(self._keep_alarms_until(step))
        self._trackers.resume(step)
        # Alarms compare a run with its early steps, so a resumed run feeds them the recorded metrics.
        for earlier in read_metrics(path):
            self._alarms.feed(earlier["step"], earlier)

    def on_sft(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Record a finished supervised step."""
        if self._sft_metrics is None:
            # A resumed warm start begins after step 1; lines of repeated steps are dropped.
            resumed = step - 1 if step > 1 else None
            self._sft_metrics = JsonlTracker(self._folder / "sft_metrics.jsonl", resumed_step=resumed)
        self._sft_metrics.log(step, metrics)
        self._sft_last = f"{step} of {total} steps, loss {metrics.get('loss/total', math.nan):.4f}"
        self._advance("warm start", total)

    def end_sft(self) -> None:
        """Log the end of supervised training."""
        self._end_phase()
        logger.info("warm start: %s", self._sft_last)

    def begin_phase(self, phase: str, total: int | None) -> None:
        """Show that a phase of `total` groups or episodes has begun; None if it does not count them."""
        if phase == "rollout" and not self._has_begun:
            self._has_begun, self._first_step = True, time.monotonic()
        self._begin_progress(phase, total)

    def on_episode(self, *, total: int) -> None:
        """Show a finished episode of the `total` of a training step."""
        self._advance("rollout", total)
        self._log_pace(total)

    def _log_pace(self, total: int) -> None:
        """Log once, from the pace of a run's first episodes, how long a step takes, if that is long."""
        if self._first_step is None:
            return
        self._first_ends.append(time.monotonic())
        done = len(self._first_ends)
        if done < max(2, total // 4):
            return
        began, ends = self._first_step, self._first_ends
        self._first_step, self._first_ends = None, []
        # Episodes run at once, so the first ends late: its time is not the time of each of the others.
        seconds = ends[-1] - began + (ends[-1] - ends[0]) / (done - 1) * max(0, total - done)
        if seconds >= _LONG_S:
            logger.info(
                "at the pace at which the first %d episodes ended, the %d of a step take about %s, plus training; to "
                "shorten it, lower train.groups_per_step, train.group_size or rollout.limits.max_tokens_per_turn",
                done,
                total,
                duration(seconds),
            )

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        """Show a finished group; `phase` is "rollout" or "eval/<set>", `total` the number of groups of the phase."""
        self._advance(phase, total)

    def on_rollout(self, group: TrajectoryGroup, *, total: int) -> None:
        """Write a finished group of a rollout of `total` tasks without training, whatever happens to other groups."""
        self._advance("tasks", total)
        self._store.add(group, step=0, split="rollout")

    def end_rollout(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Finish a rollout without training."""
        self._end_phase()
        self._warn(0, self._end_alarms.feed(groups, during="rollout"))

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained] | None = None,
    ) -> None:
        """Write the metrics and trajectories of a finished step; `trained` has the result of each trajectory by id."""
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
        """Write the trajectories of a step whose update raised; it has no metrics."""
        self._end_phase()
        self._record(groups, step=step, split="train")
        num = sum(len(group.trajectories) for group in groups)
        logger.warning("step %d could not be trained; its %d trajectories are in %s", step, num, self._folder)

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        """Write the metrics and trajectories of a finished evaluation set."""
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

    def _keep_alarms_until(self, step: int) -> list[str]:
        """Drop the alarms of later steps; return the messages of the others."""
        path = self._folder / "alarms.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if _alarm_of(line)[0] <= step]
        if kept != lines:
            path.write_text("".join(kept), encoding="utf-8")
        return [_alarm_of(line)[1] for line in kept]

    def _warn(self, step: int, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            logger.warning("%s", alarm.message)
            with (self._folder / "alarms.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "alarm": alarm.name, "message": alarm.message}) + "\n")

    def _track(self, step: int, split: str, metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup]) -> None:
        if self._metrics is None:  # created with the first line, so that a run without steps leaves no empty file
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
        self._store.flush()  # before the step's metrics: a line of metrics means that its trajectories can be read

    def _advance(self, phase: str, total: int) -> None:
        if self._progress is None or self._progress.title != phase:
            self._begin_progress(phase, total)
        assert self._progress is not None
        self._progress.advance()
        if self._live is not None:
            self._live.show(self._progress)

    def _begin_progress(self, phase: str, total: int | None) -> None:
        self._end_phase()
        pause_s = PAUSE_S
        if not self._bars.is_terminal:  # the older the run, the later the first line of a phase
            pause_s = min(max(PAUSE_S, (time.monotonic() - self._began) / 60), LONGEST_PAUSE_S)
        self._progress = Progress(phase, total, console=self._bars, pause_s=pause_s, running=self._running)
        if self._live is not None:
            self._live.show(self._progress)
        else:
            self._progress.__enter__()

    def _end_phase(self) -> None:
        if self._progress is not None:
            if self._live is not None:
                self._live.show(None)
            self._progress.__exit__(None, None, None)
            self._progress = None


def _alarm_of(line: str) -> tuple[int, str]:
    """Return the step and the message of a line of alarms.jsonl; 0 and "" for a damaged line, which is kept."""
    try:
        alarm = json.loads(line)
        return int(alarm["step"]), str(alarm.get("message"))
    except (ValueError, TypeError, KeyError):
        return 0, ""
