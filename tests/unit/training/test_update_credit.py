"""A step around the estimator: values before advantages, KL in the rewards, the critic's steps, greedy members."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from polyturn.algorithms.advantages import advantages, bind_estimator, declare
from polyturn.algorithms.options import KlOptions
from polyturn.core.errors import CheckpointError, TrainingError
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.training.critic import CriticSettings, local_critic
from polyturn.training.optim import OptimSettings
from polyturn.training.options import TrainOptions
from polyturn.training.policy import local_policy
from polyturn.training.reward_kl import RewardKl
from polyturn.training.update import Revised, Update, UpdateSettings
from support.models import tiny_model
from support.refusals import refuses
from support.states import stored


def played(*, has_baseline: bool = False, size: int = 4, num_groups: int = 2) -> list[TrajectoryGroup]:
    """Return groups of episodes of which those of even members are right."""

    def says(request: Any) -> str:
        name = request.session_id.rpartition("/")[2].partition("#")[0]
        return "#### 4" if name == "greedy" or int(name) % 2 == 0 else "#### 5, or so"

    context = scripted_context(says)

    async def go() -> list[TrajectoryGroup]:
        pool = RolloutPool(context, max_concurrent=8)
        specs = [
            GroupSpec(id=f"g{i}", task=task(id=f"t{i}"), size=size, has_baseline=has_baseline) for i in range(num_groups)
        ]
        return [await pool.run_one(spec) for spec in specs]

    return asyncio.run(go())


def update(
    name: str,
    *,
    critic: bool = False,
    warmup: int = 0,
    coef: float = 0.0,
    target: float | None = None,
    minibatches: int = 1,
    min_members: int = 1,
    **kw: Any,
) -> Update:
    vocab = len(tiny_codec().tokenizer)
    model = tiny_model(vocab, hidden=16)
    optim = OptimSettings(lr=1e-2)
    return Update(
        local_policy(model, optim=optim, reference=coef > 0),
        estimator=bind_estimator(advantages.resolve(name), offered={}, kwargs=kw),
        settings=UpdateSettings(
            drop_zero_variance=False, train=TrainOptions(minibatches=minibatches), min_members=min_members
        ),
        critic=local_critic(model, optim=optim, settings=CriticSettings(warmup=warmup)) if critic else None,
        reward_kl=RewardKl(KlOptions(place="reward", coef=coef, target=target)) if coef else None,
    )


def parameters(made: Update) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.policy.backend.model.parameters()]).clone()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["gae", "turn_gae", "bilevel_gae"])
def test_critic_is_trained_beside_the_policy(name: str) -> None:
    made, groups = update(name, critic=True, minibatches=2), played()
    first = made.run(groups, step=0).metrics
    assert first["critic/value"] == 0 and first["critic/value_loss"] > 0 and first["critic/explained_variance"] == 0
    for step in range(1, 12):
        last = made.run(groups, step=step).metrics
    assert last["critic/value_loss"] < first["critic/value_loss"]
    # Before its one turn all episodes of a task are in the same state, so their values are equal.
    assert last["critic/explained_variance"] > (0.1 if name != "turn_gae" else -0.1)


def test_only_the_critic_moves_in_its_warmup() -> None:
    made, groups = update("gae", critic=True, warmup=2), played()
    before = parameters(made)
    for step in range(2):
        assert "loss/total" not in made.run(groups, step=step).metrics
    assert torch.equal(before, parameters(made))
    assert "loss/total" in made.run(groups, step=2).metrics and not torch.equal(before, parameters(made))


def test_kl_penalty_reaches_the_advantages() -> None:
    made, groups = update("grpo", coef=10.0), played()
    first = made.run(groups, step=0).metrics
    assert first["policy/kl_in_reward"] == pytest.approx(0, abs=1e-6), "policy and reference are equal at first"
    assert first["policy/kl_in_reward_coef"] == 10
    second = made.run(groups, step=1)
    assert second.metrics["policy/kl_in_reward"] != 0


def test_step_credited_twice_adapts_the_penalty_once() -> None:
    made, groups = update("grpo", coef=0.1, target=0.5), played()
    made.revise = lambda step, groups, samples, metrics: Revised(groups=list(groups))
    assert made.run(groups, step=0).metrics["policy/kl_in_reward_coef"] == 0.1
    once = 0.1 * (1 - 0.2 * 8 / 10_000)  # 8 trajectories of a KL of 0, of a horizon of 10,000
    assert made.run(groups, step=1).metrics["policy/kl_in_reward_coef"] == pytest.approx(once, rel=1e-7)


def checkpoint(made: Any, folder: Path) -> Path:
    for name, one in made.stored.items():
        stored(one, folder / name)
    return folder


def test_update_resumes_with_its_critic(tmp_path: Path) -> None:
    made, groups = update("gae", critic=True, coef=0.1), played()
    made.run(groups, step=0)
    again = update("gae", critic=True, coef=0.1)
    again.load_state_dict(made.state_dict())
    again.load(checkpoint(made, tmp_path / "one"))
    a, b = made.run(groups, step=1).metrics, again.run(groups, step=1).metrics
    kinds = ("critic/", "policy/", "loss/")
    assert {k: v for k, v in a.items() if k.startswith(kinds)} == {k: v for k, v in b.items() if k.startswith(kinds)}
    refuses(
        lambda: again.load(checkpoint(update("grpo"), tmp_path / "other")),
        CheckpointError,
        "has no critic and this run trains one",
    )


def test_greedy_member_is_never_trained() -> None:
    groups = played(has_baseline=True)
    assert all(g.baseline is not None and len(g.trajectories) == 4 for g in groups)
    result = update("remax").run(groups, step=0)
    assert result.metrics["buffer/samples"] == 8
    made = {t.id: [] for g in groups for t in g.trajectories}
    assert set(result.trained) <= set(made)


def test_step_may_lack_scores_after_one_that_had_some() -> None:
    def scored(score: float | None) -> list[TrajectoryGroup]:
        scores = {} if score is None else {"env": score}
        return [
            dataclasses.replace(
                g,
                trajectories=tuple(
                    dataclasses.replace(t, turns=tuple(dataclasses.replace(turn, scores=scores) for turn in t.turns))
                    for t in g.trajectories
                ),
            )
            for g in played()
        ]

    made = update("return_to_go")
    refuses(lambda: made.run(scored(None), step=0), TrainingError, "needs scores of turns")
    made.run(scored(0.5), step=0)
    assert made.run(scored(None), step=1).metrics["loss/grad_norm"] > 0
    again = update("return_to_go")
    again.load_state_dict(made.state_dict())
    assert again.run(scored(None), step=2).metrics["loss/grad_norm"] > 0


def but_one_failed(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    def failed(trajectory: Trajectory) -> Trajectory:
        return dataclasses.replace(trajectory, stop_reason=StopReason.ERROR, reward=None, error="the tool is down")

    return [
        dataclasses.replace(g, trajectories=(g.trajectories[0], *(failed(t) for t in g.trajectories[1:]))) for g in groups
    ]


def test_last_member_of_a_group_moves_no_weight() -> None:
    made, groups = update("grpo"), but_one_failed(played())
    before = parameters(made)
    result = made.run(groups, step=0)
    assert torch.equal(parameters(made), before)
    assert result.metrics["buffer/groups_one_left"] == 2 and result.metrics["tokens/dropped_one_left"] > 0
    assert {t.dropped for t in result.trained.values()} == {"failed", "one_left"}
    assert not made.has_signal(groups[0]), "another task is tried in its place"


def test_group_too_small_for_its_estimator_is_recorded() -> None:
    made = update("reinforce_plus_plus", min_members=3)
    groups = [
        dataclasses.replace(g, trajectories=(*g.trajectories[:2], *but_one_failed([g])[0].trajectories[2:]))
        for g in played()
    ]
    result = made.run(groups, step=0)
    assert result.metrics["buffer/groups_one_left"] == 2
    assert [t.dropped for t in result.trained.values()] == ["one_left", "one_left", "failed", "failed"] * 2


def test_step_that_fails_after_its_optimizer_step_is_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise TrainingError("its records cannot be made")

    made = update("grpo")
    monkeypatch.setattr("polyturn.training.update.trained_of", fails)
    refuses(lambda: made.run(played(), step=0), TrainingError, "its records")
    assert made.is_half_done


def test_state_of_an_estimator_survives_a_checkpoint() -> None:
    groups, whole, resumed = played(), update("rae", decay=0.5), update("rae", decay=0.5)
    whole.run(groups, step=0)
    resumed.load_state_dict(whole.state_dict())
    ours, theirs, anew = (
        made.run(groups, step=1).metrics["policy/advantage"] for made in (whole, resumed, update("rae", decay=0.5))
    )
    assert ours == theirs != anew


def test_step_that_is_credited_twice_moves_the_state_once() -> None:
    once, twice, groups = update("rae"), update("rae"), played()
    twice.revise = lambda step, groups, samples, metrics: Revised(groups=list(groups))
    for made in (once, twice):
        made.run(groups, step=0)
    assert once.state_dict()["estimator"] == twice.state_dict()["estimator"] != {}


def test_new_groups_and_new_samples_are_refused_together() -> None:
    made = update("grpo")
    before = parameters(made)
    made.revise = lambda step, groups, samples, metrics: Revised(groups, samples)
    refuses(lambda: made.run(played(), step=0), TrainingError, "step 1")
    assert torch.equal(parameters(made), before)


def test_revision_without_changes_is_the_step_itself() -> None:
    plain, revised, groups = update("grpo"), update("grpo"), played()
    revised.revise = lambda step, groups, samples, metrics: Revised()
    for made in (plain, revised):
        made.run(groups, step=0)
    assert torch.equal(parameters(plain), parameters(revised))


def test_step_that_fails_leaves_the_state() -> None:
    @declare(keeps_state=True)
    def breaks(rewards_G: Any, samples_G: Any, *, state: dict[str, Any]) -> Any:
        state["groups"] = state.get("groups", 0) + 1
        raise ValueError(f"group {state['groups']}")

    made = update("grpo")
    made.estimator = breaks
    refuses(lambda: made.run(played(), step=0), TrainingError, "group 1")
    assert made.state_dict()["estimator"] == {}
