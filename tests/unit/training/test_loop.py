"""The training loop, with a scripted engine and a policy that only takes notes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.advantages import grpo
from polyturn.algorithms.options import AlgorithmOptions, KlOptions
from polyturn.core.errors import CheckpointError, EngineError, RolloutError, TrainingError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.messages import Message
from polyturn.core.metrics import Mean, Metrics
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.evaluate import EvalSet
from polyturn.evaluation.options import EvalOptions
from polyturn.evaluation.report import EvalReport
from polyturn.infra.aio import OneThread
from polyturn.rollout.pool import RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.store.schema import Trained
from polyturn.testing.episodes import scripted_context, task
from polyturn.training.checkpoint import Checkpoints
from polyturn.training.journal_file import JournalFile
from polyturn.training.loop import Trainer
from polyturn.training.observer_base import Observer
from polyturn.training.options import OptimSettings, ScheduleOptions, TrainOptions
from polyturn.training.state import Data, EngineLink, LoopSettings, Saving
from polyturn.training.update import Update, UpdateSettings
from polyturn.training.weight_sync import SharedWeights
from support.refusals import refuses
from support.states import EmptyPolicy

Event = tuple[Any, ...]


class NotingPolicy(EmptyPolicy):
    """A policy whose only parameter is the number of steps it has taken."""

    def __init__(self, events: list[Event], fail_at: int | None = None) -> None:
        self.steps = 0
        self.batches: list[list[TrainSample]] = []
        self._events = events
        self._fail_at = fail_at

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[np.ndarray]:
        self._events.append(("score", reference))
        return super().score(samples)

    def forward_backward(self, samples: Sequence[TrainSample]) -> PassResult:
        if self.steps == self._fail_at:
            raise TrainingError("the loss is not finite at optimizer step 1")
        self._events.append(("train", sorted({s.id.group for s in samples})))
        self.batches.append(list(samples))
        return PassResult({"loss/total": Mean(0.5)})

    def optim_step(self) -> Metrics:
        self.steps += 1
        self._events.append(("optim_step", self.steps))
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class NotingObserver(Observer):
    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self.metrics: dict[int, dict[str, float]] = {}
        self.groups: dict[int, list[TrajectoryGroup]] = {}
        self.trained: dict[int, Mapping[str, Trained]] = {}

    def begin_phase(self, phase: str, total: int | None) -> None:
        self._events.append(("phase", phase, total))

    def on_episode(self, *, total: int) -> None:
        self._events.append(("episode", total))

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        self._events.append(("group", group.id, phase, total))

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained] | None = None,
    ) -> None:
        self._events.append(("step", step))
        self.metrics[step] = dict(metrics)
        self.groups[step] = list(groups)
        self.trained[step] = trained or {}

    def on_failed_step(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        self._events.append(("failed", step, [group.id for group in groups]))

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        self._events.append(("eval", step, name, report.num_trajectories))


def is_right_by_seed(request: GenerateRequest, version: int) -> bool:
    return (request.sampling.seed or 0) % 2 == 0


def on_fire(request: GenerateRequest, version: int) -> Any:
    return OSError("the model is on fire") if version else True


ALGORITHM = {f.name for f in fields(AlgorithmOptions)} - {"drop_zero_variance"}
EVALUATION = {"eval_before", "eval_every", "eval_limit_during", "stop_at", "patience"}


class Rig:
    """A trainer with scripted surroundings, and the list of its events."""

    def __init__(
        self,
        folder: Path,
        *,
        is_right: Callable[[GenerateRequest, int], Any] = is_right_by_seed,
        num_tasks: int = 5,
        fail_at: int | None = None,
        keep: int = 2,
        latency_s: float = 0.0,
        eval_sets: Sequence[str] = (),
        scheduler: MultiTurnScheduler | None = None,
        max_failed_share: float = 0.1,
        journal: JournalFile | None = None,
        fingerprint: str = "f",
        checkpoints: Checkpoints | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleeps: bool = False,
        thread: OneThread | None = None,
        **settings: Any,
    ) -> None:
        self.events: list[Event] = []
        self.policy = NotingPolicy(self.events, fail_at)
        self.observer = NotingObserver(self.events)
        self.checkpoints = checkpoints or Checkpoints(folder, keep=keep)
        self.export: Callable[[Path], object] = Path.mkdir
        self.version = -1

        def says(request: GenerateRequest) -> Any:
            self.events.append(("generate", request.session_id, self.version))
            answer = is_right(request, self.version)
            return answer if isinstance(answer, Exception) else "#### 4" if answer else "#### 5"

        context = scripted_context(says, latency_s=latency_s, scheduler=scheduler)
        update = context.engine.update_weights

        async def update_weights(version: int, **kwargs: Any) -> None:
            await update(version, **kwargs)
            self.version = version
            self.events.append(("weights", version))

        context.engine.update_weights = update_weights  # type: ignore[method-assign]
        if journal is not None:
            context = dataclasses.replace(context, journal=journal)
        self.context = context
        evaluation = EvalOptions(**{n.removeprefix("eval_"): settings.pop(n) for n in EVALUATION & settings.keys()})
        algorithm = AlgorithmOptions(**{n: settings.pop(n) for n in ALGORITHM & settings.keys()})
        also = {n: settings.pop(n) for n in ["drop_zero_variance"] if n in settings}
        values = {"steps": 3, "groups_per_step": 2, "group_size": 4, "checkpoint_every": 0, **settings}
        train = TrainOptions(**values)
        steps = UpdateSettings(**{"drop_zero_variance": False} | also, train=train, algorithm=algorithm)
        self.trainer = Trainer(
            LoopSettings(train=train, evaluation=evaluation),
            update=Update(self.policy, estimator=partial(grpo), settings=steps),  # type: ignore[arg-type]
            engine=EngineLink(
                channel=SharedWeights(context.engine),
                busy_s=lambda: 0.0,
                closed=self.closed,
                sleep=self.sleep if sleeps else None,
                thread=thread,
            ),
            pool=RolloutPool(context, max_failed_share=max_failed_share),
            data=Data(
                [task(f"What is 2+2 ({i})?", id=f"t{i}") for i in range(num_tasks)],
                [
                    EvalSet(name=name, tasks=[task(id=f"e{i}") for i in range(4)], sampling=SamplingParams(temperature=0))
                    for name in eval_sets
                ],
            ),
            saving=Saving(
                checkpoints=self.checkpoints,
                export=lambda path: self.export(path),
                fingerprint=fingerprint,
                journal=journal,
            ),
            observer=self.observer,
            clock=clock,
        )

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        self.events.append(("closed",))
        yield
        self.events.append(("opened",))

    async def sleep(self) -> None:
        self.events.append(("sleep", self.version))

    def run(self) -> Rig:
        asyncio.run(self.trainer.run())
        return self

    def latest(self) -> Path:
        """Return the newest checkpoint."""
        path = self.checkpoints.latest()
        assert path is not None
        return path

    def saved(self, part: str) -> Any:
        """Return the part of the newest checkpoint."""
        return self.checkpoints.load(self.latest())[part]

    def resumed(self) -> Rig:
        self.trainer.resume(self.latest())
        return self

    def of(self, *kinds: str) -> list[Event]:
        return [e for e in self.events if e[0] in kinds]

    def tasks_of_steps(self) -> list[tuple[str, str]]:
        return [(g.id, g.task.id) for step in sorted(self.observer.groups) for g in self.observer.groups[step]]


def test_step_without_staleness_generates_trains_publishes(tmp_path: Path):
    rig = Rig(tmp_path).run()
    assert [e[0] for e in rig.of("train", "optim_step", "weights", "step")] == [
        "weights", *["train", "optim_step", "weights", "step"] * 3,
    ]  # fmt: skip
    for step, batch in enumerate(rig.policy.batches):
        versions = {int(v) for s in batch for v in s.versions if v >= 0}
        assert versions == {step}, "everything is trained under the weights that sampled it"
        assert {s.id.group for s in batch} == {f"g{2 * step}", f"g{2 * step + 1}"}
        assert all(s.old_logprobs is None for s in batch), "the policy is still the one that sampled: nothing to score"
    assert rig.of("score") == []
    assert [rig.observer.metrics[s]["buffer/staleness"] for s in (1, 2, 3)] == [0, 0, 0]


def test_requests_are_held_back_while_weights_are_published(tmp_path: Path):
    rig = Rig(tmp_path).run()
    order = [e[0] for e in rig.of("optim_step", "closed", "weights", "opened")]
    assert order == ["weights", *["optim_step", "closed", "weights", "opened"] * 3]


@pytest.mark.parametrize(("max_staleness", "begins"), [(0, True), (1, False)])
def test_training_is_a_phase_where_no_rollout_runs_beside_it(tmp_path: Path, max_staleness: int, begins: bool):
    rig = Rig(tmp_path, max_staleness=max_staleness).run()
    assert (("phase", "training", None) in rig.events) is begins


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_engine_on_shared_gpus_sleeps_through_every_update(tmp_path: Path, max_staleness: int):
    rig = Rig(tmp_path, sleeps=True, max_staleness=max_staleness, eval_sets=("greedy",), eval_every=1).run()
    order = [e[0] for e in rig.of("sleep", "score", "train", "optim_step", "weights")]
    step = ["sleep", *(["score"] if max_staleness else []), "train", "optim_step", "weights"]
    assert order == ["weights", *step * 3]
    for number in range(3):
        began = rig.events.index(("sleep", number))
        ended = rig.events.index(("weights", number + 1))
        assert "eval" not in {e[0] for e in rig.events[began:ended]}, "and a validation finds it awake"


def test_groups_run_ahead_within_staleness_and_run_length(tmp_path: Path):
    rig = Rig(tmp_path, steps=5, max_staleness=2, latency_s=0.002).run()
    assert max(rig.observer.metrics[s]["buffer/staleness"] for s in range(1, 6)) == 2
    for step, batch in enumerate(rig.policy.batches):
        assert all(0 <= step - int(v) <= 2 for s in batch for v in s.versions if v >= 0)
        assert all(s.old_logprobs is not None for s in batch)
    asked = {e[1].split("/")[0] for e in rig.of("generate")}
    assert asked == {f"g{i}" for i in range(10)}, "no group is started that no step would train on"


def test_validation_runs_before_new_slots_are_freed(tmp_path: Path):
    rig = Rig(tmp_path, eval_sets=("greedy",), eval_every=1, steps=3).run()
    assert [e[1] for e in rig.of("eval")] == [0, 1, 2, 3], "before training, during, and once after"
    for step in (1, 2):
        at = rig.events.index(("eval", step, "greedy", 4))
        begun = rig.events.index(("step", step))
        asked = [e[1] for e in rig.events[begun:at] if e[0] == "generate"]
        assert asked and all(session.startswith("eval-") for session in asked)


@pytest.mark.parametrize(
    ("options", "counts"),
    [({"eval_before": False}, [(1, 4), (2, 4)]), ({"eval_limit_during": 2}, [(0, 4), (1, 2), (2, 4)])],
)
def test_validations_can_be_left_out_and_shortened(tmp_path: Path, options: dict[str, Any], counts: list[Any]):
    rig = Rig(tmp_path, eval_sets=("greedy",), eval_every=1, steps=2, **options).run()
    assert [(e[1], e[3]) for e in rig.of("eval")] == counts
    assert ("before" in rig.trainer.state.reports) is (counts[0][0] == 0)


def right_in_evaluations_of(good: Mapping[int, int]) -> Callable[[GenerateRequest, int], bool]:
    """Return a script in which `good[version]` of the four evaluation tasks are answered rightly."""

    def is_right(request: GenerateRequest, version: int) -> bool:
        if not request.session_id.startswith("eval-"):
            return is_right_by_seed(request, version)
        return int(request.session_id.split("-")[-1].split("/")[0]) < good.get(version, 0)

    return is_right


def test_training_ends_once_a_validation_is_good_enough(tmp_path: Path):
    rig = Rig(
        tmp_path, is_right=right_in_evaluations_of({2: 3, 3: 4}), eval_sets=("greedy",), eval_every=1, steps=9, stop_at=0.75
    ).run()
    assert rig.trainer.state.step == 2
    assert [e[1] for e in rig.of("eval")] == [0, 1, 2, 2], "what came out is evaluated in full"


def test_training_ends_when_validations_stop_getting_better(tmp_path: Path):
    good = {0: 0, 1: 2, 2: 1, 3: 2, 4: 4}
    rig = Rig(
        tmp_path, is_right=right_in_evaluations_of(good), eval_sets=("greedy",), eval_every=1, steps=9, patience=2
    ).run()
    assert rig.trainer.state.step == 3 and rig.trainer.state.best_step == 1


def test_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path):
    good = {0: 0, 1: 1, 2: 3, 3: 1, 4: 2, 5: 2}
    rig = Rig(
        tmp_path,
        is_right=right_in_evaluations_of(good),
        eval_sets=("greedy",),
        eval_every=1,
        checkpoint_every=1,
        steps=5,
        keep=1,
    ).run()
    best = rig.checkpoints.best()
    assert best is not None and rig.checkpoints.load(best)["policy"]["steps"] == 2
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000005"]


@pytest.mark.parametrize(("export", "exported"), [("all", [0, 1, 2, 3, 4]), ("best", [0, 2, 4]), ("last", [4])])
def test_model_is_exported_with_the_wanted_checkpoints(tmp_path: Path, export: str, exported: list[int]):
    rig = Rig(
        tmp_path,
        is_right=right_in_evaluations_of({2: 3}),
        eval_sets=("greedy",),
        eval_every=1,
        checkpoint_every=1,
        steps=4,
        keep=9,
        export=export,
    ).run()
    assert [int(p.parent.name[-6:]) for p in sorted(tmp_path.glob("step-*/model"))] == exported
    best = rig.checkpoints.best()
    assert best is not None and best.name == "step-000002" and len([*tmp_path.glob("step-*")]) == 5


@pytest.mark.parametrize(("good", "best"), [({0: 3, 1: 1, 2: 1}, 0), ({0: 0, 1: 1, 2: 2}, 2)])
def test_first_or_last_weights_may_be_the_best(tmp_path: Path, good: dict[int, int], best: int):
    rig = Rig(tmp_path, is_right=right_in_evaluations_of(good), eval_sets=("greedy",), eval_every=1, steps=2, keep=1).run()
    found = rig.checkpoints.best()
    assert found is not None and rig.checkpoints.load(found)["loop"]["step"] == best == rig.trainer.state.best_step


def test_time_of_a_step_is_accounted_for(tmp_path: Path):
    for metrics in Rig(tmp_path).run().observer.metrics.values():
        parts = [metrics[f"time/{name}"] for name in ("generate_s", "train_s", "prepare_s")]
        assert 0 < metrics["time/prepare_s"] < sum(parts) < metrics["time/step_s"]
        outside = metrics["time/step_s"] - metrics["time/generate_s"] - metrics["time/train_s"]
        assert metrics["time/other_share"] == pytest.approx(outside / metrics["time/step_s"])


def test_step_without_signal_takes_no_optimizer_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def is_right(request: GenerateRequest, version: int) -> bool:
        return version == 1 and request.session_id.endswith("/1")

    rig = Rig(tmp_path, is_right=is_right, drop_zero_variance=True).run()
    assert rig.policy.steps == 1 and rig.trainer.state.step == 3
    assert [rig.observer.metrics[s]["buffer/groups_zero_variance"] for s in (1, 2, 3)] == [2, 0, 2]
    assert "step 1: no group" in caplog.text
    assert "step 3: no group" in caplog.text


@pytest.mark.parametrize(
    ("fault", "error"), [({"fail_at": 1}, TrainingError), ({"is_right": on_fire, "steps": 20}, RolloutError)]
)
def test_error_ends_the_run_and_leaves_a_checkpoint(tmp_path: Path, fault: dict[str, Any], error: type[Exception]):
    rig = Rig(tmp_path, **fault)
    with pytest.raises(error, match=r"not finite at optimizer step 1|the model is on fire"):
        rig.run()
    assert rig.saved("loop")["step"] == rig.trainer.state.step >= 1


@pytest.mark.parametrize("dynamic_sampling", [0, 1])
def test_every_episode_of_a_step_is_counted(tmp_path: Path, dynamic_sampling: int):
    rig = Rig(tmp_path, steps=2, groups_per_step=2, group_size=4, dynamic_sampling=dynamic_sampling).run()
    assert rig.of("episode") == [("episode", 8)] * 16


def test_trajectories_of_a_failed_update_are_recorded(tmp_path: Path):
    rig = Rig(tmp_path, fail_at=1)
    with pytest.raises(TrainingError):
        rig.run()
    ((_, step, groups),) = rig.of("failed")
    assert step == 2 and len(groups) == len(rig.observer.groups[1])


def test_error_of_the_last_save_does_not_hide_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rig = Rig(tmp_path, fail_at=1)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    rig.export = full
    rig.trainer.state.step, rig.policy.steps = 1, 1  # no first save
    with pytest.raises(TrainingError):
        rig.run()
    assert "cannot be written" in caplog.text


class Rewrites(MultiTurnScheduler):
    """Makes three segments of every trajectory."""

    def step(self, episode: Any, turn: Any) -> Any:
        if turn.index == 2:
            return None
        episode.rewrite([*episode.task.prompt, Message(role="user", content=f"note {turn.index}")])
        return "go on"


def test_minibatches_keep_the_segments_of_a_trajectory(tmp_path: Path):
    rig = Rig(tmp_path, scheduler=Rewrites(), minibatches=3, steps=1).run()
    keys = [[(s.id.group, s.id.trajectory) for s in batch] for batch in rig.policy.batches]
    assert len(keys) == 3 and rig.policy.steps == 3
    assert all(keys_of.count(key) == 3 for keys_of in keys for key in keys_of), "three segments each"
    assert sum(len(set(keys_of)) for keys_of in keys) == len({k for keys_of in keys for k in keys_of}) == 8
    assert all(s.old_logprobs is not None for batch in rig.policy.batches for s in batch)


def test_each_pass_takes_the_same_minibatches_again(tmp_path: Path):
    rig = Rig(tmp_path, minibatches=2, passes=3, steps=1).run()
    keys = [[s.id for s in batch] for batch in rig.policy.batches]
    assert keys == 3 * keys[:2] and rig.policy.steps == 6
    old = [[s.old_logprobs for s in batch] for batch in rig.policy.batches]
    assert all(a is b for first, later in zip(old[:2], old[4:], strict=True) for a, b in zip(first, later, strict=True))
    assert [e[0] for e in rig.of("score", "train", "weights")] == ["weights", "score", *["train"] * 6, "weights"]
    assert set(rig.observer.trained[1]) == {s.id.trajectory for batch in rig.policy.batches for s in batch}


def test_reference_scores_only_where_the_loss_needs_it(tmp_path: Path):
    rig = Rig(tmp_path, kl=KlOptions(coef=0.1), steps=1).run()
    assert rig.of("score") == [("score", True)]
    assert all(s.ref_logprobs is not None for s in rig.policy.batches[0])


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_resumed_run_has_the_task_order_of_a_whole_run(tmp_path: Path, max_staleness: int):
    """Five tasks and two a step, so that the order crosses epochs."""
    whole = Rig(tmp_path / "whole", steps=6, max_staleness=max_staleness).run()
    first = Rig(tmp_path / "parts", steps=4, max_staleness=max_staleness).run()
    second = Rig(tmp_path / "parts", steps=6, max_staleness=max_staleness).resumed().run()
    assert first.tasks_of_steps() + second.tasks_of_steps() == whole.tasks_of_steps()
    assert second.policy.steps == 6
    if max_staleness == 0:
        same = [
            a.same_as(b)
            for step in (5, 6)
            for a, b in zip(
                (t.segments[0] for g in whole.observer.groups[step] for t in g.trajectories),
                (t.segments[0] for g in second.observer.groups[step] for t in g.trajectories),
                strict=True,
            )
        ]
        assert all(same), "the same tasks, seeds and versions give the same tokens"


@pytest.mark.parametrize(
    "change", [{"fingerprint": "g"}, {"num_tasks": 6}, {"group_size": 2}, {"groups_per_step": 1}, {"oversample": 0.5}]
)
def test_resume_refuses_other_data_tokenizer_or_group_sizes(tmp_path: Path, change: dict[str, Any]):
    latest = Rig(tmp_path, steps=1).run().latest()
    with pytest.raises(CheckpointError):
        Rig(tmp_path, steps=2, **change).trainer.resume(latest)


async def test_cancelled_run_does_not_wait_for_a_held_thread(tmp_path: Path):
    """A server's recovery holds it while it is sent the weights."""
    rig = Rig(tmp_path, thread=(thread := OneThread("trainer")))
    begin_phase, is_due = rig.observer.begin_phase, asyncio.Event()

    def begins(phase: str, total: int | None) -> None:
        begin_phase(phase, total)
        if phase == "training":
            is_due.set()

    rig.observer.begin_phase = begins  # type: ignore[method-assign]
    async with asyncio.timeout(30), thread.held():
        running = asyncio.create_task(rig.trainer.run())
        await is_due.wait()
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled() and rig.of("train", "step") == []
    assert rig.saved("loop")["step"] == 0


FALLS = OptimSettings(schedule=ScheduleOptions(name="linear"))


@pytest.mark.parametrize(
    ("before", "now", "optim", "warns"),
    [
        (2, {"passes": 3}, FALLS, True),
        (2, {"minibatches": 2}, FALLS, False),
        (None, {"minibatches": 2}, FALLS, True),
        (None, {}, FALLS, False),
        (2, {}, OptimSettings(warmup_steps=1), True),
        (2, {}, OptimSettings(), False),
    ],
)
def test_resume_warns_of_a_jump_of_the_learning_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int | None, now: dict[str, int], optim: Any, warns: bool
):
    latest = Rig(tmp_path, steps=1, minibatches=before or 1).run().latest()
    rig = Rig(tmp_path, steps=2, optim=optim, **now)
    if before is None:  # of a version that did not count them
        load = rig.checkpoints.load
        rig.checkpoints.load = lambda path: {k: v for k, v in load(path).items() if k != "updates_per_step"}  # type: ignore
    caplog.clear()
    rig.trainer.resume(latest)
    assert ("optimizer updates per step" in caplog.text) == warns


@pytest.mark.parametrize("at_event", [1, 9, 20, 31, 50])
def test_cancelled_run_resumes_with_every_step_recorded_once(tmp_path: Path, at_event: int):
    rig = Rig(tmp_path, eval_sets=("greedy",), eval_every=2, steps=4, latency_s=0.001)

    async def cancelled() -> None:
        running = asyncio.ensure_future(rig.trainer.run())
        while len(rig.events) < at_event:  # noqa: ASYNC110
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    steps = [e[1] for e in rig.of("step")]
    again = Rig(tmp_path, eval_sets=("greedy",), eval_every=2, steps=4, latency_s=0.001)
    again.resumed()
    assert again.trainer.state.step == rig.policy.steps == len(steps)
    again.run()
    assert steps + [e[1] for e in again.of("step")] == [1, 2, 3, 4]
    assert again.policy.steps == 4
    assert rig.tasks_of_steps() + again.tasks_of_steps() == Rig(tmp_path / "whole", steps=4).run().tasks_of_steps()


def test_cancellation_during_publishing_records_the_step(tmp_path: Path):
    rig = Rig(tmp_path, steps=3)
    publish = rig.context.engine.update_weights

    async def slow(version: int, **kwargs: Any) -> None:
        await publish(version, **kwargs)
        if version == 2:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0)

    rig.context.engine.update_weights = slow  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        rig.run()
    assert [e[1] for e in rig.of("step")] == [1, 2]
    assert rig.saved("loop")["step"] == 2


def test_report_before_training_survives_a_resume(tmp_path: Path):
    first = Rig(tmp_path, eval_sets=("greedy",), steps=1, is_right=right_in_evaluations_of({0: 1})).run()
    assert first.trainer.state.reports["before"]["greedy"]["success"] == 0.25
    second = Rig(tmp_path, eval_sets=("greedy",), steps=2, is_right=right_in_evaluations_of({2: 2})).resumed().run()
    reports = second.trainer.state.reports
    assert (reports["before"]["greedy"]["success"], reports["after"]["greedy"]["success"]) == (0.25, 0.5)
    assert [e[1] for e in second.of("eval")] == [2]


def test_engine_logprobs_can_be_the_old_ones(tmp_path: Path):
    rig = Rig(tmp_path, minibatches=2, steps=1, old_logprobs="engine").run()
    trained = [s for batch in rig.policy.batches for s in batch]
    assert trained
    assert all(np.array_equal(s.old_logprobs, s.rollout_logprobs) for s in trained)


def test_old_logprobs_of_an_engine_that_says_none_are_refused(tmp_path: Path):
    rig = Rig(tmp_path, minibatches=2, steps=1, old_logprobs="engine")
    generate = rig.context.engine.generate

    async def silent(request: GenerateRequest) -> Any:
        return dataclasses.replace(await generate(request), logprobs=None)

    rig.context.engine.generate = silent  # type: ignore[method-assign]
    refuses(lambda: rig.run(), TrainingError, "'engine'", "old_logprobs")


def test_step_that_ends_between_minibatches_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rig = Rig(tmp_path, fail_at=3, minibatches=2, checkpoint_every=1)
    refuses(lambda: rig.run(), TrainingError, "the loss is not finite")
    assert rig.saved("policy")["steps"] == 2, "whole steps alone"
    assert "the run ended in the middle of step 2, so its current weights are not saved" in caplog.text


def test_missed_validation_is_done_after_a_resume(tmp_path: Path):
    first = Rig(tmp_path, eval_sets=("greedy",), eval_every=2, steps=2).run()
    latest = first.latest()
    second = Rig(tmp_path, eval_sets=("greedy",), eval_every=2, steps=3)
    second.trainer.resume(latest)
    second.run()
    assert [e[1] for e in second.of("eval")] == [2, 3]
    third = Rig(tmp_path, eval_sets=("greedy",), eval_every=2, steps=4)
    third.trainer.resume(latest)
    third.trainer.state.evaluated = 2
    third.run()
    assert [e[1] for e in third.of("eval")] == [4], "what was done is not done again"


@pytest.mark.parametrize(
    ("ends", "step", "later", "later_step"),
    [({"stop_at": 0.75}, 2, {"stop_at": 0.9}, 4), ({"patience": 1}, 3, {"patience": 2}, 4)],
)
def test_resumed_run_ends_where_validation_ended_it(
    tmp_path: Path, ends: dict[str, Any], step: int, later: dict[str, Any], later_step: int
):
    options: dict[str, Any] = {"is_right": right_in_evaluations_of({1: 1, 2: 3}), "eval_sets": ("greedy",), "eval_every": 1}
    latest = Rig(tmp_path, **options, **ends, steps=9).run().latest()
    again = Rig(tmp_path, **options, **ends, steps=9)
    again.trainer.resume(latest)
    again.run()
    assert again.trainer.state.step == step and not again.of("train")
    changed = Rig(tmp_path, **options, **later, steps=4)
    changed.trainer.resume(latest)
    assert changed.run().trainer.state.step == later_step, "another threshold lets it go on"


@pytest.mark.parametrize("on_checkpoint_error", ["stop", "warn"])
def test_failed_checkpoint_stops_or_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture, on_checkpoint_error: str):
    rig = Rig(tmp_path, checkpoint_every=1, on_checkpoint_error=on_checkpoint_error)

    def export(path: Path) -> None:
        if "000001" in str(path):
            raise OSError(28, "No space left on device")
        path.mkdir()

    rig.export = export
    if on_checkpoint_error == "stop":
        refuses(lambda: rig.run(), CheckpointError, "the checkpoint of step 1 cannot be written", "step-000000")
    else:
        assert rig.run().trainer.state.step == 3
        assert "the checkpoint of step 1 cannot be written" in caplog.text
        written = sorted(p.name for p in tmp_path.glob("step-*"))
        assert written == ["step-000002", "step-000003"], "the next checkpoint is written"


@pytest.mark.parametrize(
    ("failing", "good", "best"), [(0, {0: 3, 1: 1}, 1), (1, {1: 3, 2: 2, 3: 1}, 2), (2, {0: 3, 2: 4}, 0)]
)
def test_best_that_could_not_be_written_is_not_the_best(tmp_path: Path, failing: int, good: dict[int, int], best: int):
    options: dict[str, Any] = {"eval_sets": ("greedy",), "eval_every": 1, "checkpoint_every": 1, "keep": 1}
    rig = Rig(tmp_path, is_right=right_in_evaluations_of(good), on_checkpoint_error="warn", **options)

    def export(path: Path) -> None:
        if path.parent.name == f".draft-00000{failing}":
            raise OSError(28, "No space left on device")
        path.mkdir()

    rig.export = export
    state = rig.run().trainer.state
    assert rig.checkpoints.best() == tmp_path / f"step-00000{best}"
    assert (state.best, state.best_step) == (good[best] / 4, best) and rig.saved("loop")["best_step"] == best


@pytest.mark.parametrize(
    ("every", "expected"), [(0, [0, 6]), ("10s", [0, 6]), ("2.5s", [0, 3, 6]), ("1s", [0, 1, 2, 3, 4, 5, 6])]
)
def test_checkpoints_keep_a_time_apart(tmp_path: Path, every: int | str, expected: list[int]):
    """A clock that a step moves on by one second."""
    now = [0.0]

    class Counting(Checkpoints):
        def begin(self, step: int, *args: Any, **kwargs: Any) -> Callable[[], Path]:
            saved.append(step)
            return super().begin(step, *args, **kwargs)

    saved: list[int] = []
    rig = Rig(tmp_path, steps=6, checkpoint_every=every, checkpoints=Counting(tmp_path), clock=lambda: now[0])
    on_step = rig.observer.on_step

    def moved_on(*args: Any, **kwargs: Any) -> None:
        now[0] += 1
        on_step(*args, **kwargs)

    rig.observer.on_step = moved_on  # type: ignore[method-assign]
    rig.run()
    assert saved == expected


def test_timed_checkpoints_cost_a_fiftieth_at_most(tmp_path: Path):
    ticks = iter(range(0, 100_000, 7))  # whatever is measured takes 7 s, and two checkpoints are never 350 s apart
    rig = Rig(tmp_path, steps=6, checkpoint_every="1s", keep=9, clock=lambda: float(next(ticks))).run()
    assert sorted(p.name for p in rig.checkpoints.folder.glob("step-*")) == ["step-000000", "step-000006"]


def test_newest_complete_checkpoint_keeps_its_journal(tmp_path: Path):
    journals: list[list[str]] = []

    def export(path: Path) -> None:
        journals.append(sorted(p.name for p in (tmp_path / "journal").glob("step-*")))
        if path.parent.name in (".draft-000001", ".draft-000002"):
            raise OSError(28, "No space left on device")
        path.mkdir()

    journal = JournalFile(tmp_path / "journal")
    rig = Rig(tmp_path / "checkpoints", journal=journal, checkpoint_every=1, on_checkpoint_error="warn")
    rig.export = export
    rig.run()
    assert journals == [["step-000000.jsonl"], *([f"step-00000{n}.jsonl" for n in (0, later)] for later in (1, 2, 3))]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_run_that_ends_leaves_no_journal(tmp_path: Path, max_staleness: int):
    folder = tmp_path / "journal"
    Rig(tmp_path / "checkpoints", journal=JournalFile(folder), max_staleness=max_staleness).run()
    assert not folder.exists()


@pytest.mark.parametrize(("steps", "size", "share"), [(1, 1, 0.1), (1, 4, 1.0), (3, 2, 0.1)])
def test_run_in_which_every_trajectory_fails_ends(tmp_path: Path, steps: int, size: int, share: float):
    rig = Rig(
        tmp_path,
        is_right=lambda request, version: EngineError("it is gone"),
        steps=steps,
        groups_per_step=1,
        group_size=size,
        max_failed_share=share,
    )
    refuses(lambda: rig.run(), RolloutError, "all", "trajectories failed", "it is gone")
    assert not rig.of("optim_step")
