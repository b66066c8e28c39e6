"""ThinkingTips: the user answers a wrong answer with a hint, and the model no longer sees its earlier reasoning.

    turn 0   [ prompt | <think>…</think>5 ]                     one segment
    turn 1   [ prompt, 5, hint | <think>…</think>4 ]            another one: every turn is trained on what it was shown

A turn that had no reasoning leaves nothing out, so its history goes on token for token and stays one segment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyturn.core.task import Task
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.judge import Judge, build_judge, is_right, require_truth
from polyturn.rollout.schedulers.reasoning import without_reasoning
from polyturn.rollout.schedulers.registry import schedulers

TIP = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."


@schedulers.register("thinking_tips")
@keeps_deadlines
class ThinkingTips(MultiTurnScheduler):
    """Hints from the user, over a history without reasoning."""

    stateless = True
    scores_turns = False

    def __init__(self, *, tip: str = TIP, max_tips: int = 1, judge: str | Judge = "math", base: Path | None = None) -> None:
        self.tip = tip
        self.max_tips = max_tips
        self._judge = build_judge(judge, base=base)

    def check_task(self, task: Task) -> None:
        """Refuse a task without a ground truth."""
        require_truth(task, who="thinking_tips")

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Give a hint, unless the answer is right or all hints are given."""
        num_before = len(episode.turns) - 1
        if num_before >= self.max_tips or is_right(
            await episode.call(self, self._judge, turn.text, episode.task.ground_truth)
        ):
            return None
        messages_seen = tuple(without_reasoning(m) for m in episode.messages)
        if messages_seen != episode.messages:
            episode.rewrite(messages_seen)
        return self.tip
