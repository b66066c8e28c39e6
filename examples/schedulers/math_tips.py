"""MathTips: removes a wrong answer and continues the same message after a hint.

    sampled   2 and 2 is 5</think><answer>5</answer>
    kept      2 and 2 is 5                                  the text before the answer; the rest is dropped and counted
    shown     But wait... It seems I made a mistake,        masked, in the same assistant message
    sampled    2 and 2 is 4</think><answer>4</answer>

The example shows `episode.go_on(text, keep=…)`: it removes sampled tokens and adds text that is not trained.

    rollout: {scheduler: examples/schedulers/math_tips.py:MathTips, scheduler_kwargs: {judge: gsm8k}, limits: {max_turns: 2}}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyturn import Episode, MultiTurnScheduler, OpenTurn, Task
from polyturn.infra.plugins import import_file

judges = import_file(Path(__file__).with_name("judge.py"))

TIP = "But wait... It seems I made a mistake,"


class MathTips(MultiTurnScheduler):
    """A scheduler that gives one hint inside the message if the answer is wrong."""

    stateless = True
    scores_turns = False

    def __init__(
        self,
        *,
        tip: str = TIP,
        judge: str | judges.Judge = "math",
        cut_at: Sequence[str] = ("<answer>", "</think>"),
        base: Path | None = None,
    ) -> None:
        self.tip = tip
        self.cut_at = cut_at
        self._judge = judges.build_judge(judge, base=base)

    def check_task(self, task: Task) -> None:
        """Reject a task without a ground truth."""
        judges.require_truth(task, who="math_tips")

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Continue the message after the hint, once, unless the answer is right."""
        text = turn.said_before + turn.text
        if self.tip in text or judges.is_right(await episode.call(self, self._judge, text, episode.task.ground_truth)):
            return None
        cuts = [at for mark in self.cut_at if (at := turn.text.find(mark)) >= 0]
        return episode.go_on(self.tip, keep=turn.text[: min(cuts)] if cuts else None)
