"""Alarms: a policy that goes wrong shows it in a few numbers, some steps before the reward does.

    alarms.feed(31, {"policy/entropy": 0.04, ...})
      ->  [Alarm("entropy_collapse", "step 31: policy/entropy is 0.04, for 3 steps in a row below 20 % of ... 0.9: ...")]

Separate and pure: it is fed metrics and returns warnings, and whoever owns the run decides what to do with them. A resumed
run is brought up to date by feeding it the metrics that are already written down.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmThresholds:
    """When to warn. "Early" is the median over the first `early_steps` steps of the run."""

    early_steps: int = 5
    patience: int = 3
    """An alarm is raised after this many steps in a row past its threshold."""
    entropy_share: float = 0.2
    """Entropy below this share of the early one."""
    shortest_share: float = 0.3
    """Sampled tokens per trajectory below this share of the early number."""
    longest_factor: float = 3.0
    """Sampled tokens per trajectory above this many times the early number."""
    single_turn: float = 1.05
    """Mean turns at most this much, in a run whose episodes had at least `multi_turn` turns early."""
    multi_turn: float = 1.5
    tool_errors_rise: float = 0.2
    """The share of failed tool calls, above the early one by this much."""


class Alarm(NamedTuple):
    """A warning."""

    name: str
    message: str


class _Rule(NamedTuple):
    name: str
    metric: str
    is_past: Callable[[float, float], bool]
    """(value, early median) -> whether it is past the threshold."""
    what: str
    """Says what that means; `{early}` is the early median."""
    look: str


@dataclass(slots=True)
class _Watch:
    early: list[float] = field(default_factory=list)
    num_past: int = 0
    is_raised: bool = False


class Alarms:
    """Watches the metrics of a run."""

    def __init__(self, thresholds: AlarmThresholds | None = None) -> None:
        self._thresholds = thresholds or AlarmThresholds()
        self._rules = _rules(self._thresholds)
        self._watches = {rule.name: _Watch() for rule in self._rules}

    def feed(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Take in the metrics of a step and return the alarms that it raises; each once, until its number has recovered.

        A metric that is missing or not finite says nothing in that step.
        """
        raised = []
        for rule in self._rules:
            value = metrics.get(rule.metric)
            if value is not None and math.isfinite(value) and self._is_news(rule, value):
                early = statistics.median(self._watches[rule.name].early)
                what = f"{self._thresholds.patience} steps in a row " + rule.what.format(early=f"{early:.3g}")
                raised.append(Alarm(rule.name, f"step {step}: {rule.metric} is {value:.3g}, for {what}; {rule.look}"))
        return raised

    def _is_news(self, rule: _Rule, value: float) -> bool:
        watch = self._watches[rule.name]
        if len(watch.early) < self._thresholds.early_steps:
            watch.early.append(value)
            return False
        if not rule.is_past(value, statistics.median(watch.early)):
            watch.num_past, watch.is_raised = 0, False
            return False
        watch.num_past += 1
        if watch.num_past < self._thresholds.patience or watch.is_raised:
            return False
        watch.is_raised = True
        return True


def _rules(t: AlarmThresholds) -> tuple[_Rule, ...]:
    length = "tokens/per_trajectory"
    return (
        _Rule(
            "entropy_collapse",
            "policy/entropy",
            lambda value, early: early > 0 and value < t.entropy_share * early,
            f"below {t.entropy_share:.0%} of its early median {{early}}: the policy hardly explores any more",
            "lower train.optim.lr, raise algorithm.clip_high or set algorithm.entropy_coef",
        ),
        _Rule(
            "length_collapse",
            length,
            lambda value, early: value < t.shortest_share * early,
            f"below {t.shortest_share:.0%} of its early median {{early}}: the model has almost stopped writing",
            "read some trajectories of this step, and check that the reward does not favour short answers",
        ),
        _Rule(
            "length_explosion",
            length,
            lambda value, early: early > 0 and value > t.longest_factor * early,
            f"above {t.longest_factor:g} times its early median {{early}}: the model rambles or repeats itself",
            "look at rollout/truncated and read some trajectories of this step",
        ),
        _Rule(
            "turns_collapse",
            "rollout/turns",
            lambda value, early: early >= t.multi_turn and value <= t.single_turn,
            "where the early median was {early}: the model no longer uses its turns",
            "check that a reward for a late correct answer is left, and look at rollout/tool_calls",
        ),
        _Rule(
            "tool_errors",
            "rollout/tool_errors",
            lambda value, early: value > early + t.tool_errors_rise,
            f"more than {t.tool_errors_rise:g} above its early median {{early}}: more and more tool calls fail",
            "look at the errors in the tool results of this step, and whether a tool's server is down",
        ),
    )
