"""Trackers get the records of a run, and their errors do not reach the run. Real libraries where they are installed."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context, task
from polyturn.tracking.base import MAX_TEXT, RunInfo, RunTracker, conversation, samples
from polyturn.tracking.manager import Trackers, TrackerSpec, tracker_spec
from polyturn.training.observer import AlsoRecord, RunObserver
from support.refusals import refuses


async def groups(says: str = "#### 4", *, asks: str = "What is 2+2?") -> list[TrajectoryGroup]:
    return await RolloutPool(scripted_context([says])).run([GroupSpec(id="g0", task=task(asks), size=2)])


def run_info(folder: Path, **more: Any) -> RunInfo:
    return RunInfo(name="mine", folder=folder, **more)


def contents(folder: Path, pattern: str) -> list[bytes]:
    return [file.read_bytes() for file in folder.rglob(pattern) if file.is_file()]


class Kept(RunTracker):
    """Keeps its input in a list that the test passes in."""

    def __init__(self, run: RunInfo, *, into: list[Any]) -> None:
        self.into = into

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.into.append((step, dict(values)))

    def log_samples(self, step: int, split: str, rows: Any) -> None:
        self.into.append((step, split, [row.id for row in rows]))

    def close(self) -> None:
        self.into.append("closed")


class Raises(Kept):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError(28, "No space left on device")


class Hangs(Kept):
    released = threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.released.wait()


class NeverOpens(Kept):
    def __init__(self, run: RunInfo, *, into: list[Any]) -> None:
        raise SystemExit("no account")


def spec(make: Callable[..., Any], into: list[Any]) -> TrackerSpec:
    return TrackerSpec(name=make.__name__.lower(), make=make, kwargs={"into": into})


async def test_run_passes_on_numbers_and_samples_of_each_step(tmp_path: Path):
    seen: list[Any] = []
    with RunObserver(tmp_path, total_steps=1, also=AlsoRecord(trackers=[spec(Kept, seen)])) as observer:
        observer.on_step(1, {"reward/mean": 0.5}, await groups())
    (step, metrics), *others = seen
    of_the_machine = {name for name in metrics if name.startswith("system/")}
    assert step == 1 and "system/process_gb" in of_the_machine
    assert {name: value for name, value in metrics.items() if name not in of_the_machine} == {"reward/mean": 0.5}
    assert others == [(1, "train", ["g0/0", "g0/1"]), "closed"]


@pytest.mark.parametrize(("tracker", "reason"), [(Raises, "No space left on device"), (NeverOpens, "no account")])
def test_failing_tracker_is_logged_once_and_its_losses_counted(
    tracker: Callable[..., Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    seen: list[Any] = []
    all_of_them = Trackers([spec(tracker, []), spec(Kept, seen)], run_info(tmp_path))
    for step in range(5):
        all_of_them.log(step, {"loss/total": 1.0})
    all_of_them.close()
    assert all_of_them.lost == {tracker.__name__.lower(): 5, "kept": 0}
    assert len(seen) == 6, "the other one has everything"
    assert sum(reason in message for message in caplog.messages) == 1
    assert "lost 5 records; metrics.jsonl has everything" in caplog.text


def test_hanging_tracker_is_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trackers = Trackers([spec(Hangs, [])], run_info(tmp_path), queue_size=4, close_s=0.2)
    for step in range(50):
        trackers.log(step, {})
    trackers.close()
    Hangs.released.set()
    assert trackers.lost["hangs"] >= 45 and "did not finish in time" in caplog.text


def test_tracker_may_be_a_class_in_a_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, run, *, to):\n        self.file = open(run.folder / to, 'w')\n"
        "    def log(self, step, values):\n        self.file.write(f'{step} {values}')\n"
        "    def close(self):\n        self.file.close()\n"
    )
    trackers = Trackers([tracker_spec("mine.py:Mine", base=tmp_path, to="out.txt")], run_info(tmp_path))
    trackers.log(3, {"a": 1.0})
    trackers.record(3, "train", [])  # it has no table, which is not a failure
    trackers.close()
    assert (tmp_path / "out.txt").read_text() == "3 {'a': 1.0}"
    assert trackers.lost == {"mine.py:Mine": 0}


def test_unusable_tracker_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch):
    refuses(lambda: tracker_spec("tensorbord"), ConfigError, "'tensorbord'", "tensorboard")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "polyturn.tracking.to_wandb", raising=False)
    refuses(
        lambda: tracker_spec("wandb"), ConfigError, "'wandb'", " needs wandb, which is not installed; ", "'polyturn[wandb]'"
    )
    monkeypatch.undo()
    pytest.importorskip("tensorboard")
    refuses(lambda: tracker_spec("tensorboard", folderr="x"), ConfigError, "'folderr'")


async def test_long_samples_are_cut():
    found = await groups(asks="word " * 2000)
    rows = samples(1, "train", found, 1)
    assert len(rows) == 1 and len(rows[0].conversation) < MAX_TEXT + 100
    assert "characters ..." in rows[0].conversation
    assert "\x1b" not in conversation((await groups("\x1b[31mred"))[0].trajectories[0])


async def test_tensorboard_has_curves_and_samples_and_resumes(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Trackers([tracker_spec("tensorboard")], run_info(tmp_path))
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": step / 10, "loss/total": float("nan")})
    first.record(3, "train", await groups("<script>alert(1)</script> | #### 4"))
    first.close()
    await asyncio.sleep(1.1)  # files of one second have one name, in which TensorBoard reads them in the order of time
    second = Trackers([tracker_spec("tensorboard")], run_info(tmp_path))
    second.resume(2)
    second.log(3, {"reward/mean": 0.9})
    second.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [(e.step, round(e.value, 3)) for e in found.Scalars("reward/mean")] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert "loss/total" not in found.Tags()["scalars"], "a number that is not finite is not a point"
    written = b"".join(contents(tmp_path, "events*"))
    assert b"samples/train" in written and b"<script>" not in written


async def test_spans_of_episodes_turns_and_calls_nest(tmp_path: Path):
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from polyturn.interactions.gsm8k import Gsm8kInteraction
    from polyturn.tools.gsm8k import Gsm8kTool

    context = scripted_context(
        ['<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "4"}}\n</tool_call>', "#### 4"],
        tools=[Gsm8kTool({})],
        interactions={"gsm8k": Gsm8kInteraction({})},
    )
    one = task(interaction="gsm8k", ground_truth="4")
    found = await RolloutPool(context).run([GroupSpec(id="g0", task=one, size=1)])
    exporter = InMemorySpanExporter()
    trackers = Trackers([tracker_spec("otel", exporter=exporter)], run_info(tmp_path))
    trackers.record(7, "train", found)
    trackers.close()
    spans = {s.name: s for s in exporter.get_finished_spans()}
    assert set(spans) == {"episode g0/0", "turn 0", "turn 1", "chat", "execute_tool calc_gsm8k_reward", "interaction gsm8k"}
    tree: dict[int, Any] = {s.context.span_id: s for s in exporter.get_finished_spans() if s.context}
    for span in tree.values():
        if span.parent is not None:
            outer = tree[span.parent.span_id]
            assert outer.start_time <= span.start_time <= span.end_time <= outer.end_time + 1e6, (span.name, outer.name)
    call: Any = spans["execute_tool calc_gsm8k_reward"]
    assert call.attributes["gen_ai.tool.name"] == "calc_gsm8k_reward"
    assert tree[call.parent.span_id].name == "turn 0"
    episode = spans["episode g0/0"].attributes
    assert episode is not None and (episode["polyturn.step"], episode["polyturn.reward"]) == (7, 0.95), (
        "a call that did not improve costs 0.05"
    )


def test_spans_follow_the_standard_variables(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    unknown = Trackers([tracker_spec("otel")], run_info(tmp_path, environ={"OTEL_TRACES_EXPORTER": "zipkn"}))
    unknown.record(1, "train", [])
    unknown.close()
    assert "the span exporter 'zipkn' is not installed" in caplog.text
    none = Trackers([tracker_spec("otel")], run_info(tmp_path, environ={"OTEL_TRACES_EXPORTER": "none"}))
    none.record(1, "train", [])
    none.close()
    assert none.lost == {"otel": 0}


async def test_wandb_offline_keeps_a_run(tmp_path: Path):
    pytest.importorskip("wandb", reason="needs the extra wandb")
    trackers = Trackers([tracker_spec("wandb", project="p", mode="offline")], run_info(tmp_path), close_s=60)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.record(1, "train", await groups())
    trackers.close()
    assert trackers.lost == {"wandb": 0}
    assert b"reward/mean" in b"".join(contents(tmp_path, "run-*.wandb"))
    assert contents(tmp_path, "samples/*.json")


async def test_mlflow_keeps_a_run_and_goes_on_with_it(tmp_path: Path):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for resumed in (None, 1):
        trackers = Trackers([tracker_spec("mlflow", uri=uri)], run_info(tmp_path, resumed_step=resumed), close_s=120)
        trackers.log(1 if resumed is None else 2, {"reward/mean": 0.5, "eval/a/b/reward/mean@4": 0.2, "reward/f1 (b)": 1.0})
        trackers.close()
        assert trackers.lost == {"mlflow": 0}
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("polyturn")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [1, 2]
    assert run.data.metrics["eval/a/b/reward/mean_at_4"] == 0.2 and run.data.metrics["reward/f1 _b_"] == 1.0


async def test_trackio_keeps_a_run_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs the extra trackio")
    trackers = Trackers([tracker_spec("trackio", project="p")], run_info(tmp_path), close_s=60)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.record(1, "train", await groups())
    trackers.close()
    assert trackers.lost == {"trackio": 0}
    assert contents(tmp_path, "*.db")


def test_run_info_reads_the_config_and_keeps_ids(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("train:\n  steps: 5\n")
    info = run_info(tmp_path)
    assert info.config() == {"train": {"steps": 5}}
    assert info.keep("id", "abc") == "abc" and info.kept("id") is None, "a new run goes on with nothing"
    assert run_info(tmp_path, resumed_step=4).kept("id") == "abc"
    assert json.dumps(info.config())
