"""Alarms about plug-ins: failed trajectories, and tools whose calls all fail, with reasons and lines of code.

step 3: 7 of 8 trajectories failed and are left out of the loss; 7 times: InteractionError: interaction 'tutor':
generate_response raised ZeroDivisionError: division by zero (tutor.py, line 12)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from polyturn.core.errors import most_common
from polyturn.core.trajectory import RAISED_AT, ToolResult, TrajectoryGroup
from polyturn.tracking.alarms import Alarm

MAX_FAILED = 0.1
"""Largest share of failed trajectories in a step without an alarm."""
MIN_CALLS = 8
"""Number of failed calls of a tool in a row that raise an alarm."""
MODELS_OWN = ("unknown_tool", "bad_json", "schema", "skipped")
"""Kinds of failed calls that did not reach a tool."""


@dataclass(slots=True)
class _Tool:
    num_failed: int = 0
    """Number of failed calls in a row."""
    is_raised: bool = False


class PluginAlarms:
    """Watches the trajectories of a run."""

    def __init__(self) -> None:
        self._tools: dict[str, _Tool] = {}
        self._is_raised = False

    def feed(self, step: int, groups: Sequence[TrajectoryGroup]) -> list[Alarm]:
        """Add the trajectories of a step and return new alarms; an alarm is raised again only after the failures stop."""
        return [*self._failures(step, groups), *self._calls(step, groups)]

    def _failures(self, step: int, groups: Sequence[TrajectoryGroup]) -> list[Alarm]:
        trajectories = [t for g in groups for t in g.trajectories]
        failed = [t for t in trajectories if t.is_failed]
        was_raised, self._is_raised = self._is_raised, len(failed) > MAX_FAILED * len(trajectories)
        if was_raised or not self._is_raised:
            return []
        reasons = Counter((t.error or t.stop_reason.value).replace(t.id, "…") for t in failed)
        share = f"{len(failed)} of {len(trajectories)} trajectories failed and are left out of the loss"
        message = f"{share}; {most_common(reasons, 3)}"
        return [Alarm("failed_trajectories", f"step {step}: {message}")]

    def _calls(self, step: int, groups: Sequence[TrajectoryGroup]) -> list[Alarm]:
        raised = []
        results = (r for g in groups for t in g.trajectories for turn in t.turns for r in turn.tool_results)
        for result in results:
            if result.error in MODELS_OWN:
                continue
            tool = self._tools.setdefault(result.name, _Tool())
            if result.error is None:
                tool.num_failed, tool.is_raised = 0, False
                continue
            tool.num_failed += 1
            if tool.num_failed >= MIN_CALLS and not tool.is_raised:
                tool.is_raised = True
                raised.append(Alarm("failing_tool", _sentence(step, result, tool.num_failed)))
        return raised


def _sentence(step: int, result: ToolResult, count: int) -> str:
    where = f" ({result.metrics[RAISED_AT]})" if RAISED_AT in result.metrics else ""
    return (
        f"step {step}: the latest {count} calls of the tool {result.name!r} all failed; the last one: "
        f"{' '.join(str(result.content).split())[:300]}{where}"
    )
