"""A conversation in an environment continues in another process: its environment is restored, or it restarts.

Run as a program, this file is one life of an episode, which may end with kill -9.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.trajectory import Trajectory
from polyturn.environments.base import Adapter, at_stage
from polyturn.environments.players import seat_players
from polyturn.environments.registry import find_adapter
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.rollout.env import Seated
from polyturn.rollout.limits import Limits
from support.flights import check_like_whole, lives
from support.forked import Forked


def played(adapter: Adapter, says: Sequence[str], seats: Sequence[str | Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the options of an episode in an environment."""
    players = seat_players(seats, num_seats=adapter.num_seats, name=adapter.name, base=None)
    task = adapter.tasks(split="train", seeds=range(3, 4))[0]
    return {
        "scheduler": EnvScheduler({adapter.name: Stage(adapter=adapter, players=players, rotates=False)}),
        "limits": Limits(max_turns=len(says), max_context=1 << 20, max_tokens_per_turn=512),
        "task": at_stage(split="train", score=adapter.score)(task),
    }


async def check_goes_on(folder: Path, adapter: Adapter, says: Sequence[str], **options: Any) -> Trajectory:
    return await check_like_whole(folder, says, lambda: played(adapter, says, **options))


FROZEN = [f"<action>{a}</action>" for a in ("right", "down", "left", "right", "nowhere", "down")]


async def test_gymnasium_environment_is_replayed(tmp_path: Path):
    pytest.importorskip("gymnasium")
    whole = await check_goes_on(tmp_path, find_adapter("gymnasium:FrozenLake8x8-v1"), FROZEN)  # it slips at random
    assert whole.turns[0].observation[0].text


async def test_game_is_replayed_with_its_opponents_moves(tmp_path: Path):
    pytest.importorskip("textarena")
    adapter = find_adapter("textarena:TicTacToe-v0")
    found = await check_goes_on(tmp_path, adapter, ["[4]", "[0]", "[8]", "[2]", "[6]"], seats=["policy", "random"])
    assert found.turns[-1].info["seat"] == 0


class Dice:
    """Its answers follow from the seed."""

    replays = True

    def reset(self, *, seed: int) -> str:
        self._random = self.source(seed)
        return "Roll."

    def source(self, seed: int) -> random.Random:
        return random.Random(seed)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        rolled = self._random.randrange(1_000_000)
        return f"You rolled {rolled}.", rolled / 1e6, "stop" in action, {}

    def close(self) -> None:
        pass


class LoadedDice(Dice):
    """Says that its answers follow from the seed; they do not."""

    def source(self, seed: int) -> random.Random:
        return random.SystemRandom()


class SilentDice(Dice):
    """Says nothing of itself."""

    replays = False


class Remembers(Dice):
    """Keeps itself."""

    replays = False

    def snapshot(self) -> Any:
        return list(self._random.getstate()[1])

    def restore(self, state: Any) -> None:
        self._random = random.Random()
        self._random.setstate((3, tuple(state), None))


class One(Adapter):
    made: type[Dice] = Dice

    def make(self) -> Dice:
        return self.made()


def of(made: type[Dice]) -> Adapter:
    adapter = One("own:Dice", "Dice", {})
    adapter.made = made
    return adapter


@pytest.mark.parametrize("made", [Dice, Remembers])
async def test_own_environment_replays_or_restores_itself(tmp_path: Path, made: type[Dice]):
    await check_goes_on(tmp_path, of(made), ["a", "b", "c", "stop"])


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (LoadedDice, "the environment 'own:Dice' answered differently when its actions were replayed"),
        (SilentDice, "the environment 'own:Dice' offers no snapshot"),
    ],
)
async def test_environment_that_cannot_be_restored_starts_again(
    tmp_path: Path, made: type[Dice], reason: str, caplog: pytest.LogCaptureFixture
):
    says = ["a", "b", "stop"]
    await lives(tmp_path, says, die_at=2, **played(of(made), says))
    with caplog.at_level("INFO"):
        again, (asked, counts) = await lives(tmp_path, says, **played(of(made), says))
    assert again is not None and asked == [0, 1, 2] and counts["rollout/restarted_episodes"] == 1
    assert reason in caplog.text


class Duel:
    """Two players; each is told what the other said."""

    replays = True

    def reset(self, *, seed: int) -> Seated:
        self.num = 0
        return Seated(seat=1, observation="Begin.")

    def step(self, action: str) -> Seated:
        self.num += 1
        seat, done = (1 + self.num) % 2, self.num == 6
        return Seated(seat=seat, observation=f"They said {action}.", rewards={seat: float(len(action))}, terminated=done)

    def close(self) -> None:
        pass


class Duels(Adapter):
    num_seats = 2

    def make(self) -> Duel:
        return Duel()


_PLAYED = itertools.count()


def fickle(observation: str) -> str:
    return f"move {next(_PLAYED)}"


def steady(observation: str) -> str:
    return f"{len(observation)} letters"


async def test_written_opponent_must_repeat_its_moves(tmp_path: Path):
    adapter, says = Duels("own:Duel", "Duel", {}), ["a", "bb", "ccc"]
    await check_goes_on(tmp_path / "steady", adapter, says, seats=["policy", f"{__file__}:steady"])
    seats = ["policy", f"{__file__}:fickle"]
    await lives(tmp_path / "fickle", says, die_at=2, **played(adapter, says, seats))
    _, (asked, counts) = await lives(tmp_path / "fickle", says, **played(adapter, says, seats))
    assert asked == [0, 1, 2] and counts["rollout/restarted_episodes"] == 1


def frozen() -> dict[str, Any]:
    return played(find_adapter("gymnasium:FrozenLake8x8-v1"), FROZEN)


@pytest.mark.kill
@pytest.mark.timeout(300)
def test_episode_goes_on_after_kill_9(tmp_path: Path):
    pytest.importorskip("gymnasium")
    assert Forked(__file__, tmp_path / "parts", call="support.forked:run_file").wait(240) == -signal.SIGKILL
    parts, (asked, counts) = asyncio.run(lives(tmp_path / "parts", FROZEN, **frozen()))
    whole, _ = asyncio.run(lives(tmp_path / "whole", FROZEN, **frozen()))
    assert parts is not None and whole is not None and asked[0] == 2 and counts["rollout/resumed_episodes"] == 1
    assert all(a.same_as(b) for a, b in zip(parts.segments, whole.segments, strict=True)) and parts.reward == whole.reward


if __name__ == "__main__":
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    asyncio.run(lives(Path(sys.argv[1]), FROZEN, die_at=2, die=kill, **frozen()))
