"""Metrics of a step's trajectories, under rollout/ reward/ tokens/ tool/ time/ and buffer/.

They are computed from trajectories only, so stored trajectories give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyturn.core.errors import ToolUnavailableError
from polyturn.core.lifecycle import StopReason
from polyturn.core.metrics import Max, Mean, Metrics, Sum, merge
from polyturn.core.reward import as_score
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.evaluation.report import is_success
from polyturn.tools.failures import ToolFailure
from polyturn.tools.results import call_metrics

_ANSWERED = (None, *(kind for kind in ToolFailure if kind.reached_tool))
"""Values of `ToolResult.error` for calls that reached their tool."""
_TAKEN = ("mean", "std", "greedy", "judge_tokens")
"""Names of reward metrics that a number from a reward function must not overwrite."""


def rollout_metrics(groups: Sequence[TrajectoryGroup], *, version: int) -> Metrics:
    """Return the metrics of a step's trajectories, under rollout/ reward/ tokens/ tool/ time/ and buffer/.

    Args:
        groups: The groups of the step.
        version: The trained policy version, for the staleness.
    """
    parts: list[Metrics] = []
    for group in groups:
        totals = [t.reward.total for t in group.trajectories if t.reward is not None]
        if len(totals) > 1:  # unbiased, as in estimators; undefined for a single member
            parts.append({"reward/std": Mean(float(np.std(totals, ddof=1)))})
    for trajectory in (t for g in groups for t in g.trajectories):
        calls = [r for turn in trajectory.turns for r in turn.tool_results]
        one: Metrics = {
            "rollout/turns": Mean(len(trajectory.turns)),
            "rollout/failed": Mean(float(trajectory.is_failed)),
            "rollout/cut": Mean(float(trajectory.stop_reason.is_cut)),
            "rollout/out_of_turns": Mean(float(trajectory.stop_reason is StopReason.MAX_TURNS)),
            f"rollout/stop_{trajectory.stop_reason.value}": Sum(1),
            "tokens/sampled": Sum(trajectory.num_sampled_tokens),
            "tokens/prefilled": Sum(trajectory.metrics.get("prefilled_tokens", 0)),
            "tokens/per_trajectory": Mean(trajectory.num_sampled_tokens),
            "rollout/segments": Mean(len(trajectory.segments)),
            "rollout/segmented": Mean(float(len(trajectory.segments) > 1)),
            "rollout/forks": Sum(trajectory.metrics.get("num_forks", 0)),
            "tokens/dropped_cut": Sum(trajectory.metrics.get("dropped_cut", 0)),
            "tokens/dropped_masked": Sum(num_masked(trajectory)),
            "tokens/replayed": Sum(num_replayed(trajectory)),
            "rollout/tool_calls": Sum(len(calls)),
            "rollout/tool_errors": Mean(sum(c.error is not None for c in calls), len(calls)),
            "rollout/tools_unavailable": Sum(float((trajectory.error or "").startswith(ToolUnavailableError.__name__))),
            "rollout/loop_blocked": Sum(trajectory.metrics.get("loop_blocked", 0)),
            "rollout/loop_blocked_s": Sum(trajectory.metrics.get("loop_blocked_s", 0)),
            "rollout/close_errors": Sum(trajectory.metrics.get("close_errors", 0)),
            "time/tools_s": Sum(trajectory.metrics.get("tools_s", 0)),
            "time/interaction_s": Sum(trajectory.metrics.get("interaction_s", 0)),
        }
        one |= of_others(trajectory)
        if "sanity_checked" in trajectory.metrics:
            kinds = [k for k in trajectory.metrics if k.startswith("sanity_") and k != "sanity_checked"]
            one["tokens/mismatch_rate"] = Mean(float(bool(kinds)))
            one.update({f"tokens/mismatch_{k.removeprefix('sanity_')}": Sum(trajectory.metrics[k]) for k in kinds})
        if trajectory.reward is not None:
            one["reward/mean"] = Mean(trajectory.reward.total)
            one["rollout/success"] = Mean(float(is_success(trajectory)))
            for name, value in trajectory.reward.numbers.items():
                is_taken = name in _TAKEN and name not in trajectory.reward.components
                one[f"reward/own_{name}" if is_taken else f"reward/{name}"] = Mean(value)
        parts += [call_metrics(result) for result in calls]
        versions = [s.policy_version for seg in trajectory.segments for s in seg.spans if s.policy_version is not None]
        if versions:
            one["buffer/staleness"] = Max(float(version - min(versions)))
        parts.append(one)
    return merge([*parts, plugin_times([t for g in groups for t in g.trajectories])])


def state_metrics(groups: Sequence[TrajectoryGroup], *, step_s: float) -> dict[str, float]:
    """Return the mean number of episodes over a step that generated, called tools, or waited for an interaction.

    Computed as the episodes' seconds in that state divided by `step_s`. Greedy members count too.
    """
    trajectories = [t for g in groups for t in (*g.trajectories, g.baseline) if t is not None]
    seconds = {"generating": "generate_s", "tool": "tools_s", "interaction": "interaction_s"}
    return {
        f"rollout/state_{state}": sum(t.metrics.get(name, 0.0) for t in trajectories) / step_s
        for state, name in seconds.items()
    }


def of_others(trajectory: Trajectory) -> Metrics:
    """Return the tokens spent on a trajectory outside its turns: the model's asides, simulated users, judges."""
    infos = [t.info for t in trajectory.turns] + ([] if trajectory.reward is None else [trajectory.reward.info])
    spent = {
        "tokens/asides": trajectory.metrics.get("aside_tokens", 0),
        "rollout/user_tokens": sum(
            _count(t.info.get(name)) for t in trajectory.turns for name in ("user_tokens", "user_prompt_tokens")
        ),
        "reward/judge_tokens": sum(_count(info.get("judge_tokens")) for info in infos),
    }
    return {name: Sum(value) for name, value in spent.items() if value}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and as_score(value) is not None else 0


def plugin_times(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the times of each tool and interaction: time/tool/<name>/p50_s, p99_s and share, time/interaction/<name>/...

    The share is relative to the episodes' total seconds of generation, tools and interactions. Calls that reached no tool
    (unknown, malformed, skipped) are left out.
    """
    seconds: dict[str, list[float]] = {}
    whole = 0.0
    for trajectory in trajectories:
        interaction = trajectory.task.interaction
        for turn in trajectory.turns:
            whole += sum(turn.timings.get(name, 0.0) for name in ("generate", "tools", "interaction"))
            for result in turn.tool_results:
                if result.name and result.error in _ANSWERED:
                    seconds.setdefault(f"time/tool/{result.name}", []).append(result.duration_s)
            if interaction is not None and "interaction" in turn.timings:
                seconds.setdefault(f"time/interaction/{interaction.name}", []).append(turn.timings["interaction"])
    times: Metrics = {}
    for name, taken in seconds.items():
        p50, p99 = np.quantile(taken, (0.5, 0.99))
        times |= {f"{name}/p50_s": Mean(float(p50)), f"{name}/p99_s": Mean(float(p99))}
        if whole > 0:
            times[f"{name}/share"] = Mean(sum(taken) / whole)
    return times


def num_masked(trajectory: Trajectory) -> int:
    """Return the number of sampled tokens without weight, each counted in the segment that trains it."""
    return sum(int(np.count_nonzero(s.sampled_mask & (s.loss_weights == 0))) for s in trajectory.segments)


def num_replayed(trajectory: Trajectory) -> int:
    """Count the sampled tokens that later segments repeat in their prompts, once for each repetition."""
    wrote: list[np.ndarray[Any, Any]] = []
    total = 0
    for segment in trajectory.segments:  # parents precede their branches
        mask = segment.sampled_mask.copy()
        if segment.parent is not None:
            shared = wrote[segment.parent.segment][: segment.parent.length]
            total += int(np.count_nonzero(shared))
            mask[: len(shared)] |= shared
        wrote.append(mask)
    return total


def greedy_metrics(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Return the reward and the cost of the greedy members; empty without any."""
    greedy = [g.baseline for g in groups if g.baseline is not None]
    if not greedy:
        return {}
    rewards = [t.reward.total for t in greedy if t.reward is not None and not t.is_failed]
    return {
        "reward/greedy": Mean(sum(rewards), len(rewards)),
        "tokens/greedy": Sum(sum(t.num_sampled_tokens for t in greedy)),
        "buffer/greedy_failed": Sum(len(greedy) - len(rewards)),
    }
