"""Games of several players: the prompts and rewards of each, and the advantages of their tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyturn.algorithms.advantages import assign_advantages, bind_estimator, grpo, return_to_go
from polyturn.batching.filters import has_signal
from polyturn.batching.samples import to_samples
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.environments.base import ENV, Adapter, at_stage
from polyturn.environments.players import moves_in, seat_players
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.environments.scripted import play
from polyturn.rollout.env import Seated
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, tiny_codec

MADE: list[int] = []
CLOSED: list[int] = []


class HighCard:
    """Each of two players names a number; the higher one wins. Player 1 is told what player 0 named."""

    def __init__(self, num_rounds: int = 1) -> None:
        self.num_rounds = num_rounds

    def reset(self, *, seed: int) -> Seated:
        self.named: list[int] = []
        MADE.append(1)
        return Seated(seat=0, observation="You are player 0. Say '[1]' or '[2]'.")

    def step(self, action: str) -> Seated:
        found = re.search(r"\d", action)
        self.named.append(int(found[0]) if found else 0)
        done, seat = len(self.named) == 2 * self.num_rounds, len(self.named) % 2
        if seat == 1:
            text = f"Player 0 said {self.named[-1]}. Say '[1]' or '[2]'."
            return Seated(seat=1, observation=text if len(self.named) > 1 else f"You are player 1. {text}")
        difference = float(np.sign(self.named[-2] - self.named[-1]))
        rewards = {0: difference, 1: -difference}
        return Seated(seat=0, observation=f"Player 1 said {self.named[-1]}.", rewards=rewards, terminated=done)

    def close(self) -> None:
        CLOSED.append(1)


class Cards(Adapter):
    num_seats = 2

    def make(self) -> HighCard:
        return HighCard(**self.kwargs)


def adapter(**kwargs: Any) -> Adapter:
    return Cards("cards:High", "High", kwargs)


async def game(*actions: str, seats: Sequence[str | Mapping[str, Any]] = (), seed: int = 0, **kwargs: Any) -> Trajectory:
    return (await play(adapter(**kwargs), seed=seed, actions=actions, seats=seats)).trajectory


def shown(trajectory: Trajectory, agent: str) -> str:
    return "".join(str(tiny_codec().decode(s.token_ids)) for s in trajectory.segments if s.agent == agent)


async def test_each_seat_is_an_agent_with_its_own_history() -> None:
    t = await game("[2]", "[1]", "[1]", "[2]", num_rounds=2)
    assert [s.agent for s in t.segments] == ["seat 0", "seat 1"]
    assert [t.agent_of(turn) for turn in t.turns] == ["seat 0", "seat 1", "seat 0", "seat 1"]
    assert "You are player 0" in shown(t, "seat 0") and "You are player 1" not in shown(t, "seat 0")
    assert "You are player 1" in shown(t, "seat 1") and "Player 0 said 2" in shown(t, "seat 1")
    assert [int(n) for n in np.unique(t.segments[1].turn_ids)] == [-1, 1, 3]
    sampled = sum(int(s.sampled_mask.sum()) for s in t.segments)
    assert sampled == sum(len(t.span(ref)) for turn in t.turns for ref in turn.spans[:1])


async def test_reward_is_on_its_players_latest_turn() -> None:
    t = await game("[2]", "[1]")
    assert t.stop_reason is StopReason.ENV_DONE and t.reward is not None
    assert [turn.scores["env"] for turn in t.turns] == [1.0, -1.0]
    assert t.reward.agents == {"seat 0": 1.0, "seat 1": -1.0} and t.reward.total == 0.0
    assert t.reward.components["agent/seat 1"] == -1.0
    assert t.turns[-1].info["earned"] == {"0": 1.0, "1": -1.0}


async def group(*games: Sequence[str], **kwargs: Any) -> TrajectoryGroup:
    played = [await game(*actions, **kwargs) for actions in games]
    found = [dataclasses.replace(t, id=f"t{i}") for i, t in enumerate(played)]
    return TrajectoryGroup(id="g", task=found[0].task, trajectories=tuple(found))


async def test_winner_and_loser_have_opposite_advantages() -> None:
    g = await group(["[2]", "[1]"], ["[1]", "[2]"], ["[2]", "[1]"], ["[2]", "[2]"])
    assert [t.reward.total for t in g.trajectories if t.reward] == [0.0] * 4 and has_signal(g)
    samples = assign_advantages([g], to_samples(g, temperature=1.0), estimator=grpo)
    by_seat: dict[str, list[float]] = {}
    for sample in samples:
        trajectory = next(t for t in g.trajectories if t.id == sample.id.trajectory)
        assert sample.advantages is not None
        (value,) = {float(a) for a in sample.advantages[sample.loss_weights != 0]}
        by_seat.setdefault(trajectory.segments[sample.id.segment].agent, []).append(value)
        assert sample.reward == trajectory.reward.agents[trajectory.segments[sample.id.segment].agent]  # type: ignore[union-attr]
    rewards = np.array([1.0, -1.0, 1.0, 0.0])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert by_seat["seat 0"] == pytest.approx(wanted.tolist(), rel=1e-5)
    assert by_seat["seat 1"] == pytest.approx((-wanted).tolist(), rel=1e-5)


async def test_turns_of_each_player_are_counted_apart() -> None:
    g = await group(["[2]", "[1]", "[1]", "[2]"], ["[1]", "[1]", "[2]", "[1]"], num_rounds=2)
    estimator = bind_estimator(return_to_go, offered={}, kwargs={"baseline": False, "gamma": 0.5})
    samples = assign_advantages([g], to_samples(g, temperature=1.0), estimator=estimator)
    first = {s.id.segment: s for s in samples if s.id.trajectory == "t0"}
    for segment, (won, lost) in {0: (1.0, -1.0), 1: (-1.0, 1.0)}.items():
        sample = first[segment]
        assert sample.advantages is not None
        turns = sample.turn_ids[sample.loss_weights != 0]
        values = sample.advantages[sample.loss_weights != 0]
        assert sorted(set(turns.tolist())) == [segment, segment + 2]  # the record counts all turns of the trajectory
        assert values[0] == won + 0.5 * lost and values[-1] == lost


async def test_random_opponent_moves_and_is_not_trained() -> None:
    t = await game("[2]", seats=["policy", "random"])
    assert t.error is None and [s.agent for s in t.segments] == ["seat 0"]
    assert t.reward is not None and t.reward.total in (0.0, 1.0) and not t.reward.agents
    assert t.turns[-1].info["earned"]["0"] == t.reward.total


async def test_opponent_begins_before_the_policy_is_asked() -> None:
    t = await game("[2]", seats=["random", "policy"])
    assert [s.agent for s in t.segments] == ["seat 1"]
    assert "Player 0 said" in t.task.prompt[0].text and t.turns[0].info["seat"] == 1


async def test_game_over_before_the_policy_acts_has_no_turns() -> None:
    class Ended(HighCard):
        def step(self, action: str) -> Seated:
            return Seated(seat=1, observation="Over.", rewards={0: 1.0, 1: -1.0}, terminated=True)

    class Endings(Cards):
        def make(self) -> HighCard:
            return Ended()

    t = (await play(Endings("cards:E", "E", {}), seed=0, actions=["[1]"], seats=["random", "policy"])).trajectory
    assert t.stop_reason is StopReason.ENV_DONE and not t.turns and t.reward is not None and t.error is None
    assert to_samples(TrajectoryGroup(id="g", task=t.task, trajectories=(t,)), temperature=1.0) == []


async def test_players_change_seats_with_the_seed() -> None:
    seats = [(await game("[2]", seats=["policy", "random"], seed=seed)).turns[0].info["seat"] for seed in range(4)]
    assert seats == [0, 1, 0, 1]
    fixed = await play(adapter(), seed=1, actions=["[2]"], seats=["policy", "random"], rotates=False)
    assert fixed.trajectory.turns[0].info["seat"] == 0


async def test_opponent_may_be_a_function_or_class_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "opponents.py").write_text(
        "def two(observation):\n    assert 'You are player 1' in observation\n    return '[2]'\n"
        "class Ones:\n    def __call__(self, observation):\n        return '[1]'\n"
        "class Seeded:\n    def __init__(self, seed):\n        self.seed = seed\n"
        "    def __call__(self, observation):\n        return '[1]' if self.seed else '[2]'\n"
        "def silent(observation):\n    return None\n"
    )
    made = Cards("cards:High", "High", {}, base=tmp_path)
    lost = await play(made, seed=0, actions=["[1]"], seats=["policy", "opponents.py:two"])
    won = await play(made, seed=0, actions=["[2]"], seats=["policy", "opponents.py:Ones"])
    assert (lost.reward, won.reward) == (-1.0, 1.0)
    assert (await play(made, seed=0, actions=["[2]"], seats=["policy", "opponents.py:Seeded"])).reward == 1.0
    failed = await play(made, seed=0, actions=["[2]"], seats=["policy", "opponents.py:silent"])
    assert failed.trajectory.is_failed and "return a text" in str(failed.trajectory.error)


async def test_opponent_behind_an_endpoint_sees_its_own_side() -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "[2]"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        seat = {"url": str(server.make_url("/v1")), "model": "m", "system": "Win.", "temperature": 0.5}
        t = await game("[1]", "[2]", seats=["policy", seat], num_rounds=2)
    assert t.error is None and t.reward is not None and t.reward.total == -1.0
    assert [m["role"] for m in asked[-1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[0]["temperature"] == 0.5 and "Player 0 said 1" in asked[0]["messages"][-1]["content"]


async def test_environment_is_closed_once_however_it_ends() -> None:
    CLOSED.clear()
    MADE.clear()
    await game("[2]", "[1]")
    await game("[2]")  # the script ends: the engine fails
    assert CLOSED == [1, 1]
    stage = Stage(adapter=adapter(), players=(None, None))
    context = scripted_context(lambda request: "[1]", scheduler=EnvScheduler({"cards:High": stage}), latency_s=3600.0)
    task = at_stage(split="train", score="sum")(adapter().tasks(split="train", seeds=range(1))[0])
    running = asyncio.create_task(run_episode(context, task, id="cancelled"))
    while len(MADE) < 3:  # noqa: ASYNC110 (a thread makes it)
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert CLOSED == [1, 1, 1]


@pytest.mark.parametrize(("forfeit", "worth"), [(None, -1.0), (0.0, 0.0), (-3.0, -3.0)])
async def test_player_stopped_by_a_limit_forfeits(forfeit: float | None, worth: float) -> None:
    nine = adapter(num_rounds=9)
    played = await play(nine, seed=0, actions=["[2]"] * 10, limits=Limits(max_turns=2), forfeit=forfeit)
    assert played.trajectory.stop_reason is StopReason.MAX_TURNS and len(played.trajectory.turns) == 4
    assert played.earned == {"seat 0": worth, "seat 1": 0.0}


def test_offered_moves_are_those_of_the_last_line() -> None:
    assert moves_in("Say '[9]', for example.\nAvailable Moves: '[0]', '[4]'\nGo.") == ["[0]", "[4]"]
    assert moves_in("nothing") == []


async def test_evaluation_may_have_other_opponents() -> None:
    stage = Stage(
        adapter=adapter(),
        players=seat_players([], num_seats=2, name="x", base=None),
        eval_players=seat_players(["policy", "random"], num_seats=2, name="x", base=None),
        rotates=False,
    )
    tasks = adapter().tasks(split="eval", seeds=range(3, 4))
    for split, agents in (("train", {"seat 0", "seat 1"}), ("eval", {"seat 0"})):
        context = scripted_context(lambda request: "[1]", scheduler=EnvScheduler({"cards:High": stage}))
        t = await run_episode(context, at_stage(split=split, score="sum")(tasks[0]), id=split)
        assert {s.agent for s in t.segments} == agents and t.task.extra[ENV]["split"] == split
