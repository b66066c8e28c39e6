"""docs/guides/scheduler.md runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.advantages import assign_advantages
from polyturn.batching.loss_scale import loss_scale
from polyturn.batching.samples import to_samples
from polyturn.build import ConfigSource, build_scheduler
from polyturn.config.models import RolloutConfig, RunConfig
from polyturn.config.schema import schema_table
from polyturn.core.errors import ConfigError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.infra.plugins import import_attr
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.schedulers.registry import MOVED, schedulers
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.suites.scheduler import check_scheduler
from support.example_schedulers import FOLDER
from support.refusals import refuses

GUIDES = Path(__file__).parents[3] / "docs/guides"
PAGE = (GUIDES / "scheduler.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(LAKE,) = re.findall(r"```python\n(# lake.py\n.*?)```", (GUIDES / "environments.md").read_text(), re.DOTALL)
MODEL = {"init": {"model_type": "qwen3"}, "tokenizer": "x"}


def defined(index: int) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(CODE[index], names)
    return names


def place(folder: Path, **rollout: Any) -> ConfigSource:
    return ConfigSource(config=RunConfig(model=MODEL, rollout=RolloutConfig(**rollout)), base=folder)  # type: ignore[arg-type]


async def test_first_scheduler_of_the_guide_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "doubt.py").write_text(CODE[0])
    made = build_scheduler(place(tmp_path, scheduler="doubt.py:Doubt", scheduler_kwargs={"max_doubts": 3}))
    t = await run_episode(scripted_context(["4", "5", "5", "no"], scheduler=made), task(), id="e")
    assert [turn.message.text for turn in t.turns] == ["4", "5", "5"] and t.turn_scores == (0.0, 0.0, 0.1)
    await check_scheduler(made, says=["4", "5", "5"])


async def test_environment_of_the_guide_runs(tmp_path: Path) -> None:
    (tmp_path / "lake.py").write_text(LAKE)
    made = build_scheduler(place(tmp_path, scheduler="gym", scheduler_kwargs={"env": "lake.py:Lake"}))
    row = task("Play.", data_source=None, extra={"env_config": {"size": 8}})
    made.check_task(row)
    context = scripted_context(["left"], scheduler=made, limits=Limits(max_turns=2))
    context.rewarder = RewardRouter({}, scheduler=made)
    t = await run_episode(context, row, id="e")
    assert [m.text for m in t.messages] == ["Play.\nYou are at the top left.", "left", "You fell in."]
    assert t.reward is not None


async def test_estimator_of_the_guide_runs() -> None:
    estimator = defined(1)["turn_scores"]
    context = scripted_context(["4", "5", "5"], scheduler=defined(0)["Doubt"]())
    context.rewarder = RewardRouter({}, scheduler=SimpleNamespace(scores_turns=True, gives_reward=False))
    t = await run_episode(context, task(data_source=None), id="e")
    group = TrajectoryGroup(id="g", task=t.task, trajectories=(t,))
    (sample,) = assign_advantages([group], to_samples(group, temperature=1.0), estimator=estimator)
    assert sorted(set(np.round(sample.advantages[sample.loss_weights != 0], 3).tolist())) == pytest.approx([-0.1, 0.0])


def test_tables_name_every_shipped_scheduler() -> None:
    table = PAGE.partition("## Shipped schedulers")[2].partition("## ")[0]
    own = {BlackBox.__module__, *(n for n in sys.modules if n.startswith("polyturn.rollout"))}
    names = {n for n in schedulers if schedulers.resolve(n).__module__ in own and not n.startswith("test_")}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == names and "black_box" in names
    shipped = [name for name in loss_scale if loss_scale.resolve(name).__module__.startswith("polyturn.batching")]
    (scales,) = [row.doc for row in schema_table(RunConfig) if row.key == "algorithm.loss_scale"]
    assert shipped and set(shipped) <= set(re.findall(r"\w+", scales))


@pytest.mark.parametrize("name", MOVED)
def test_moved_scheduler_is_an_example(name: str) -> None:
    for path in re.findall(r"(\w+\.py:\w+)", MOVED[name]):
        assert callable(import_attr(path, base=FOLDER)) and f"`{path}`" in PAGE


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"scheduler": "compactoin"}, "'compactoin'.*'compaction'"),
        ({"scheduler": "react"}, "'react'.*examples/schedulers.*schedulers/react.py:React"),
        ({"scheduler": "tree"}, "'tree'.*schedulers/tree.py:Tree.*reward.function.*schedulers/tree.py:score_tree"),
        ({"scheduler": "compaction"}, "'compaction'.*'budget'"),
        ({"scheduler": f"{FOLDER}/tree.py:Tree", "scheduler_kwargs": {"widht": 3}}, "tree.py:Tree'.*'widht'"),
        ({"scheduler": "gym", "limits": {"max_turns": None}}, "limit"),
    ],
)
def test_wrong_scheduler_settings_are_refused(tmp_path: Path, rollout: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build_scheduler(place(tmp_path, **rollout))


def test_scheduler_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE[0].replace("= max_doubts", "= 1 // max_doubts"))
    where = place(tmp_path, scheduler="own.py:Doubt", scheduler_kwargs={"max_doubts": 0}, limits={"max_turns": 3})
    refuses(lambda: build_scheduler(where), ConfigError, "'own.py:Doubt'", "ZeroDivisionError", "own.py")
