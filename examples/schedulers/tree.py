"""Tree: branches that share their beginnings, in one trajectory with a segment for each branch.

    chunk 0 ─┬─ chunk 1 ─┬─ … leaf a        a chunk is a turn, as long as `rollout.limits.max_tokens_per_turn`
             │           └─ … leaf b        each branch continues the message that was cut there
             └─ chunk 1' ─── … leaf c

The branches are segments of one trajectory, because a shared token was sampled once and must be trained once. Each leaf is
judged. A turn's score "tree" is the mean over the branches that begin after it, so an estimator that reads turn scores gives
a shared chunk the mean of its branches, and a branch that split more often has the same weight as its sibling. The reward
`score_tree` is the mean over the first branches.

The example shows `episode.fork()`, scores of turns, and a reward function that reads them.

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
from polyturn.core.generation import FinishReason
from polyturn.infra.aio import first_error
from polyturn.infra.plugins import import_file

judges = import_file(Path(__file__).with_name("judge.py"))


class Grown(NamedTuple):
    """The result of a node of the tree."""

    score: float
    """The mean score of its branches."""
    reason: StopReason
    """The stop reason of the first branch."""


class Tree(MultiTurnScheduler):
    """A scheduler that splits into `branching` branches before every chunk, until there are `width`."""

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
        """Reject a task without a ground truth."""
        judges.require_truth(task, who="tree")

    async def run(self, episode: Episode) -> StopReason:
        """Grow the tree and return the stop reason of its first branch."""
        return (await self._grow(episode, self.width)).reason

    async def _grow(self, episode: Episode, width: int) -> Grown:
        """Continue `episode` in up to `width` branches."""
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
        # A failed branch fails the tree; in the mean it would count as wrong.
        reason = next((g.reason for g in grown if g.reason.is_failure), grown[0].reason)
        return Grown(math.fsum(g.score for g in grown) / count, reason)

    async def _chunk(self, episode: Episode, width: int) -> Grown:
        """Sample one chunk and the branches after it."""
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
    """Return the mean score of a tree's branches; 0.0 if nothing was sampled."""
    first = [t.scores["tree"] for t in trajectory.turns if t.info.get("depth") == 0]
    return math.fsum(first) / len(first) if first else 0.0
