"""Lookahead: scores a turn by its consequences, by continuing the conversation from it and judging the continuations.

    conversation   turn 0 ── turn 1 ── turn 2 ── end
                     │         └┬─ user ── turn ── user ──▸ judge 0.9 ┐
                     │          └─ user ── turn ── user ──▸ judge 0.5 ┘  score of turn 1: 0.7
                     └─ …

The same user and the same policy run `num_repeat_rollouts` continuations, of up to `window` further turns of the model (0:
only the user's reaction), from every turn that addresses the user; the mean of their scores is the turn's score "lookahead".
A turn that calls tools gets none. Continuations share the tools of their conversation. Their tokens are in the record, in
segments of the agent "lookahead" with weight 0, and are only trained with `train_forks`. Source: Wu et al. 2025 (CollabLLM,
multiturn-aware reward).

The episode's reward is the mean of its turns' scores; with `reward: run` the run's functions give it. Use an estimator that
compares the turns of a group with each other, as below: a score already covers later turns. An episode of n turns has up to
n * num_repeat_rollouts * window more completions (metrics tokens/asides, rollout/forks) and n * num_repeat_rollouts answers
of the judge (reward/judge_tokens).

The example shows `episode.mark()`, forks from earlier turns, forks that are not trained (`Aside`), and a reward that the
scheduler computes.

    rollout:
      scheduler: examples/schedulers/lookahead.py:Lookahead
      scheduler_kwargs:
        num_repeat_rollouts: 3
        window: 2
        judge: {base_url: "http://127.0.0.1:8000/v1", model: judge, rubric: "Did the user get what it wanted?"}
      interactions: [{name: user, class_name: polyturn.interactions.simulated_user.SimulatedUser, config: {…}}]
      limits: {max_turns: 4}
    algorithm: {advantage: {name: mt_grpo, outcome_weight: 0}}
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polyturn import ConfigError, DataError, Episode, Message, MultiTurnScheduler, OpenTurn, StopReason, Task
from polyturn.core.errors import did_you_mean
from polyturn.core.seeds import derive_seed
from polyturn.infra.aio import first_error
from polyturn.partners.judge import ConversationJudge, Verdict
from polyturn.rollout.aside import Aside
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.history import Mark
from polyturn.rollout.open_turn import GivenReward

LABEL = "lookahead"
REWARDS = ("turns", "run")


class BranchPoint(NamedTuple):
    """A turn and the state of the episode after it."""

    turn: OpenTurn
    mark: Mark


@keeps_deadlines  # the judge has another deadline, which may be longer than rollout.scheduler_timeout_s
class Lookahead(MultiTurnScheduler):
    """A scheduler that runs the conversation, then continuations from each of its turns."""

    gives_reward = True
    scores_turns = True
    forks = True

    def __init__(
        self,
        *,
        judge: Mapping[str, Any],
        num_repeat_rollouts: int = 3,
        window: int = 2,
        train_forks: bool = False,
        reward: str = "turns",
        base: Path | None = None,
        policies: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the judge.

        Args:
            judge: The arguments of the reward `judge`: base_url and model, or policy; rubric, …
            num_repeat_rollouts: Number of continuations per turn.
            window: The largest number of model turns of a continuation; 0 judges only the user's reaction.
            train_forks: Train the continuations too; each of their turns has the score of the continuation.
            reward: "turns" rewards an episode with the mean of its turns' scores; "run" uses the run's reward functions
                and requires `train_forks` to be off.
            base: The folder that relative paths start from.
            policies: The run's further policies; one of them may be the judge.

        Raises:
            ConfigError: an argument is invalid.
        """
        for name, value, least in (("num_repeat_rollouts", num_repeat_rollouts, 1), ("window", window, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"lookahead: {name} is {value!r}; use an integer of at least {least}")
        if reward not in REWARDS:
            raise ConfigError(f"lookahead: reward is {reward!r}.{did_you_mean(str(reward), REWARDS)}")
        if reward == "run" and train_forks:
            raise ConfigError(
                "lookahead: train_forks adds the continuations to the record, so reward functions would use their last turn "
                "as the answer; use reward: turns"
            )
        if not isinstance(judge, Mapping):
            raise ConfigError(f"lookahead: judge is {judge!r:.99}; use a judge's arguments: base_url and model, or policy")
        self._judge = ConversationJudge(judge, who="lookahead's judge", base=base, policies=policies)
        self._count = num_repeat_rollouts
        self._window = window
        self._train_forks = train_forks
        self._reward = reward
        self._points: list[BranchPoint] = []
        self._is_looking = False

    def check_task(self, task: Task) -> None:
        """Reject a task without an interaction."""
        if task.interaction is None:
            raise DataError(
                f"task {task.id!r} has no interaction, which the scheduler 'lookahead' needs to continue conversations; add "
                "an `interaction` to its row"
            )
        self._judge.require()

    def on_trajectory_start(self, episode: Episode) -> None:
        """Start an empty list of branch points."""
        self._points, self._is_looking = [], False

    async def on_turn_end(self, episode: Episode, turn: OpenTurn) -> None:
        """Record a branch point at a turn that addresses the user."""
        # Continuations call this method too, but are not continued themselves.
        if not self._is_looking and not turn.message.tool_calls:
            self._points.append(BranchPoint(turn, episode.mark()))

    async def run(self, episode: Episode) -> StopReason:
        """Run the conversation, then the continuations of its turns, and score the turns."""
        reason = await super().run(episode)
        if reason.is_failure:
            return reason
        self._is_looking = True
        forks = [(point, self._fork(episode, point, i)) for point in self._points for i in range(self._count)]
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._continue(fork), name=fork.id) for _, fork in forks]
        verdicts = [task.result() for task in running]
        for number, point in enumerate(self._points):
            own = verdicts[number * self._count : (number + 1) * self._count]
            point.turn.scores[LABEL] = math.fsum(v.score for v in own) / len(own)
            point.turn.info[LABEL] = {
                "scores": [v.score for v in own],
                "reasons": [v.reason for v in own],
            }
            point.turn.info["judge_tokens"] = sum(v.tokens for v in own)
        if self._reward == "turns":
            scores = [point.turn.scores[LABEL] for point in self._points]
            value = math.fsum(scores) / len(scores) if scores else 0.0
            episode.given_reward = GivenReward(score=value)
        return reason

    def _fork(self, episode: Episode, point: BranchPoint, number: int) -> Episode:
        """Return a fork directly after the turn of `point`, before it is answered."""
        seed = derive_seed(episode.seed, LABEL, point.turn.index, number)
        aside = None if self._train_forks else Aside(label=LABEL, seed=seed)
        fork = episode.fork(at=point.mark, aside=aside, is_unanswered=True)
        last = len(point.mark.history.turns) + self._window
        most = fork.limits.max_turns
        fork.limits = dataclasses.replace(fork.limits, max_turns=last if most is None else min(last, most))
        return fork

    async def _continue(self, fork: Episode) -> Verdict:
        """Answer the turn, run the continuation, and judge it."""
        num_before = len(fork.turns)
        if await self.settle(fork, fork.turns[-1]) is None:
            await MultiTurnScheduler.run(self, fork)
        verdict = await self._judge.score(conversation(fork), task=fork.task)
        if self._train_forks:
            for turn in fork.turns[num_before:]:
                turn.scores[LABEL] = verdict.score
                turn.info["is_continuation"] = True
        return verdict


def conversation(episode: Episode) -> list[Message]:
    """Return all messages of an episode or fork, including a last turn without an answer."""
    out = list(episode.prompt)
    for turn in episode.turns:
        if not turn.is_continued:
            out += [turn.message, *turn.observation]
    return out
