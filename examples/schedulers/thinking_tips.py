"""ThinkingTips: the user replies to a wrong answer with a hint, and the model no longer sees its earlier reasoning.

    turn 0   [ prompt | <think>…</think>5 ]                     one segment
    turn 1   [ prompt, 5, hint | <think>…</think>4 ]            another segment: every turn is trained on its own prompt

If a turn has no reasoning, nothing is removed, so the history continues token for token in the same segment.

The example shows `episode.rewrite(messages)`: a changed history starts a new segment.

    rollout:
      scheduler: examples/schedulers/thinking_tips.py:ThinkingTips
      scheduler_kwargs: {judge: gsm8k, max_tips: 2}
      limits: {max_turns: 3}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyturn import Episode, MultiTurnScheduler, OpenTurn, Task
from polyturn.infra.plugins import import_file
from polyturn.rollout.schedulers.reasoning import without_reasoning

judges = import_file(Path(__file__).with_name("judge.py"))

TIP = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."


class ThinkingTips(MultiTurnScheduler):
    """A scheduler whose user gives hints, over a history without reasoning."""

    stateless = True
    scores_turns = False

    def __init__(
        self, *, tip: str = TIP, max_tips: int = 1, judge: str | judges.Judge = "math", base: Path | None = None
    ) -> None:
        self.tip = tip
        self.max_tips = max_tips
        self._judge = judges.build_judge(judge, base=base)

    def check_task(self, task: Task) -> None:
        """Reject a task without a ground truth."""
        judges.require_truth(task, who="thinking_tips")

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Give a hint, unless the answer is right or all hints were given."""
        num_before = len(episode.turns) - 1
        if num_before >= self.max_tips or judges.is_right(
            await episode.call(self, self._judge, turn.text, episode.task.ground_truth)
        ):
            return None
        messages_seen = tuple(without_reasoning(m) for m in episode.messages)
        if messages_seen != episode.messages:
            episode.rewrite(messages_seen)
        return self.tip
