"""A conversation in an environment goes on in another process: its environment is put back, or it starts again, by name.

Run as a program, this file is one life of an episode, which may end with kill -9.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.generation import GenerateRequest
from polyturn.core.trajectory import Trajectory
from polyturn.environments.base import Adapter, at_stage
from polyturn.environments.players import seat_players
from polyturn.environments.registry import find_adapter
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.rollout.env import Seated
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from polyturn.training.journal_file import JournalFile
from support.forked import Forked


class Killed(BaseException):
    """What stands for kill -9: nothing that the library catches."""


async def life(
    folder: Path,
    adapter: Adapter,
    says: Sequence[str],
    *,
    die_at: int | None = None,
    seats: Sequence[str | Mapping[str, Any]] = (),
    is_real: bool = False,
) -> tuple[Trajectory | None, list[int], Mapping[str, float]]:
    """Run one life of an episode; return what came of it, the turns that were sampled, and the journal's counts."""
    is_first = not folder.exists()  # noqa: ASYNC240 (nobody else is on this loop)
    journal, asked = JournalFile(folder), []
    if is_first:
        journal.begin(0)
    else:
        journal.resume(0, oldest=lambda ticket: 0)

    def answer(request: GenerateRequest) -> str:
        turn = int(request.request_id.rpartition("/")[2])
        if turn == die_at:
            if is_real:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed
        asked.append(turn)
        return says[turn]

    players = seat_players(seats, num_seats=adapter.num_seats, name=adapter.name, base=None)
    stage = Stage(adapter=adapter, players=players, rotates=False)
    context = scripted_context(
        answer,
        scheduler=EnvScheduler({adapter.name: stage}),
        journal=journal,
        limits=Limits(max_turns=len(says), max_context=1 << 20, max_tokens_per_turn=512),
    )
    task = at_stage(split="train", score=adapter.score)(adapter.tasks(split="train", seeds=range(3, 4))[0])
    try:
        return await run_episode(context, task, id="g1/0", seed=1), asked, journal.read_metrics()
    except Killed:
        return None, asked, journal.read_metrics()
    finally:
        journal.close()


def check_same(parts: Trajectory, whole: Trajectory) -> None:
    assert [t.message for t in parts.turns] == [t.message for t in whole.turns]
    assert [t.observation for t in parts.turns] == [t.observation for t in whole.turns]
    assert [t.scores for t in parts.turns] == [t.scores for t in whole.turns]
    assert [t.info for t in parts.turns] == [t.info for t in whole.turns]
    assert all(a.same_as(b) for a, b in zip(parts.segments, whole.segments, strict=True))
    assert (parts.reward, parts.stop_reason) == (whole.reward, whole.stop_reason)


async def check_goes_on(folder: Path, adapter: Adapter, says: Sequence[str], **options: Any) -> Trajectory:
    """Check that an episode which dies before every turn but the first leaves the trajectory of one that never did."""
    whole, _, _ = await life(folder / "whole", adapter, says, **options)
    assert whole is not None and len(whole.turns) > 1, whole
    for turn in range(1, len(whole.turns)):
        assert (await life(folder / "parts", adapter, says, die_at=turn, **options))[0] is None
    parts, asked, counts = await life(folder / "parts", adapter, says, **options)
    assert counts["rollout/resumed_episodes"] == 1 and asked == [len(whole.turns) - 1], counts
    assert parts is not None
    check_same(parts, whole)
    return whole


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
        (LoadedDice, "the environment 'own:Dice' answered otherwise when its actions were replayed"),
        (SilentDice, "the environment 'own:Dice' offers no snapshot"),
    ],
)
async def test_environment_that_cannot_be_restored_starts_again(
    tmp_path: Path, made: type[Dice], reason: str, caplog: pytest.LogCaptureFixture
):
    says = ["a", "b", "stop"]
    await life(tmp_path, of(made), says, die_at=2)
    with caplog.at_level("INFO"):
        again, asked, counts = await life(tmp_path, of(made), says)
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
    seats = ["policy", f"{__file__}:steady"]
    await check_goes_on(tmp_path / "steady", Duels("own:Duel", "Duel", {}), ["a", "bb", "ccc"], seats=seats)
    seats = ["policy", f"{__file__}:fickle"]
    await life(tmp_path / "fickle", Duels("own:Duel", "Duel", {}), ["a", "bb", "ccc"], die_at=2, seats=seats)
    _, asked, counts = await life(tmp_path / "fickle", Duels("own:Duel", "Duel", {}), ["a", "bb", "ccc"], seats=seats)
    assert asked == [0, 1, 2] and counts["rollout/restarted_episodes"] == 1


@pytest.mark.kill
@pytest.mark.timeout(300)
def test_episode_goes_on_after_kill_9(tmp_path: Path):
    pytest.importorskip("gymnasium")
    assert Forked(__file__, tmp_path / "parts", call="support.forked:run_file").wait(240) == -signal.SIGKILL
    adapter = find_adapter("gymnasium:FrozenLake8x8-v1")
    parts, asked, counts = asyncio.run(life(tmp_path / "parts", adapter, FROZEN))
    whole, _, _ = asyncio.run(life(tmp_path / "whole", adapter, FROZEN))
    assert parts is not None and whole is not None and asked[0] == 2 and counts["rollout/resumed_episodes"] == 1
    check_same(parts, whole)


if __name__ == "__main__":
    asyncio.run(life(Path(sys.argv[1]), find_adapter("gymnasium:FrozenLake8x8-v1"), FROZEN, die_at=2, is_real=True))
