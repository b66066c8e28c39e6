"""EpisodeRecord: what an episode and its forks leave together, of which the trajectory is made.

    turns     of all lines, in the order in which they were completed
    prompt    what the model was shown first
    counts    tokens that were cut away, asides, seconds      ->  metrics

Separate from the conversation, of which every fork has its own: a trajectory has one record, whoever wrote it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyturn.core.errors import SchedulerError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import MAX_REWARD, as_score, shown
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Trajectory
from polyturn.rollout.clock import EpisodeClock
from polyturn.rollout.open_turn import OpenTurn


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """The record of one episode while it is being written."""

    turns: list[OpenTurn] = field(default_factory=list)
    """All turns, in the order in which they were completed."""
    prompt: tuple[Message, ...] | None = None
    """What the model was shown first, once it was; the task's own unless a plug-in changed it."""
    prompt_tokens: int = 0
    num_cut: int = 0
    """Sampled tokens that were cut away."""
    num_asides: int = 0
    """Completions of asides, which are no turns."""
    aside_tokens: int = 0
    """Tokens that those had."""
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    """How long it has been going on."""
    began: float = field(default_factory=time.monotonic)
    """On the monotonic clock; moved back by the seconds that an earlier process spent."""

    @property
    def duration_s(self) -> float:
        """Seconds since the episode began, whoever it waited for, the time between two processes left out."""
        return time.monotonic() - self.began

    @property
    def num_sampled(self) -> int:
        """Tokens that its completions had, asides included."""
        return sum(len(turn.completion.token_ids) for turn in self.turns) + self.aside_tokens

    def check_scores(self) -> None:
        """Check what plug-ins scored the turns with.

        Raises:
            SchedulerError: a score is no finite number.
        """
        for turn in self.turns:
            for name, score in turn.scores.items():
                if not isinstance(score, bool | int | float | np.number) or as_score(score) is None:
                    raise SchedulerError(
                        f"turn {turn.index} has the score {name}={shown(score)}; it must be a finite number of "
                        f"at most {MAX_REWARD:g}"
                    )
                turn.scores[name] = float(score)

    def metrics(self, *, num_forks: int, context_tokens: int) -> dict[str, float]:
        """Return its figures by name; those of things that did not happen are left out.

        Args:
            num_forks: How many forks the episode has.
            context_tokens: What the episode's own history holds at its end.
        """
        turns = self.turns
        metrics: dict[str, float] = {
            "num_turns": len(turns),
            "sampled_tokens": sum(len(t.completion.token_ids) for t in turns),
            "prompt_tokens": self.prompt_tokens,
            "context_tokens": context_tokens,
            "duration_s": self.duration_s,
        }
        if self.num_cut:
            metrics["dropped_cut"] = self.num_cut
        if num_forks:
            metrics["num_forks"] = num_forks
        if self.num_asides:
            metrics |= {"num_asides": self.num_asides, "aside_tokens": self.aside_tokens}
        for name in ("generate", "tools", "interaction"):
            metrics[f"{name}_s"] = sum(t.timings.get(name, 0.0) for t in turns)
        metrics["prefilled_tokens"] = sum(t.completion.info.get("prefilled_tokens", 0) for t in turns)
        return metrics

    def trajectory(
        self,
        task: Task,
        *,
        id: str,
        segments: Sequence[Segment],
        stop_reason: StopReason,
        error: str | None,
        metrics: Mapping[str, float],
    ) -> Trajectory:
        """Return the trajectory, without its reward; its task has the prompt that the model was shown."""
        shown = self.prompt
        return Trajectory(
            id=id,
            task=task if shown in (None, task.prompt) else dataclasses.replace(task, prompt=shown),
            segments=tuple(segments),
            turns=tuple(t.freeze() for t in self.turns),
            stop_reason=stop_reason,
            error=error,
            metrics=metrics,
        )

    def state(self) -> dict[str, Any]:
        """Return all that it holds but the turns, for `restore`, of an episode without forks."""
        return {
            "prompt": self.prompt,
            "prompt_tokens": self.prompt_tokens,
            "num_cut": self.num_cut,
            "elapsed_s": self.clock.elapsed_s,
            "duration_s": self.duration_s,
        }

    def restore(self, state: Mapping[str, Any], turns: Sequence[OpenTurn]) -> None:
        """Stand where the record stood that `state` was taken of; the clock goes on from there."""
        self.prompt = None if state["prompt"] is None else tuple(state["prompt"])
        self.prompt_tokens, self.num_cut = state["prompt_tokens"], state["num_cut"]
        self.clock.set(state["elapsed_s"])
        self.began = time.monotonic() - state["duration_s"]
        self.turns = list(turns)
