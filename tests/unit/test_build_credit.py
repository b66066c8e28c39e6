"""From the algorithm section to an estimator, a critic and a KL penalty; impossible settings are refused before sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyturn import build
from polyturn.algorithms.advantages import traits_of
from polyturn.build.algorithm import (
    build_critic,
    check_algorithm,
    check_further_models,
    drops_zero_variance,
    require_scores,
)
from polyturn.core.errors import ConfigError
from polyturn.training.observer import RunObserver
from support.example_schedulers import FOLDER
from support.models import tiny_model
from support.refusals import refuses
from support.runs import tiny_source

SCHEDULERS = """
from polyturn import MultiTurnScheduler

class SaysNothing(MultiTurnScheduler):
    def step(self, episode, turn): ...

class ScoresNone(SaysNothing):
    scores_turns = False
"""


def options(folder: Path, *overrides: str) -> dict[str, Any]:
    return dict(build.build_estimator(tiny_source(folder, *overrides)).keywords)


FURTHER = {
    "algorithm.critic.path": ["algorithm.advantage=gae"],
    "algorithm.loss.distill.teacher": [],
    "model.reference": ["algorithm.kl.coef=0.1"],
}


@pytest.mark.parametrize("key", FURTHER)
@pytest.mark.parametrize("is_plan", [True, False])
def test_unfitting_further_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, is_plan: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    like = tiny_model(320)
    tiny_model(300).save_pretrained(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    says = {
        "./nowhere": rf"{key} is './nowhere'",
        "abc": rf"{key} is 'abc'",
        "empty": rf"{key} is 'empty'",
        "other": rf"{key} .*300.* 320",
    }

    for name, words in says.items():
        found = replace(tiny_source(tmp_path, *FURTHER[key], f"{key}={name}"), is_plan=is_plan)
        with pytest.raises(ConfigError, match=words):
            check_further_models(found, build.build_estimator(found), like=like)


@pytest.mark.parametrize(
    "key",
    ["train.group_size", "train.groups_per_step", "train.epochs", "evaluation.sets.all.samples", "engine.launch.replicas"],
)
def test_absurd_number_is_refused(tmp_path: Path, key: str) -> None:
    engine = ["engine={kind: vllm, num_slots: null}"] if key.startswith("engine") else []
    with pytest.raises(ConfigError, match=rf"^{key} is 1000000000 .*at most \d+$"):
        tiny_source(tmp_path, *engine, f"{key}=1000000000")


def test_estimator_gets_its_options(tmp_path: Path) -> None:
    gae = ("algorithm.advantage=gae", "algorithm.advantage.lam=0.9")
    expected = {"lam": 0.9, "gamma": 0.8, "whiten_batch": True}
    assert options(tmp_path, *gae, "algorithm.advantage={gamma: 0.8}") == expected
    assert options(tmp_path, "algorithm.advantage=gdpo", "algorithm.advantage.norm_by_std=false") == {
        "norm_by_std": False,
        "weights": {"outcome": 1.0, "tool_step": 1.0},
        "whiten_batch": True,
    }


def check(where: build.ConfigSource) -> None:
    check_algorithm(where)
    build.build_estimator(where)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.group_size=1"], r"train\.group_size is 1 .*'grpo'"),
        (["algorithm.advantage={norm_by_sdt: false}"], r"'algorithm\.advantage\.norm_by_std'"),
        (["algorithm.advantage=return_to_og"], "'return_to_go'"),
        (["algorithm.kl={coef: 0.1, estimator: k4}"], r"algorithm\.kl\.estimator.*'k4'"),
        (["algorithm.loss.distill={teacher: self, estimator: k4}"], r"algorithm\.loss\.distill\.estimator.*'k4'"),
        (["algorithm.loss={clip_low: 5}"], r"algorithm\.loss.* 5"),
        (["algorithm.advantage=gdpo", "algorithm.kl={place: reward, coef: 0.1}"], r"kl\.place to loss"),
        (["algorithm.advantage=grpo_passk", "algorithm.advantage={k: 3}"], r"k is 3 in groups of 3 .*from 1 to 2"),
        (["algorithm.advantage=grpo_passk", "algorithm.advantage={k: 4}"], r"k is 4 in groups of 3"),
    ],
)
def test_credit_that_cannot_work_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(tiny_source(tmp_path, *overrides))


def test_turn_scores_that_nothing_gives_are_refused(tmp_path: Path) -> None:
    bare = ("algorithm.advantage=return_to_go", "rollout.tools.functions=[]", "rollout.interactions=[]")
    (tmp_path / "mine.py").write_text(SCHEDULERS)
    for name in ("single_turn", "mine.py:ScoresNone", f"{FOLDER}/react.py:React"):
        where = tiny_source(tmp_path, *bare, f"rollout.scheduler={name}")
        refuses(
            lambda where=where: require_scores(build.build_parts(where), build.build_estimator(where)),
            ConfigError,
            "'return_to_go' ",
            repr(name),
        )
    coach = "rollout.interactions=[{name: coach, class_name: 'plugins.py:Coach'}]"
    for more in ([coach], ["rollout.scheduler=gym"], ["rollout.scheduler=mine.py:SaysNothing"]):
        where = tiny_source(tmp_path, *bare, *more)
        require_scores(build.build_parts(where), build.build_estimator(where))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["algorithm.advantage=rloo"], True),
        (["algorithm.advantage=return_to_go"], False),
        (["algorithm.advantage=gae"], False),
        (["algorithm.kl={place: reward, coef: 0.1}"], False),
        (["algorithm.drop_zero_variance=false"], False),
        (["algorithm.advantage=gae", "algorithm.drop_zero_variance=true"], True),
    ],
)
def test_equal_groups_are_dropped_where_nothing_is_lost(tmp_path: Path, overrides: list[str], expected: bool) -> None:
    where = tiny_source(tmp_path, *overrides)
    assert drops_zero_variance(where, build.build_estimator(where)) is expected


def test_verl_estimator_sees_the_batch(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def fn(token_level_rewards, response_mask, values=None, config=None): ...\n")
    traits = traits_of(build.build_estimator(tiny_source(tmp_path, "algorithm.advantage=own.py:fn")))
    assert traits.scope == "batch" and traits.needs_values


def test_unused_critic_is_refused(tmp_path: Path) -> None:
    where = tiny_source(tmp_path, "algorithm.critic.warmup=2")
    parts = build.build_parts(where)
    with pytest.raises(ConfigError, match="'grpo'"):
        build.build_trainer(
            parts, build.build_run_tasks(where), folder=tmp_path, observer=RunObserver(tmp_path, total_steps=1)
        )


def test_schedules_end_with_a_run_whose_critic_warms_up(tmp_path: Path) -> None:
    settings = ["train.steps=10", "train.minibatches=2", "train.optim.schedule=cosine", "algorithm.advantage=gae"]
    where = tiny_source(tmp_path, *settings, "algorithm.critic={warmup: 4, optim: {schedule: cosine}}")
    trainer = build.build_trainer(
        build.build_parts(where),
        build.build_run_tasks(where),
        folder=tmp_path,
        observer=RunObserver(tmp_path, total_steps=1),
    )
    updates = [
        network.backend.optimizer.settings.schedule.total_steps  # type: ignore[union-attr, attr-defined]
        for network in (trainer.policy, trainer.update.critic)
    ]
    assert updates == [12, 20], "the policy is trained in six steps, the critic in ten"


def test_critic_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny_model(200, hidden=16, layers=1).save_pretrained(tmp_path / "other")
    where = tiny_source(tmp_path, "algorithm.advantage=gae", "algorithm.critic.path=other")
    refuses(
        lambda: build_critic(build.build_parts(where), build.build_estimator(where)),
        ConfigError,
        "critic.path is 'other'",
        " 200",
    )
