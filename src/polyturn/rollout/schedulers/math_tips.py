"""MathTips: a wrong answer is taken back, and the same message goes on behind a hint.

sampled   2 and 2 is 5</think><answer>5</answer>
kept      2 and 2 is 5                                  what stands before the answer; the rest is dropped and counted
shown     But wait... It seems I made a mistake,        masked, in the same assistant message
sampled    2 and 2 is 4</think><answer>4</answer>
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyturn.core.task import Task
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.judge import Judge, build_judge, is_right, require_truth
from polyturn.rollout.schedulers.registry import schedulers

TIP = "But wait... It seems I made a mistake,"


@schedulers.register("math_tips")
@keeps_deadlines
class MathTips(MultiTurnScheduler):
    """One hint inside the message, where the answer is wrong."""

    stateless = True
    scores_turns = False

    def __init__(
        self,
        *,
        tip: str = TIP,
        judge: str | Judge = "math",
        cut_at: Sequence[str] = ("<answer>", "</think>"),
        base: Path | None = None,
    ) -> None:
        self.tip = tip
        self.cut_at = cut_at
        self._judge = build_judge(judge, base=base)

    def check_task(self, task: Task) -> None:
        """Refuse a task without a ground truth."""
        require_truth(task, who="math_tips")

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Go on behind the hint, once, unless the answer is right."""
        text = turn.said_before + turn.text
        if self.tip in text or is_right(await episode.call(self, self._judge, text, episode.task.ground_truth)):
            return None
        cuts = [at for mark in self.cut_at if (at := turn.text.find(mark)) >= 0]
        return episode.go_on(self.tip, keep=turn.text[: min(cuts)] if cuts else None)
