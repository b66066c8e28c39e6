"""Tree: branches that share their beginnings. One trajectory; every branch that goes its own way is a segment of it.

    chunk 0 ─┬─ chunk 1 ─┬─ … leaf a        a chunk is a turn, as long as `rollout.limits.max_tokens_per_turn`
             │           └─ … leaf b        what is cut there goes on in the same message, once for each branch
             └─ chunk 1' ─── … leaf c

Why segments of one trajectory and not several trajectories: a shared token was sampled once, so it is trained once, and
belongs to no leaf more than to another. A leaf is judged by itself; each turn's score "tree" is the mean over the branches
that begin behind it, so an estimator that reads turn scores gives a shared chunk the mean of what came of it, and a branch
that split more often counts no more than its sibling. The reward `score_tree` is the mean over the first branches.

It shows `episode.fork()`, scores of turns, and a reward function that reads them.

    rollout:
      scheduler: examples/schedulers/tree.py:Tree
      scheduler_kwargs: {width: 8, branching: 2, judge: gsm8k}
      limits: {max_turns: 8, max_tokens_per_turn: 256}
    reward: {function: examples/schedulers/tree.py:score_tree}
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import NamedTuple

from polyturn import ConfigError, Episode, MultiTurnScheduler, StopReason, Task, Trajectory
from polyturn.core.aio import first_error
from polyturn.core.generation import FinishReason
from polyturn.core.plugins import import_file

judges = import_file(Path(__file__).with_name("judge.py"))


class Grown(NamedTuple):
    """The result of one place in the tree."""

    score: float
    """The mean reward of its branches."""
    reason: StopReason
    """Why the first of them ended."""


class Tree(MultiTurnScheduler):
    """Splits into `branching` before every chunk, until there are `width` branches."""

    forks = True

    def __init__(
        self, *, width: int = 8, branching: int = 2, judge: str | judges.Judge = "math", base: Path | None = None
    ) -> None:
        if width < 1 or branching < 2:
            raise ConfigError(f"tree: width is {width} and branching {branching}; use at least 1 and at least 2")
        self.width = width
        self.branching = branching
        self._judge = judges.build_judge(judge, base=base)

    def check_task(self, task: Task) -> None:
        """Refuse a task without a ground truth."""
        judges.require_truth(task, who="tree")

    async def run(self, episode: Episode) -> StopReason:
        """Grow the tree and return how its first branch ended."""
        return (await self._grow(episode, self.width)).reason

    async def _grow(self, episode: Episode, width: int) -> Grown:
        """Go on from where `episode` stands, in up to `width` branches."""
        if (limit := await episode.prepare()) is not None:
            return await self._leaf(episode, limit)
        if width == 1:
            return await self._chunk(episode, 1)
        count = min(self.branching, width)
        shares = [width // count + (i < width % count) for i in range(count)]
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._chunk(episode.fork(), share)) for share in shares]
        grown = [task.result() for task in running]
        # A branch that failed fails the tree, in whose mean it would count as wrong.
        reason = next((g.reason for g in grown if g.reason.is_failure), grown[0].reason)
        return Grown(math.fsum(g.score for g in grown) / count, reason)

    async def _chunk(self, episode: Episode, width: int) -> Grown:
        """Sample one chunk, and what comes of it."""
        turn = await episode.generate()
        turn.info["depth"] = len(episode.turns) - 1
        reason: StopReason | None = None
        if turn.finish_reason is FinishReason.LENGTH and turn.cut_by is StopReason.LENGTH:
            episode.record(turn, episode.go_on())
        else:
            reason = await self.settle(episode, turn)
        grown = await (self._grow(episode, width) if reason is None else self._leaf(episode, reason))
        turn.scores["tree"] = grown.score
        return grown

    async def _leaf(self, episode: Episode, reason: StopReason) -> Grown:
        if reason.is_failure or not episode.turns:
            return Grown(0.0, reason)
        last = episode.turns[-1]
        answer = await episode.call(self, self._judge, last.said_before + last.text, episode.task.ground_truth)
        return Grown(float(judges.is_right(answer)), reason)


def score_tree(trajectory: Trajectory) -> float:
    """Return the mean of a tree's branches; 0.0 where nothing was sampled."""
    first = [t.scores["tree"] for t in trajectory.turns if t.info.get("depth") == 0]
    return math.fsum(first) / len(first) if first else 0.0
