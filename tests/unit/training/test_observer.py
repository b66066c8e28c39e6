"""A running run records metrics, trajectories, alarms, and lines for a person."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from polyturn.cli.main import main
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import CUT_BY_REQUEST, TrajectoryGroup
from polyturn.evaluation.report import report
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task
from polyturn.tracking.console import Progress
from polyturn.tracking.dump import TrajectoryDump
from polyturn.tracking.jsonl import read_metrics
from polyturn.tracking.manager import TrackerSpec
from polyturn.training.observer import AlsoRecord, RunObserver
from support.refusals import refuses


async def groups(first: int = 0, num: int = 2) -> list[TrajectoryGroup]:
    specs = [GroupSpec(id=f"g{first + i}", task=task(), size=2) for i in range(num)]
    return await RolloutPool(scripted_context(["#### 4"])).run(specs)


async def test_step_is_on_disk_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with RunObserver(tmp_path, total_steps=3) as observer:
        for group in (found := await groups()):
            observer.on_group(group, phase="rollout", total=2)
        observer.on_step(1, {"reward/mean": 0.5, "loss/total": float("nan")}, found)
        (line,) = read_metrics(tmp_path / "metrics.jsonl")
        said = {name: value for name, value in line.items() if not name.startswith("system/")}
        assert said == {"step": 1, "reward/mean": 0.5, "loss/total": None}
        assert [t.id for t in open_store(tmp_path).trajectories()] == ["g0/0", "g0/1", "g1/0", "g1/1"]
    assert [line for line in caplog.messages if line.startswith("step 1/3")]


async def test_evaluation_is_recorded_under_its_own_split(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    found = await groups()
    with RunObserver(tmp_path, total_steps=1) as observer:
        observer.on_eval(0, "greedy", report([t for g in found for t in g.trajectories]), found)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["step"], line["eval/greedy/success"]) == (0, 1.0)
    assert {t.id for t in open_store(tmp_path).trajectories(split="eval/greedy")} == {"g0/0", "g0/1", "g1/0", "g1/1"}
    assert any("eval greedy" in message and "success 1.000" in message for message in caplog.messages)
    assert not any("nan" in message for message in caplog.messages), "what could not be measured is not in the line"


async def test_dumps_and_metrics_are_recorded_beside_them(tmp_path: Path):
    found = await groups()
    also = AlsoRecord(
        train_dump=TrajectoryDump(tmp_path / "train", str),
        eval_dump=TrajectoryDump(tmp_path / "eval", str),
        has_many_sets=True,
        eval_metrics=lambda name, seen: {f"mine/{name}": len(seen)},
    )
    with RunObserver(tmp_path, total_steps=1, also=also) as observer:
        observer.on_step(1, {"reward/mean": 0.5}, found)
        observer.on_eval(1, "greedy", report([t for g in found for t in g.trajectories]), found)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["mine/greedy"], line["eval/greedy/openai/gsm8k/reward/mean@2"]) == (2, 1.0)
    dumps = [tmp_path / "train" / "1.jsonl", tmp_path / "eval" / "greedy" / "1.jsonl"]
    assert [len(file.read_text().splitlines()) for file in dumps] == [4, 4]


async def test_resume_logs_the_steps_that_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with RunObserver(tmp_path, total_steps=9) as observer:
        for step in (1, 2, 3, 4):
            observer.on_step(step, {"reward/mean": 1.0}, [])
    for step, words in ((4, None), (1, "the last checkpoint is of step 1; steps 2 to 4 are repeated")):
        caplog.clear()
        with RunObserver(tmp_path, total_steps=9) as observer:
            observer.resume(step)
        assert (words in caplog.text) if words else ("repeated" not in caplog.text)


async def test_resume_removes_later_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with RunObserver(tmp_path, total_steps=4) as observer:
        for step in (1, 2, 3):
            observer.on_step(step, {"reward/mean": float(step)}, await groups(2 * step))
    with RunObserver(tmp_path, total_steps=4) as observer:
        observer.resume(2)
        assert "the last checkpoint is of step 2; step 3 is repeated" in caplog.text
        observer.on_step(3, {"reward/mean": 30.0}, await groups(6))
    assert [(x["step"], x["reward/mean"]) for x in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 30)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert len(open_store(tmp_path)) == 12, "a step that was taken again counts once"


async def test_alarm_is_logged_and_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with RunObserver(tmp_path, total_steps=40) as observer:
        for step in range(1, 41):
            observer.on_step(step, {"policy/entropy": 1.0 if step < 20 else 0.001}, [])
    alarms = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert alarms and alarms[0]["step"] >= 20 and "entropy" in alarms[0]["message"]
    assert alarms[0]["message"] in caplog.text
    with (tmp_path / "alarms.jsonl").open("a") as file:
        file.write("damaged\n")
    with RunObserver(tmp_path, total_steps=40) as observer:
        observer.resume(alarms[0]["step"] - 1)
    assert (tmp_path / "alarms.jsonl").read_text() == "damaged\n", "the resumed run repeats the steps with alarms"


CUT = "The answer to this is a long story that does not end"


def alarms_in(folder: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]
    return [(line["alarm"], line["message"]) for line in lines]


async def ended(says: Sequence[str], **limits: int) -> list[TrajectoryGroup]:
    context = scripted_context(says, interactions={"gsm8k": Gsm8kInteraction({})}, limits=Limits(**limits), latency_s=0.0)
    return await RolloutPool(context).run([GroupSpec(id="g0", task=task(interaction="gsm8k"), size=4)])


async def test_cut_episodes_raise_one_alarm_with_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    found = await ended([CUT], max_tokens_per_turn=4)
    with RunObserver(tmp_path, total_steps=2) as observer:
        observer.on_eval(0, "greedy", report([t for g in found for t in g.trajectories]), found)
        for step in (1, 2):
            observer.on_step(step, {"rollout/cut": 1.0}, found)
    ((name, message),) = alarms_in(tmp_path)
    assert name == "cut_episodes" and "rollout.limits.max_tokens_per_turn" in message and "4 of 4" in message
    assert "cut 100 %" in next(line for line in caplog.messages if line.startswith("eval greedy"))


async def test_cut_that_the_request_asked_for_is_not_blamed_on_the_run(tmp_path: Path):
    groups = [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(t, turns=(dataclasses.replace(t.turns[0], info={CUT_BY_REQUEST: 4}),))
                for t in group.trajectories
            ),
        )
        for group in await ended([CUT], max_tokens_per_turn=4)
    ]
    with RunObserver(tmp_path, total_steps=0) as observer:
        observer.end_rollout(groups)
    ((_, message),) = alarms_in(tmp_path)
    assert "max_tokens_per_turn" not in message and "request" in message


async def test_episodes_without_a_completion_blame_no_tool(tmp_path: Path):
    groups = [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(t, turns=(), segments=(), stop_reason=StopReason.TIMEOUT) for t in group.trajectories
            ),
        )
        for group in await ended([CUT], max_tokens_per_turn=4)
    ]
    with RunObserver(tmp_path, total_steps=0) as observer:
        observer.end_rollout(groups)
    ((_, message),) = alarms_in(tmp_path)
    assert "before their first completion" in message and "tool" not in message


async def test_rollout_alone_raises_the_alarm_too(tmp_path: Path):
    with RunObserver(tmp_path, total_steps=0) as observer:
        observer.end_rollout(await ended([CUT], max_tokens_per_turn=4))
    assert [name for name, _ in alarms_in(tmp_path)] == ["cut_episodes"]


async def test_used_up_turns_raise_an_alarm_unless_episodes_succeed(tmp_path: Path):
    with RunObserver(tmp_path, total_steps=1) as observer:
        observer.on_step(1, {}, await ended(["#### 4"], max_turns=1))
        assert not (tmp_path / "alarms.jsonl").exists()
        observer.on_step(1, {}, await ended(["#### 5", "#### 6"], max_turns=2))
    ((name, message),) = alarms_in(tmp_path)
    assert name == "out_of_turns" and "rollout.limits.max_turns" in message


async def test_used_up_turns_without_rewards_raise_no_alarm(tmp_path: Path):
    groups = [
        dataclasses.replace(group, trajectories=tuple(dataclasses.replace(t, reward=None) for t in group.trajectories))
        for group in await ended(["#### 5", "#### 6"], max_turns=2)
    ]
    with RunObserver(tmp_path, total_steps=1) as observer:
        observer.on_step(1, {}, groups)
    assert not (tmp_path / "alarms.jsonl").exists()


async def test_success_of_used_up_turns_is_the_runs(tmp_path: Path):
    with RunObserver(tmp_path, total_steps=1, also=AlsoRecord(success_at=0.0)) as observer:
        observer.on_step(1, {}, await ended(["#### 5", "#### 6"], max_turns=2))
    assert not (tmp_path / "alarms.jsonl").exists()


async def test_resumed_run_does_not_repeat_alarms_of_limits(tmp_path: Path):
    cut = await ended([CUT], max_tokens_per_turn=4)
    with RunObserver(tmp_path, total_steps=3) as observer:
        observer.on_step(1, {"reward/mean": 0.0}, cut)
    for step, num in ((1, 1), (0, 1)):  # the second time, the step that raised it is taken again
        with RunObserver(tmp_path, total_steps=3) as observer:
            observer.resume(step)
            observer.on_step(step + 1, {"reward/mean": 0.0}, cut)
        assert len(alarms_in(tmp_path)) == num


def test_long_first_step_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    now = [0.0]
    monkeypatch.setattr("polyturn.training.observer.time", SimpleNamespace(monotonic=lambda: now[0]))
    with RunObserver(tmp_path, total_steps=2) as observer:
        for _ in range(2):
            observer.begin_phase("rollout", 32)
            for _ in range(32):
                now[0] += 10.0
                observer.on_episode(total=32)
    (line,) = [line for line in caplog.messages if "pace" in line]
    assert "32" in line and "5m20s" in line and "train.groups_per_step" in line


def test_pace_of_concurrent_episodes_starts_at_the_first_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    now = [0.0]
    monkeypatch.setattr("polyturn.training.observer.time", SimpleNamespace(monotonic=lambda: now[0]))
    with RunObserver(tmp_path, total_steps=1) as observer:
        observer.begin_phase("rollout", 64)
        now[0] = 60.0  # all run at once; the first ends after a minute, then one each second
        for _ in range(64):
            now[0] += 1.0
            observer.on_episode(total=64)
    (line,) = [line for line in caplog.messages if "pace" in line]
    assert "the 64 of a step take about 2m04s" in line


@pytest.mark.parametrize(("age_s", "pause_s"), [(0.0, 2.0), (60.0, 2.0), (600.0, 10.0), (9000.0, 60.0)])
def test_progress_in_a_log_becomes_rarer_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, pause_s: float
):
    now, pauses = [0.0], []

    class Shown(Progress):
        def __init__(self, *args: Any, pause_s: float, **kwargs: Any) -> None:
            super().__init__(*args, pause_s=pause_s, **kwargs)
            pauses.append(pause_s)

    monkeypatch.setattr("polyturn.training.observer.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("polyturn.training.observer.Progress", Shown)
    with RunObserver(tmp_path, total_steps=2) as observer:
        now[0] = age_s
        observer.begin_phase("rollout", 32)
    assert pauses == [pause_s]
    monkeypatch.setattr("polyturn.training.observer.stderr_console", lambda: Console(force_terminal=True, stderr=True))
    with RunObserver(tmp_path, total_steps=2) as observer:
        now[0] += age_s
        observer.begin_phase("rollout", 32)
    assert pauses == [pause_s, 2.0], "a terminal shows a bar, which does not scroll"


async def test_failed_step_leaves_its_trajectories(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunObserver(tmp_path, total_steps=3) as observer:
        observer.on_failed_step(1, await groups())
    assert {t.id for t in open_store(tmp_path).trajectories(split="train")} == {"g0/0", "g0/1", "g1/0", "g1/1"}
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path), "g0/0"])
    assert "#### 4" in capsys.readouterr().out
    with RunObserver(tmp_path, total_steps=3) as observer:
        observer.resume(0)
    assert not len(open_store(tmp_path)), "a resumed run takes the step again"


def test_supervised_steps_have_their_own_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with RunObserver(tmp_path, total_steps=0) as observer:
        for step in (1, 2):
            observer.on_sft(step, 5, {"loss/total": 1.0 / step})
        observer.end_sft()
    assert [x["loss/total"] for x in read_metrics(tmp_path / "sft_metrics.jsonl")] == [1.0, 0.5]
    assert "warm start: 2 of 5 steps, loss 0.5000" in caplog.messages
    assert not (tmp_path / "metrics.jsonl").exists()


async def test_records_are_kept_when_the_run_fails(tmp_path: Path):
    found = await groups()

    def fail() -> None:
        with RunObserver(tmp_path, total_steps=0) as observer:
            for group in found:
                observer.on_rollout(group, total=4)
            raise RuntimeError("in the middle")

    refuses(fail, RuntimeError, "in the middle")
    assert len(open_store(tmp_path)) == 4


async def test_trackers_end_although_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    ends: list[str] = []

    class Noting:
        def log(self, step: int, values: Any) -> None:
            pass

        def close(self) -> None:
            ends.append("closed")

    spec = TrackerSpec(name="noting", make=lambda about: Noting())
    observer = RunObserver(tmp_path, total_steps=0, also=AlsoRecord(trackers=(spec,)))
    observer.on_step(1, {"reward/mean": 0.5}, [])
    monkeypatch.setattr(ParquetStore, "flush", full)
    refuses(lambda: observer.__exit__(None, None, None), OSError, "No space left")
    assert ends == ["closed"]
