"""A seat played by a further policy of the run: its prompts, its actions, and its record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, EngineError, UnknownNameError
from polyturn.core.messages import Message
from polyturn.core.trajectory import Trajectory
from polyturn.environments.base import Adapter, at_stage
from polyturn.environments.players import PlayerSlot, Recalls, seat_players
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.partners.policy import FrozenPolicy
from polyturn.rollout.env import Seated
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, tiny_codec
from support.policies import Speaker
from support.refusals import refuses


class Race:
    """Two players name numbers in turn, two each; the higher sum wins. Other text counts as 0."""

    def reset(self, *, seed: int) -> Seated:
        self.named: list[int] = []
        return Seated(seat=0, observation="You are 0. Begin.")

    def step(self, action: str) -> Seated:
        self.named.append(int(action) if action.isdigit() else 0)
        done, seat = len(self.named) == 4, len(self.named) % 2
        won = (sum(self.named[::2]) > sum(self.named[1::2])) * 2.0 - 1.0
        rewards = {0: won, 1: -won} if done else {}
        return Seated(seat=seat, observation=f"The other said {self.named[-1]}.", rewards=rewards, terminated=done)

    def close(self) -> None: ...


class Races(Adapter):
    num_seats = 2
    instructions = "Say a number."

    def make(self) -> Race:
        return Race()


class Opponent(Speaker):
    """A player of the run's policy `past`, whose weights are of version 12."""

    def __init__(self, *says: str | Exception) -> None:
        super().__init__(*says, name="past", version=12, max_tokens=64, max_context=512)


async def race(opponent: FrozenPolicy, *says: str, seats: Sequence[Any] = ("policy", "past"), **stage: Any) -> Trajectory:
    players = seat_players(seats, num_seats=2, name="races:Race", base=None, policies={"past": opponent})
    adapter = Races("races:Race", "Race", {})
    made = Stage(adapter=adapter, players=players, rotates=False, **stage)
    context = scripted_context(list(says), scheduler=EnvScheduler({"races:Race": made}))
    task = at_stage(split="train", score="sum")(adapter.tasks(split="train", seeds=range(1))[0])
    return await run_episode(context, task, id="e")


async def test_opponent_sees_what_the_policy_would_see() -> None:
    opponent = Opponent("2", "4")
    t = await race(opponent, "1", "3")
    assert t.error is None and t.reward is not None and t.reward.total == -1.0
    first, second = opponent.shown
    assert first.count("<|im_start|>user") == 1 and "Say a number." in first and "The other said 1." in first
    assert second.startswith(first + "2") and "The other said 3." in second
    shown = "".join(str(tiny_codec().decode(s.token_ids)) for s in t.segments)
    assert "Say a number." in shown and "The other said 2." in shown


async def test_opponents_tokens_are_observations_and_its_version_is_recorded() -> None:
    t = await race(Opponent("2", "4"), "1", "3")
    assert {s.agent for s in t.segments} == {"seat 0"}
    sampled = [str(tiny_codec().decode(t.span(ref).ids)) for turn in t.turns for ref in turn.spans[:1]]
    assert [text.removesuffix("<|im_end|>") for text in sampled] == ["1", "3"]
    assert t.turns[-1].info["opponents"] == {"1": {"policy": "past", "version": 12}}


async def test_opponent_that_begins_sees_the_prompt() -> None:
    opponent = Opponent("9", "9")
    t = await race(opponent, "1", "3", seats=("past", "policy"))
    assert "Say a number." in opponent.shown[0] and "You are 0. Begin." in opponent.shown[0]
    assert t.reward is not None and t.reward.total == -1.0


async def test_opponents_action_is_not_looked_for_in_its_reasoning() -> None:
    opponent = Opponent("<think>Not [1]!</think>I say [2].", "I think [1], no, [4].")
    t = await race(opponent, "[1]", "[3]", action=re.compile(r"\[(\d)\]"))
    assert t.reward is not None and t.reward.total == -1.0
    assert "I say [2]." in opponent.shown[1]


async def test_opponents_conversation_is_one_session_of_the_game() -> None:
    opponent = Opponent("2", "4")
    await race(opponent, "1", "3")
    sessions = {asked.session_id for asked in opponent.asked}
    assert sessions == {"e:seat 1"} and opponent.engine.ended_sessions == ["e:seat 1"]  # type: ignore[attr-defined]
    assert len({asked.sampling.seed for asked in opponent.asked}) == 2
    again = Opponent("2", "4")
    await race(again, "1", "3")
    assert [a.sampling.seed for a in again.asked] == [a.sampling.seed for a in opponent.asked], "games repeat"


async def test_seat_may_set_sampling_and_system_prompt() -> None:
    opponent = Opponent("2", "4")
    seat = {"policy": "past", "temperature": 0.25, "max_tokens": 5, "system": "Play badly."}
    await race(opponent, "1", "3", seats=("policy", seat))
    assert "system\nPlay badly." in opponent.shown[0]
    assert {(a.sampling.temperature, a.sampling.max_tokens) for a in opponent.asked} == {(0.25, 5)}


async def test_resumed_game_does_not_sample_old_moves_again() -> None:
    opponent = Opponent("4")
    make = seat_players(["policy", "past"], num_seats=2, name="x", base=None, policies={"past": opponent})[1]
    assert make is not None
    prompt = (Message(role="user", content="Say a number."),)
    assert not isinstance(make, tuple)
    player: Any = make(PlayerSlot(id="e:seat 1", seed=0, prompt=prompt, action_of=lambda text, message: message.text))
    can_recall = isinstance(player, Recalls)
    assert can_recall and player.recall("The other said 1.", "2") == "2"
    assert await player.act("The other said 3.") == "4"
    (shown,) = opponent.shown
    assert re.sub(r"\W+", " ", shown).endswith(
        "The other said 1 im_end im_start assistant 2 im_end im_start user The other said 3 im_end im_start assistant "
    )


def test_player_is_drawn_once_for_each_task() -> None:
    adapter = Races("races:Race", "Race", {})
    seats = ["policy", ["policy", "past", "random"]]
    players = seat_players(seats, num_seats=2, name="races:Race", base=None, policies={"past": Opponent()})
    stage = Stage(adapter=adapter, players=players, rotates=False)
    tasks = [at_stage(split="train", score="sum")(t) for t in adapter.tasks(split="train", seeds=range(60))]
    drawn = [stage.players_of(task) for task in tasks]
    assert [stage.players_of(task) for task in tasks] == drawn
    assert {first for first, _ in drawn} == {None} and {second for _, second in drawn} == set(players[1])  # type: ignore[arg-type]
    turned = Stage(adapter=adapter, players=players)
    assert [turned.players_of(task)[::-1] for task in tasks[1::2]] == drawn[1::2], "who is drawn does not depend on the seat"


async def test_lost_opponent_fails_the_game() -> None:
    t = await race(Opponent("2", OSError("it is lost")), "1", "3")
    assert t.error is not None and "it is lost" in t.error and t.reward is None


async def test_every_opponent_leaves_although_one_cannot() -> None:
    class Three(Race):
        def step(self, action: str) -> Seated:
            self.named.append(int(action))
            return Seated(seat=len(self.named) % 3, observation="Go on.", terminated=len(self.named) == 3)

        def close(self) -> None:
            closed.append(self)

    class Threes(Races):
        num_seats = 3

        def make(self) -> Three:
            return Three()

    class Stuck(Opponent):
        async def end(self, session: str) -> None:
            raise EngineError("it does not forget")

    closed: list[Three] = []
    policies = {"stuck": Stuck("2"), "past": Opponent("3")}
    players = seat_players(("policy", "stuck", "past"), num_seats=3, name="races:Race", base=None, policies=policies)
    adapter = Threes("races:Race", "Race", {})
    scheduler = EnvScheduler({"races:Race": Stage(adapter=adapter, players=players, rotates=False)})
    one = at_stage(split="train", score="sum")(adapter.tasks(split="train", seeds=range(1))[0])
    t = await run_episode(scripted_context(["1"], scheduler=scheduler), one, id="e")
    assert t.error is None and t.metrics["close_errors"] == 1.0 and len(closed) == 1
    assert policies["past"].engine.ended_sessions == ["e:seat 2"]  # type: ignore[attr-defined]


URL = {"url": "http://x/v1", "model": "m"}


@pytest.mark.parametrize(
    ("seats", "error", "message"),
    [
        (["policy"], ConfigError, "has 2 seats, but env.seats names 1"),
        (["random", "random"], ConfigError, "always belongs to the policy"),
        (["policy", []], ConfigError, "a seat is an empty list"),
        (["policy", ["past", "pst"]], UnknownNameError, "there is no player 'pst'"),
        (["policy", "pst"], UnknownNameError, "there is no player 'pst'. Did you mean 'past'?"),
        (["policy", "policy2"], UnknownNameError, "`policies`"),
        (["policy", {"url": "http://x/v1"}], ConfigError, "needs url and model"),
        (["policy", {**URL, "temprature": 1}], UnknownNameError, "Did you mean 'temperature'?"),
        (["policy", {"policy": "pst"}], UnknownNameError, "`policies` has no 'pst'"),
        (["policy", {"policy": "past", "temprature": 1}], UnknownNameError, "Did you mean 'temperature'?"),
        (["policy", {"policy": "past", "temperature": -1}], ConfigError, "temperature is -1"),
        (["policy", {"policy": "past", "system": 5}], ConfigError, "system is 5"),
        (["past", ["policy", "past"]], ConfigError, "always belongs to the policy; put 'policy' in one of them"),
    ],
)
def test_seats_that_cannot_be_played_are_refused(seats: Any, error: type[Exception], message: str) -> None:
    refuses(
        lambda: seat_players(seats, num_seats=2, name="races:Race", base=None, policies={"past": Opponent("1")}),
        error,
        message,
    )
