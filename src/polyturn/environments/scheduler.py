"""EnvScheduler: every turn is an action in the task's environment; a game may have several seats.

    one seat        reset -> prompt;  turn -> step -> observation -> turn …
    several seats   the environment names the next seat. Each seat that the policy plays is an agent with its own history,
                    segment and reward; it sees another seat's moves only if the game shows them.

    seat 0   [ prompt 0 | turn 0 | observation | turn 2 ]        one trajectory, two training samples
    seat 1   [ prompt 1 | turn 1 | observation | turn 3 ]

A reward is stored as the score "env" of its player's latest turn, even if another player's move caused it, as for the loser
of a game. A completion that a limit cut still counts as an action, and ends the episode. The player who wrote it gets the
reward `Stage.forfeit` if the environment is not done by then.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyturn.core.errors import DataError, NoSnapshotError, SchedulerError, SnapshotError, did_you_mean
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.environments.base import ENV, Adapter
from polyturn.environments.players import Leaves, MakePlayer, Named, Player, PlayerSlot, PolicyPlayer, Recalls
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.env import EnvStep, Seated
from polyturn.rollout.env_session import EnvSession
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn, Reply
from polyturn.rollout.schedulers.environment import EnvironmentLoop, with_text

SEAT = "seat"
"""The key of a turn's info with the number of the seat that took the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """An environment of a run, with its players and rules."""

    adapter: Adapter
    players: tuple[Named, ...] = (None,)
    """The player of each seat; None is the policy."""
    eval_players: tuple[Named, ...] | None = None
    """The players during evaluation; None uses `players`."""
    rotates: bool = True
    """Whether the players change seats from task to task."""
    action: re.Pattern[str] | None = None
    """Finds the action in the model's text: the last match, or its first group if the pattern has one. None takes the whole
    text."""
    forfeit: float | None = None
    """The reward of a player that a limit of the run stops before the environment is done. None is 0 for one player and -1
    for several, because a player about to lose would otherwise profit from writing until it is cut."""

    def players_of(self, task: Task) -> tuple[MakePlayer | None, ...]:
        """Return the player of each seat in a task. The task's seed draws and rotates the players, so all episodes of a
        group have the same seating."""
        named = self.players
        if self.eval_players is not None and task.extra[ENV].get("split") == "eval":
            named = self.eval_players
        seed = int(task.extra[ENV]["seed"])
        drawn = tuple(
            one[derive_seed(seed, SEAT, n) % len(one)] if isinstance(one, tuple) else one for n, one in enumerate(named)
        )
        first = seed % len(drawn) if self.rotates else 0
        return drawn[-first:] + drawn[:-first] if first else drawn

    def action_of(self, text: str, message: Message) -> str:
        """Return the action of a turn, from its full text and its parsed message."""
        return self.action_in(text if self.adapter.reads_reasoning else message.text)

    def action_in(self, text: str) -> str:
        """Return the action in a text; the whole text if there is no match, which the environment then refuses."""
        if self.action is None:
            return text
        matches = list(self.action.finditer(text))
        return matches[-1][1 if self.action.groups else 0] if matches else text


@keeps_deadlines
class EnvScheduler(EnvironmentLoop):
    """Runs each task in its environment; a game has one history per seat of the policy."""

    def __init__(self, stages: Mapping[str, Stage]) -> None:
        """Create a scheduler for the environments of a run, by name."""
        self._stages = stages
        self._ended: StopReason | None = None
        self._seats: dict[int, Episode] = {}
        """Seat -> its history, for seats that the policy has played."""
        self._opponents: dict[int, Player] = {}
        self._earned: dict[int, float] = {}
        """Seat -> its reward so far."""
        self._moves: list[int | str] = []
        """All actions in order: the policy's as the indices of its turns, opponents' as texts."""
        self._is_recorded = False
        """Whether an earlier process has already recorded the latest answer with its turn."""

    def check_task(self, task: Task) -> None:
        """Refuse a task whose environment is not part of this run."""
        row_env = task.extra.get(ENV)
        if not isinstance(row_env, Mapping) or not isinstance(row_env.get("seed"), int) or "name" not in row_env:
            raise DataError(f"task {task.id!r} has the env {row_env!r:.100}; give {{'name': …, 'seed': …}}")
        if row_env["name"] not in self._stages:
            hint = did_you_mean(str(row_env["name"]), self._stages)
            raise DataError(f"task {task.id!r}: the run's env has no {row_env['name']!r}.{hint}")

    async def open(self, episode: Episode, observed: Any, *, name: str) -> None:
        """Show the first observation; in a game, first let opponents move whose turn comes before the policy's."""
        if not isinstance(observed, Seated):
            await super().open(episode, observed, name=name)
            return
        self._seat_opponents(episode)
        self._answer = EnvStep.of(observed, name=name)
        await self._opponents_move(episode)
        if self._ended is None:
            episode.play_as(_agent(self._answer.seat))
            self._seats[self._answer.seat] = episode
            episode.rewrite(_opened(episode.task.prompt, self._answer.observation))

    async def run(self, episode: Episode) -> StopReason:
        """Run the episode to its end, with one history per seat of the policy."""
        if not self._seats and self._ended is None:
            return self._stopped(episode, await super().run(episode))
        while self._ended is None:
            seat = self._answer.seat
            own = self._seats.get(seat)
            if own is None:
                messages = _opened(episode.task.prompt, self._answer.observation)
                own = self._seats[seat] = episode.fork(agent=_agent(seat), messages=messages)
            elif own.turns and not self._is_recorded:
                own.record(own.turns[-1], Reply(messages=self._answer.observation, goes_on=not self._answer.observation))
            self._is_recorded = False
            if (limit := await own.prepare()) is not None:
                return self._stopped(own, limit)
            turn = await own.generate()
            if (reason := await self._finished(own, turn)) is not None:
                return self._stopped(own, reason)
            await self._opponents_move(episode)
        return self._ended

    async def on_turn_end(self, episode: Episode, turn: OpenTurn) -> Any:
        """Act with the turn; end the episode if the environment ends."""
        if turn.message.tool_calls and episode.tool_schemas:
            return None  # a tool of the run answers first
        acting = self._answer.seat
        self._moves.append(turn.index)
        await self.act(self._stage.action_of(turn.text, turn.message))
        self.score(turn)
        if self._seats:
            turn.info[SEAT] = acting
            self._credit()
        if self._ended is not None:
            turn.observation += self._answer.observation
        return self._ended

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Show the environment's observation, or the results of the run's tools."""
        if turn.message.tool_calls and episode.tool_schemas:
            return await episode.call_tools(turn)
        return await super().step(episode, turn)

    async def snapshot(self, episode: Episode) -> dict[str, Any]:
        """Return the environment's snapshot, or a trace with the moves so far.

        Raises:
            NoSnapshotError: the environment supports neither, or an opponent cannot resume a game.
        """
        assert self._session is not None
        stuck = next((seat for seat, player in self._opponents.items() if not isinstance(player, Recalls)), None)
        if stuck is not None:
            raise NoSnapshotError(f"the player of seat {stuck} cannot resume a game")
        if self._seats and not self._session.replays:
            raise NoSnapshotError(f"the game {self._session.name!r} does not declare that it replays")
        kept = {"trace": self._session.trace} if self._seats else await self._session.snapshot()
        return {
            **kept,
            "moves": list(self._moves),
            "seat": self._answer.seat if self._seats else None,
            "earned": {str(seat): earned for seat, earned in self._earned.items()},
        }

    async def restore(self, episode: Episode, state: Mapping[str, Any]) -> None:
        """Create the environment again in the given state, from its snapshot or by replaying its moves.

        Raises:
            SnapshotError: the replayed environment answers differently, or an opponent moves differently.
        """
        if state["seat"] is None:
            await super().restore(episode, state)
        else:
            self._session, seed = self.begin(episode)
            await self._replay(episode, self._session, state, seed=seed)
            self._seats, self._is_recorded = {state["seat"]: episode}, True
        self._moves = list(state["moves"])
        self._earned = {int(seat): earned for seat, earned in state["earned"].items()}

    async def _replay(self, episode: Episode, session: EnvSession, state: Mapping[str, Any], *, seed: int) -> None:
        """Replay a game up to the given state."""
        if "trace" not in state:
            raise SnapshotError(f"the snapshot of the game {session.name!r} has no trace, so it cannot be replayed")
        self._seat_opponents(episode)
        self._answer = EnvStep.of(await session.reset(seed=seed), name=session.name)
        turns = {turn.index: turn for turn in episode.turns}
        for move in state["moves"]:
            if isinstance(move, str):
                player, seen = self._opponents.get(self._answer.seat), "\n".join(m.text for m in self._answer.observation)
                if not isinstance(player, Recalls):
                    raise SnapshotError(f"the player of seat {self._answer.seat} cannot resume a game")
                reply = await episode.call(self, player.recall, seen, move, of=f"the player of seat {self._answer.seat}:")
                if reply != move:
                    raise SnapshotError(
                        f"the player of seat {self._answer.seat} makes another move when the game is replayed"
                    )
                await self.act(move)
            else:
                await self.act(self._stage.action_of(turns[move].text, turns[move].message))
        session.check_trace(state["trace"])

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Close the environment, and let the opponents release their resources."""
        opponents, self._seats, self._opponents = self._opponents, {}, {}
        async with contextlib.AsyncExitStack() as ends:  # closes all of them, even if one fails
            if self._session is not None:
                ends.push_async_callback(self._session.close)
            for player in opponents.values():
                if isinstance(player, Leaves):
                    ends.push_async_callback(player.leave)

    def begin(self, episode: Episode) -> tuple[EnvSession, int]:
        """Return a session of the task's environment, and the seed."""
        row_env = episode.task.extra[ENV]
        stage = self._stages[row_env["name"]]
        self._stage, self._seats, self._opponents, self._earned, self._moves = stage, {}, {}, {}, []
        self._ended, self._is_recorded = None, False
        make, call = functools.partial(stage.adapter.make_for, episode.task), functools.partial(episode.call, self)
        return EnvSession(row_env["name"], make, {}, call=call, replays=stage.adapter.replays), row_env["seed"]

    def actions(self, episode: Episode, state: Mapping[str, Any]) -> list[str]:
        """Return the policy's actions, read from its turns."""
        turns = {turn.index: turn for turn in episode.turns}
        return [self._stage.action_of(turns[m].text, turns[m].message) for m in state["moves"]]

    def _seat_opponents(self, episode: Episode) -> None:
        players = enumerate(self._stage.players_of(episode.task))
        self._opponents = {n: make(_seat(episode, self._stage, n)) for n, make in players if make is not None}

    async def act(self, action: str) -> StopReason | None:
        """Take an action and add its rewards to each seat."""
        self._ended = await super().act(action)
        for seat, reward in self._answer.rewards.items():
            self._earned[seat] = self._earned.get(seat, 0.0) + reward
        return self._ended

    async def _opponents_move(self, episode: Episode) -> None:
        """Let opponents move until it is the policy's turn or the game is over."""
        while self._ended is None and (player := self._opponents.get(self._answer.seat)) is not None:
            seen = "\n".join(m.text for m in self._answer.observation)
            reply = await episode.call(self, player.act, seen, of=f"the player of seat {self._answer.seat}:")
            if not isinstance(reply, str):
                raise SchedulerError(
                    f"the player of seat {self._answer.seat} answered {reply!r:.100}; return a text from the player's act"
                )
            self._moves.append(reply)
            await self.act(reply)
            self._credit()

    def _stopped(self, own: Episode, reason: StopReason) -> StopReason:
        """Score the player that a limit stopped, and return the stop reason."""
        worth = self._stage.forfeit
        if worth is None:
            worth = -1.0 if self._seats else 0.0
        if worth and self._ended is None and reason.is_truncation and own.turns:
            own.turns[-1].scores["env"] = own.turns[-1].scores.get("env", 0.0) + worth
        if (last := self._last_turn()) is not None:
            self._tell_opponents(last)
        return reason

    def _credit(self) -> None:
        """Record each policy seat's reward of the latest step on its latest turn."""
        for seat, reward in self._answer.rewards.items():
            turns = self._seats[seat].turns if seat in self._seats else []
            if turns:
                turns[-1].scores["env"] = turns[-1].scores.get("env", 0.0) + reward
        if self._ended is not None and (last := self._last_turn()) is not None:
            last.info["earned"] = {str(seat): earned for seat, earned in sorted(self._earned.items())}
            self._tell_opponents(last)

    def _last_turn(self) -> OpenTurn | None:
        """Return the policy's latest turn, over all seats."""
        return max((e.turns[-1] for e in self._seats.values() if e.turns), key=lambda t: t.index, default=None)

    def _tell_opponents(self, turn: OpenTurn) -> None:
        """Record which further policies played, and their versions, in the info of `turn`, the policy's last turn."""
        others = {s: p for s, p in sorted(self._opponents.items()) if isinstance(p, PolicyPlayer)}
        if others:
            turn.info["opponents"] = {str(s): {"policy": p.name, "version": p.version} for s, p in others.items()}


def _seat(episode: Episode, stage: Stage, number: int) -> PlayerSlot:
    return PlayerSlot(
        id=f"{episode.id}:{SEAT} {number}",
        seed=derive_seed(episode.id, SEAT, number),
        prompt=episode.task.prompt,
        action_of=stage.action_of,
    )


def _agent(seat: int) -> str:
    return f"{SEAT} {seat}"


def _opened(prompt: tuple[Message, ...], observed: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return a seat's first prompt: the task's messages and the player's first observation."""
    if len(observed) == 1 and observed[0].role == "user" and isinstance(observed[0].content, str):
        return with_text(prompt, observed[0].content)
    return (*(m for m in prompt if m.text.strip()), *observed)  # tasks made from seeds may have an empty prompt
