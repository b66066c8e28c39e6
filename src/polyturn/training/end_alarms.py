"""Alarms about limits that ended most episodes of a step, an evaluation or a rollout.

    step 1: 13 of 16 episodes were cut by rollout.limits.max_tokens_per_turn; a cut turn is not answered: …

Evaluations and rollouts without training raise these alarms too, unlike the alarms over metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import CUT_BY_REQUEST, Trajectory, TrajectoryGroup
from polyturn.evaluation.report import is_success
from polyturn.tracking.alarms import Alarm

MOST_CUT = 0.5
"""Share of episodes (0 to 1) from which on a limit that cuts them raises an alarm."""
MOST_OUT_OF_TURNS = 0.9
"""Share of episodes (0 to 1) from which on using up all turns raises an alarm, if fewer than half of these episodes
succeed."""
BY_REQUEST = "request"
"""Stands for LENGTH if the request of an agent with its own loop set the limit."""
NO_TURN = "no turn"
"""Stands for TIMEOUT if the episode had no completion."""
_CUT = "a cut turn is not answered: no tool runs and no interaction speaks"
_WHAT_TO_DO: Mapping[StopReason | str, str] = {
    StopReason.LENGTH: f"were cut by rollout.limits.max_tokens_per_turn; {_CUT}. Raise rollout.limits.max_tokens_per_turn, "
    "or ask for shorter answers in the prompt",
    BY_REQUEST: "were cut by the max_tokens of the agent's own requests; raise max_tokens in the agent",
    StopReason.MAX_TOKENS: f"ended at rollout.limits.max_tokens; {_CUT}. Raise rollout.limits.max_tokens, or lower "
    "rollout.limits.max_tokens_per_turn",
    StopReason.CONTEXT_FULL: f"filled the context; {_CUT}. Raise rollout.limits.max_context as far as the model allows, "
    "shorten prompts and tool results, or set rollout.limits.context_policy: compact",
    StopReason.TIMEOUT: "ended at rollout.limits.timeout_s; raise it, or look at which tool or interaction is slow "
    "(time/tool/… and time/interaction/…)",
    NO_TURN: "ended at rollout.limits.timeout_s before their first completion; check that the agent, if there is one, "
    "sends its requests to its base_url, and that the engine answers",
    StopReason.MAX_TURNS: "used up rollout.limits.max_turns (or max_user_turns), and fewer than half of them succeeded; "
    "raise it if they need more turns, or read some of them for endless repetition",
}


class EndAlarms:
    """Watches the stop reasons of a run's episodes; each limit is reported once."""

    def __init__(self, *, success_at: float = 1.0) -> None:
        """Begin without alarms; `success_at` is the smallest outcome that counts as success."""
        self._success_at = success_at
        self._raised: set[StopReason | str] = set()

    def resume(self, messages: Sequence[str]) -> None:
        """Read the messages of the alarms that the run has raised; they are not raised again."""
        self._raised.update(reason for reason, text in _WHAT_TO_DO.items() if any(text in message for message in messages))

    def feed(self, groups: Sequence[TrajectoryGroup], *, during: str) -> list[Alarm]:
        """Count finished episodes and return the alarms that they raise.

        Args:
            groups: The episodes.
            during: The phase for messages: "step 3", "eval greedy", "rollout".
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        alarms = []
        for reason, num in Counter(map(_limit_of, trajectories)).items():
            if reason not in _WHAT_TO_DO or reason in self._raised:
                continue
            is_cut = not isinstance(reason, StopReason) or reason.is_cut
            if is_cut:
                is_most = num >= MOST_CUT * len(trajectories)
            else:
                scored = [one for one in trajectories if one.stop_reason is reason and one.reward is not None]
                num_won = sum(is_success(one, at=self._success_at) for one in scored)
                is_most = num >= MOST_OUT_OF_TURNS * len(trajectories) and num_won < len(scored) / 2
            if is_most:
                self._raised.add(reason)
                message = f"{during}: {num} of {len(trajectories)} episodes {_WHAT_TO_DO[reason]}"
                alarms.append(Alarm("cut_episodes" if is_cut else "out_of_turns", message))
        return alarms


def _limit_of(trajectory: Trajectory) -> StopReason | str:
    """Return the stop reason of a trajectory; `BY_REQUEST` if the agent's own request cut the last completion, `NO_TURN` if
    its time was over before the first one."""
    if trajectory.stop_reason is StopReason.TIMEOUT and not trajectory.turns:
        return NO_TURN
    is_cut, last = trajectory.stop_reason is StopReason.LENGTH, trajectory.turns[-1:]
    return BY_REQUEST if is_cut and last and CUT_BY_REQUEST in last[0].info else trajectory.stop_reason
