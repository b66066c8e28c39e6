"""Failures reach the step's line, an alarm with the line of the plug-in's code, and the end of the run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import polyturn
from polyturn.build.tasks import build_run_tasks
from polyturn.config.config_source import ConfigSource
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, DataError, RolloutError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.interactions.base import BaseInteraction
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.toolbox import Toolbox
from polyturn.tracking.alarms import MIN_CALLS, Alarms, PluginAlarms
from support.refusals import refuses

CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'


def broken() -> Any:
    return {}["nothing is here"]


LINE = inspect.getsourcelines(broken)[1] + 1
HERE = f"({Path(__file__).name}, line {LINE})"


class Tutor(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return broken()


class PlainTutor(BaseInteraction):
    def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return broken()


class Stepper(MultiTurnScheduler):
    def step(self, episode: Any, turn: Any) -> Any:
        return broken()


def score(trajectory: Any) -> float:
    return float(broken())


@polyturn.tool
def look(key: str) -> str:
    """Look something up.

    Args:
        key: What.
    """
    return str(broken())


async def groups_of(num: int, size: int, says: Any = ("x",), *, share: float = 1.0, **options: Any) -> list[TrajectoryGroup]:
    fields = options.pop("task", {})
    context = scripted_context(says, **options)
    pool = RolloutPool(context, max_failed_share=share)
    pool.failures.check_finished = lambda: None  # type: ignore[method-assign]
    return await pool.run([GroupSpec(id=f"g{i}", task=task(id=f"t{i}", **fields), size=size) for i in range(num)])


@pytest.mark.parametrize(
    "options",
    [
        {"interactions": {"tutor": Tutor({})}, "task": {"interaction": "tutor", "data_source": None}},
        {"interactions": {"tutor": PlainTutor({})}, "task": {"interaction": "tutor", "data_source": None}},
        {"scheduler": Stepper()},
        {"rewards": {"openai/gsm8k": score}},
    ],
    ids=["interaction", "plain interaction", "scheduler", "reward"],
)
async def test_failure_names_the_line_of_the_plugin(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    (group,) = await groups_of(1, 4, **options)
    assert all(HERE in (t.error or "") for t in group.trajectories), group.trajectories[0].error
    traces = [r for r in caplog.records if r.exc_info and "failed" in r.getMessage()]
    assert len(traces) == 1 and "nothing is here" in str(traces[0].exc_info)
    (alarm,) = PluginAlarms().feed(3, [group])
    assert "step 3: 4 of 4" in alarm.message
    assert HERE in alarm.message
    assert "KeyError" in alarm.message


@pytest.mark.parametrize("wrong", [{"scheduler": Stepper()}, {"rewards": {"openai/gsm8k": lambda trajectory: "a"}}])
async def test_repeated_failure_is_logged_ever_more_rarely(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    groups = await groups_of(6, 5, **wrong)
    assert all(t.is_failed for group in groups for t in group.trajectories)
    said = [r.getMessage() for r in caplog.records if "failed" in r.getMessage()]
    assert [text.endswith("(10 trajectories so far)") for text in said] == [False, True]


async def test_tool_that_always_fails_raises_one_alarm(caplog: pytest.LogCaptureFixture) -> None:
    alarms = PluginAlarms()
    groups = await groups_of(3, 3, [CALL, "#### 4"], tools=[look])
    raised = alarms.feed(1, groups) + alarms.feed(2, groups)
    assert [a.name for a in raised] == ["failing_tool"]
    assert f"the latest {MIN_CALLS} calls of the tool 'look' all failed" in raised[0].message
    assert "KeyError" in raised[0].message and HERE in raised[0].message
    assert sum("tool 'look' raised" in r.getMessage() and r.exc_info is not None for r in caplog.records) == 1
    (result,) = groups[0].trajectories[0].turns[0].tool_results
    assert Path(__file__).name not in str(result.content), "the model is told nothing of our files"


async def test_working_call_ends_the_alarm() -> None:
    @polyturn.tool
    def look(key: str) -> str:
        """Look something up.

        Args:
            key: What.
        """
        return key

    failing = await groups_of(3, 3, [CALL, "#### 4"], tools=[globals()["look"]])
    working = await groups_of(1, 1, [CALL, "#### 4"], tools=[look])
    alarms = PluginAlarms()
    steps = [failing, failing, working, failing, failing]
    assert [len(alarms.feed(step, groups)) for step, groups in enumerate(steps)] == [1, 0, 0, 1, 0]


@pytest.mark.parametrize(("count", "share"), [(1, 0.1), (1, 0.99), (16, 0.1), (40, 0.99)])
async def test_run_ends_with_an_error_where_all_fail(count: int, share: float) -> None:
    context = scripted_context(["x"], rewards={"openai/gsm8k": score})
    with pytest.raises(RolloutError, match=r"trajectories failed.*KeyError.*test_failures_are_told"):
        await RolloutPool(context, max_failed_share=share).run(
            [GroupSpec(id=f"g{i}", task=task(id=f"t{i}")) for i in range(count)]
        )


def steps(metrics: Sequence[dict[str, float]]) -> list[tuple[int, str]]:
    alarms = Alarms()
    return [(i, a.name) for i, m in enumerate(metrics) for a in alarms.feed(i, m)]


@pytest.mark.parametrize("idle", [{"buffer/samples_kept": 0.0}, {"buffer/samples_kept": 8.0, "loss/grad_norm": 0.0}])
def test_steps_that_train_nothing_raise_one_alarm(idle: dict[str, float]) -> None:
    busy = {"buffer/samples_kept": 8.0, "loss/grad_norm": 0.3}
    assert steps([idle] * 17) == [(2, "nothing_trained")]
    assert steps([idle, idle, busy] * 6) == []
    assert [i for i, _ in steps([busy, *[idle] * 4, busy, *[idle] * 4])] == [3, 8]


def test_row_that_nothing_scores_is_refused() -> None:
    @polyturn.tool
    def paid(key: str) -> tuple[str, float]:
        """Look something up, for a reward.

        Args:
            key: What.
        """
        return key, 1.0

    silent, paying = Toolbox([look]), Toolbox([look, paid])
    row = task(data_source=None)
    assert (silent.scoring, paying.scoring) == (frozenset(), {"paid"})
    refuses(lambda: RewardRouter().check([row], tools=silent.tools, scoring=silent.scoring), DataError, "'t0'", "'look'")
    RewardRouter().check([row], tools=paying.tools, scoring=paying.scoring)
    with pytest.raises(DataError, match="'t0'"):
        RewardRouter().check([task(data_source=None, tools=("look",))], tools=paying.tools, scoring=paying.scoring)
    RewardRouter(function=score).check([row], tools=silent.tools, scoring=silent.scoring)


@pytest.mark.parametrize("setting", ["every=5", "patience=2", "stop_at=0.9"])
def test_evaluation_without_data_is_refused(tmp_path: Path, setting: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi", "data_source": "openai/gsm8k", "ground_truth": "4"}\n')
    overrides = ["model.path=m", "data.train.files=rows.jsonl"]

    def tasks(*more: str) -> Any:
        return build_run_tasks(ConfigSource(config=load_config(RunConfig, None, [*overrides, *more]).config, base=tmp_path))

    name, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=rf"evaluation\.{name} is {value}"):
        tasks(f"evaluation.{setting}")
    assert len(tasks().train) == 1
    assert len(tasks(f"evaluation.{setting}", "evaluation.data.files=rows.jsonl").eval_sets) == 1
