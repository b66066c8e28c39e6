"""Lookahead: a turn's score is the mean of its judged continuations, which are trained only if configured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyturn.batching.samples import to_samples
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.task import InteractionRef
from polyturn.core.trajectory import SpanSource, Trajectory, TrajectoryGroup
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.simulated_user import SimulatedUser
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from support.example_schedulers import Lookahead
from support.refusals import refuses
from support.services import LocalService, serve


class Asker(BaseInteraction):
    """Asks three questions."""

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        number = sum(m["role"] == "user" for m in messages)
        return number >= 3, f"Question {number}?", 0.0, {}


def judge_by_length(asked: dict[str, Any], number: int) -> dict[str, Any]:
    """Score a conversation by its number of messages, in tenths."""
    talk = json.loads(asked["messages"][1]["content"])["conversation"]
    return {"choices": [{"message": {"role": "assistant", "content": str(len(talk) / 10)}}]}


async def looked(
    server: LocalService, *, rewards: Any = None, limits: Limits | None = None, on_start: Any = None, **kwargs: Any
) -> Trajectory:
    scheduler = Lookahead(judge={"base_url": server.url, "model": "j"}, **kwargs)
    said = iter(range(1000))
    context = scripted_context(
        lambda request: f"Answer {next(said)}.",
        interactions={"asker": Asker({})},
        scheduler=scheduler,
        limits=limits or Limits(max_turns=6),
    )
    scoring = SimpleNamespace(scores_turns=True, gives_reward=True)
    context = dataclasses.replace(context, rewarder=RewardRouter(function=rewards, scheduler=scoring))
    one = dataclasses.replace(task("Hello.", data_source=None), interaction=InteractionRef(name="asker"))
    return await run_episode(context, one, id="e", seed=5, on_start=on_start)


async def test_score_of_a_turn_is_the_mean_of_its_continuations() -> None:
    async with serve(judge_by_length) as server:
        found = await looked(server, num_repeat_rollouts=2, window=1)
    assert found.error is None
    # prompt, answer, question, answer, question, answer, question: three turns, the third drew the end.
    assert [len(found.turns), len(server.asked)] == [3, 6]
    # From turn 0: question, one more turn, and its question: 5 messages. From turn 1: 7; the last ends with its question.
    assert [t.scores["lookahead"] for t in found.turns] == pytest.approx([0.5, 0.7, 0.6 + 0.1])
    assert found.turns[0].info["lookahead"]["scores"] == [0.5, 0.5]
    assert found.reward.total == pytest.approx((0.5 + 0.7 + 0.7) / 3)
    assert [t.observation[0].text for t in found.turns] == ["Question 1?", "Question 2?", "Question 3?"]
    assert [t.index for t in found.turns] == [0, 1, 2], "the conversation goes as it would without"


async def test_continuations_are_recorded_and_not_trained() -> None:
    live: list[Episode] = []
    async with serve(judge_by_length) as server:
        found = await looked(server, num_repeat_rollouts=2, window=1, on_start=live.append)
    assert live[0].resources.num_sampled == sum(int(s.sampled_mask.sum()) for s in found.segments)
    main = [s for s in found.segments if s.agent == "assistant"]
    asides = [s for s in found.segments if s.agent == "lookahead"]
    assert len(main) == 1
    assert main[0].parent is None
    assert main[0].loss_weights.any()
    assert len(asides) == 4, "two of each turn that something followed"
    for segment in asides:
        root: Any = segment
        while root.parent is not None:  # twins branch off together, or behind their common question
            root = found.segments[root.parent.segment]
        assert root is main[0]
        assert any(s.source is SpanSource.SAMPLED for s in segment.spans) and not segment.loss_weights.any()
    samples = to_samples(TrajectoryGroup(id="g", task=found.task, trajectories=(found,)), temperature=1.0)
    assert sum(s.num_weighted > 0 for s in samples) == 1
    assert found.metrics["num_asides"] == 4 and found.metrics["num_forks"] == 6
    assert [m.text for m in found.messages].count("Answer 0.") == 1


async def test_window_of_zero_judges_the_reaction_alone() -> None:
    async with serve(judge_by_length) as server:
        found = await looked(server, num_repeat_rollouts=1, window=0)
    assert [t.scores["lookahead"] for t in found.turns] == pytest.approx([0.3, 0.5, 0.7])
    assert "num_asides" not in found.metrics


async def test_continuations_are_trained_with_their_own_score() -> None:
    async with serve(judge_by_length) as server:
        found = await looked(server, num_repeat_rollouts=1, window=1, train_forks=True)
    own = [t for t in found.turns if not t.info.get("is_continuation")]
    more = [t for t in found.turns if t.info.get("is_continuation")]
    assert len(own) == 3 and len(more) == 2
    assert sorted(t.scores["lookahead"] for t in more) == pytest.approx([0.5, 0.7])
    assert all(s.loss_weights.any() for s in found.segments)
    sampled = sum(int(s.sampled_mask.sum()) for s in found.segments)
    assert sum(int(np.count_nonzero(s.loss_weights)) for s in found.segments) == sampled


async def test_reward_can_be_left_to_the_run() -> None:
    def answered(trajectory: Trajectory) -> float:
        return float(trajectory.turns[-1].message.text == "Answer 2.")

    async with serve(judge_by_length) as server:
        found = await looked(server, num_repeat_rollouts=1, reward="run", rewards=answered)
    assert found.reward.components["outcome"] == 1.0


async def test_limit_of_the_run_bounds_continuations() -> None:
    async with serve(judge_by_length) as server:
        found = await looked(server, num_repeat_rollouts=1, window=5, limits=Limits(max_turns=2))
    assert len(found.turns) == 2 and found.metrics["num_asides"] == 1


async def test_judge_without_a_score_fails_the_trajectory() -> None:
    async with serve(lambda asked, number: {"choices": [{"message": {"content": "Fine."}}]}) as server:
        found = await looked(server, num_repeat_rollouts=1)
    assert found.is_failed and "judge returned no valid score" in str(found.error)


async def test_continuations_differ_and_a_second_run_asks_nothing(tmp_path: Path) -> None:
    def answer(asked: dict[str, Any], number: int) -> Any:
        if asked["model"] == "j":
            return judge_by_length(asked, number)
        return {"choices": [{"message": {"role": "assistant", "content": f"And {asked['seed']}?"}}]}

    async def run(server: LocalService) -> Trajectory:
        place = {"base_url": server.url, "cache": str(tmp_path / "answers.sqlite")}
        context = scripted_context(
            lambda request: f"Answer {len(request.prompt_ids)}.",
            interactions={"user": SimulatedUser({"name": "user", "model": "u", "max_user_turns": 3, **place})},
            scheduler=Lookahead(judge={"model": "j", **place}, num_repeat_rollouts=3, window=1),
        )
        ref = InteractionRef(name="user", kwargs={"name": "user", "goal": "Eat."})
        return await run_episode(context, dataclasses.replace(task(data_source=None), interaction=ref), id="e", seed=5)

    async with serve(answer) as server:
        first = await run(server)
        asked = [a for a in server.asked if a["model"] == "u"]
        behind_turn_0 = [a["seed"] for a in asked if len(a["messages"]) == 4]
        assert first.error is None and len(behind_turn_0) == 4 == len(set(behind_turn_0)), "its own and three continuations"
        num_asked = len(server.asked)
        second = await run(server)
        assert len(server.asked) == num_asked
    assert first.messages == second.messages
    assert [t.scores for t in first.turns] == [t.scores for t in second.turns]


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"num_repeat_rollouts": 0}, "num_repeat_rollouts is 0"),
        ({"window": -1}, "window is -1"),
        ({"reward": "turn"}, "'turn'.*'turns'"),
        ({"reward": "run", "train_forks": True}, "reward"),
        ({"judge": {"model": "j"}}, "base_url"),
        ({"judge": "j"}, "'j'"),
    ],
)
def test_wrong_arguments_and_rows_are_refused(kwargs: dict[str, Any], key: str) -> None:
    right = {"judge": {"base_url": "http://h/v1", "model": "j"}}
    with pytest.raises(ConfigError, match=key):
        Lookahead(**{**right, **kwargs})
    refuses(lambda: Lookahead(**right).check_task(task()), DataError, "interaction")
