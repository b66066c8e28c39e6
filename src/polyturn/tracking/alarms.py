"""Alarms: detects from a few metrics that training goes wrong, some steps before the reward shows it.

    alarms.feed(31, {"policy/entropy": 0.04, ...})
      ->  [Alarm("entropy_collapse", "step 31: policy/entropy is 0.04, for 3 steps in a row below 20% of ... 0.9: ...")]

One alarm has absolute thresholds: trainer and engine disagree on the log-probabilities of sampled tokens. The position where
the disagreement starts indicates the cause (`diagnose`).

The code is pure: metrics go in, alarms come out. A resumed run feeds in the recorded metrics. `PluginAlarms`
reads trajectories instead, and names failing plug-ins.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polyturn.core.errors import most_common
from polyturn.core.trajectory import RAISED_AT, ToolResult, TrajectoryGroup

EARLY_STEPS = 5
"""Number of first steps of a run whose median is the "early" value of a metric."""
PATIENCE = 3
"""Number of steps in a row past a threshold that raise an alarm."""
SILENT_STEPS = 10
"""Number of steps in a row with equal rewards in each group that raise an alarm."""
ENTROPY_SHARE = 0.2
"""Alarm if the entropy is below this share of the early entropy."""
SHORTEST_SHARE = 0.3
"""Alarm if the sampled tokens per trajectory are below this share of the early number."""
LONGEST_FACTOR = 3.0
"""Alarm if the sampled tokens per trajectory are above this multiple of the early number."""
SINGLE_TURN = 1.05
"""Alarm if the mean number of turns is at most this, in a run with at least `MULTI_TURN` early turns."""
MULTI_TURN = 1.5
TOOL_ERRORS_RISE = 0.2
"""Alarm if the share of failed tool calls is above the early share by this much."""
DIFFERENCE = 0.05
"""Alarm above this mean |logprob difference| between trainer and engine, in nats; bfloat16 causes less than a third."""
DIFFERENCE_P99 = 0.5
"""Alarm above this 99th percentile of the |logprob difference|, in nats."""
DIFFERENCE_FIRST_TOKEN = 0.5
"""Alarm above this mean difference over the first tokens of turns, in nats."""
K3 = 0.01
"""Alarm above this KL(engine || trainer): k3 estimate, in nats per token."""
DIFFERENCE_LARGE = 0.5
"""Mean difference in nats above which numerics cannot be the cause."""
GROWTH = 3.0
"""The disagreement is located after turn 0, or at turns' first tokens, if it is this many times larger there."""


class Alarm(NamedTuple):
    name: str
    message: str


class _Rule(NamedTuple):
    name: str
    metric: str
    is_past: Callable[[float, float], bool]
    """(value, early median) -> whether the value is past the threshold."""
    what: str
    """The threshold and its meaning, for the message; `{early}` is the early median."""
    advice: str


@dataclass(slots=True)
class _Watch:
    early: list[float] = field(default_factory=list)
    num_past: int = 0
    is_raised: bool = False


class Alarms:
    """Watches the metrics of a run."""

    def __init__(self) -> None:
        self._watches = {rule.name: _Watch() for rule in _RULES}
        self._disagreement: str | None = None
        self._num_idle = 0
        """Number of steps in a row without training."""
        self._num_silent = 0
        """Number of steps in a row with equal rewards in each group."""
        self._is_silence_known = False
        """Whether an alarm has already reported these steps."""

    def feed(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Add the metrics of a step and return new alarms; an alarm is raised again only after its metric has recovered.

        A metric that is missing or not finite is ignored in that step.
        """
        raised = []
        for rule in _RULES:
            value = metrics.get(rule.metric)
            if value is not None and math.isfinite(value) and self._is_news(rule, value):
                early = statistics.median(self._watches[rule.name].early)
                what = f"{PATIENCE} steps in a row " + rule.what.format(early=f"{early:.3g}")
                raised.append(Alarm(rule.name, f"step {step}: {rule.metric} is {value:.3g}, for {what}; {rule.advice}"))
        raised += self._nothing_trained(step, metrics)
        raised += self._no_signal(step, metrics)
        if "policy/rollout_difference" in metrics:
            alarm = diagnose(metrics)
            if alarm is not None and alarm.name != self._disagreement:
                raised.append(Alarm(alarm.name, f"step {step}: {alarm.message}"))
            self._disagreement = None if alarm is None else alarm.name
        return raised

    def _nothing_trained(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Return an alarm for steps in a row without an update: no group was left, or all advantages were 0."""
        kept, moved = metrics.get("buffer/samples_kept"), metrics.get("loss/grad_norm")
        if kept is None and moved is None:
            return []
        if kept != 0 and moved != 0:
            self._num_idle = 0
            return []
        self._num_idle += 1
        if self._num_idle != PATIENCE:
            return []
        flat, failed = (int(metrics.get(f"buffer/{n}") or 0) for n in ("groups_zero_variance", "failed_trajectories"))
        reward = metrics.get("reward/mean")
        mean = "" if reward is None else f", the mean reward is {reward:.3g}"
        what = f"{flat} groups have equal rewards, {failed} trajectories failed{mean}"
        self._is_silence_known = flat > 0
        message = (
            f"step {step}: {self._num_idle} steps in a row trained nothing; in this one {what}; {_for_a_signal(metrics)}"
        )
        return [Alarm("nothing_trained", message)]

    def _no_signal(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Return an alarm for rewards that never differ within a group; once, and not if another alarm has reported it."""
        spread = metrics.get("reward/std")
        if spread is None or not math.isfinite(spread):
            return []
        if spread > 0:
            self._num_silent, self._is_silence_known = 0, False
            return []
        self._num_silent += 1
        if self._num_silent < SILENT_STEPS or self._is_silence_known:
            return []
        self._is_silence_known = True
        what = f"{self._num_silent} steps in a row all rewards of a group were equal: no answer is better than another"
        return [Alarm("no_signal", f"step {step}: {what}; {_for_a_signal(metrics)}")]

    def _is_news(self, rule: _Rule, value: float) -> bool:
        watch = self._watches[rule.name]
        if len(watch.early) < EARLY_STEPS:
            watch.early.append(value)
            return False
        if not rule.is_past(value, statistics.median(watch.early)):
            watch.num_past, watch.is_raised = 0, False
            return False
        watch.num_past += 1
        if watch.num_past < PATIENCE or watch.is_raised:
            return False
        watch.is_raised = True
        return True


def _for_a_signal(metrics: Mapping[str, float | None]) -> str:
    """Return advice on how to get different rewards within a group."""
    success = metrics.get("rollout/success")
    read = "read some trajectories and the components of their rewards"
    if success == 0:
        return (
            f"{read}. The policy never succeeds: use easier tasks, a warm start (warm_start.conversations), a reward with "
            "partial credit, or a larger train.group_size"
        )
    if success == 1:
        return f"{read}. The policy always succeeds: use harder tasks, or a reward that distinguishes good answers"
    return f"{read}. Use tasks that the policy solves sometimes, a finer reward, or a larger train.group_size"


def diagnose(metrics: Mapping[str, float | None]) -> Alarm | None:
    """Return an alarm if trainer and engine disagree on sampled tokens, with the likely cause; None if they agree.

    Args:
        metrics: The metrics policy/rollout_… and buffer/staleness of one step.
    """

    def number(name: str) -> float:
        value = metrics.get(name)
        return math.nan if value is None else float(value)

    mean, p99, k3 = (number(f"policy/rollout_{n}") for n in ("difference", "difference_p99", "k3"))
    first, rest = (number(f"policy/rollout_difference_{n}_token{s}") for n, s in (("first", ""), ("later", "s")))
    first_turn = number("policy/rollout_difference_turn0")
    later = [v for n in ("turn1", "turn2", "turn3plus") if not math.isnan(v := number(f"policy/rollout_difference_{n}"))]
    latest = max(later, default=math.nan)
    if not (mean > DIFFERENCE or p99 > DIFFERENCE_P99 or k3 > K3 or first > DIFFERENCE_FIRST_TOKEN):
        return None
    what = f"engine and trainer disagree on sampled tokens by {mean:.3g} nats on average, {p99:.3g} at the 99th percentile"
    if rest <= DIFFERENCE and first > GROWTH * rest:
        return Alarm(
            "disagreement_scaffold",
            f"{what}: scaffold. The difference is {first:.3g} at the first token of a turn and {rest:.3g} after it, so "
            "the text that opens a turn differs between the two; compare the engine's prompt with the generation prompt "
            "that `polyturn check` shows",
        )
    if first_turn <= DIFFERENCE and latest > GROWTH * first_turn:
        return Alarm(
            "disagreement_template",
            f"{what}: template. The difference is {first_turn:.3g} in turn 0 and {latest:.3g} later, so later turns are "
            "trained in another context than they were sampled in: the history is rendered or tokenized again (by a "
            "server's template), or a KV cache is wrong between turns; send token ids, and check all episodes with "
            "rollout.sanity_every: 1",
        )
    staleness = number("buffer/staleness")
    if staleness > 0:
        return Alarm(
            "disagreement_stale",
            f"{what}: stale weights. Tokens were sampled with weights up to {staleness:.0f} versions older than the "
            "trainer's; lower train.max_staleness, or the learning rate",
        )
    if mean > DIFFERENCE_LARGE:
        return Alarm(
            "disagreement_stale",
            f"{what}: stale weights. The difference is equally large in every turn, as if the engine's weights did not "
            "match its version; check that the weight update reaches the engine, and that both start from one checkpoint",
        )
    return Alarm(
        "disagreement_numerics",
        f"{what}: numerics. The difference is small and the same everywhere, as from different kernels, precision or a "
        "quantised cache; use one dtype for both, or keep algorithm.old_logprobs: trainer",
    )


_RULES = (
    _Rule(
        "entropy_collapse",
        "policy/entropy",
        lambda value, early: early > 0 and value < ENTROPY_SHARE * early,
        f"below {ENTROPY_SHARE:.0%} of its early median {{early}}: the policy hardly explores any more",
        "lower train.optim.lr, raise algorithm.loss.clip_high or set algorithm.entropy_coef",
    ),
    _Rule(
        "length_collapse",
        "tokens/per_trajectory",
        lambda value, early: value < SHORTEST_SHARE * early,
        f"below {SHORTEST_SHARE:.0%} of its early median {{early}}: the model has almost stopped writing",
        "read some trajectories of this step, and check that the reward does not favour short answers",
    ),
    _Rule(
        "length_explosion",
        "tokens/per_trajectory",
        lambda value, early: early > 0 and value > LONGEST_FACTOR * early,
        f"above {LONGEST_FACTOR:g} times its early median {{early}}: the model rambles or repeats itself",
        "look at rollout/cut and read some trajectories of this step",
    ),
    _Rule(
        "turns_collapse",
        "rollout/turns",
        lambda value, early: early >= MULTI_TURN and value <= SINGLE_TURN,
        "but the early median was {early}: the model no longer uses its turns",
        "check that late correct answers are still rewarded, and look at rollout/tool_calls",
    ),
    _Rule(
        "tool_errors",
        "rollout/tool_errors",
        lambda value, early: value > early + TOOL_ERRORS_RISE,
        f"more than {TOOL_ERRORS_RISE:g} above its early median {{early}}: more and more tool calls fail",
        "look at the errors in the tool results of this step, and check whether a tool's server is down",
    ),
)


# Alarms about plug-ins: failed trajectories, and tools whose calls all fail, with reasons and lines of code.

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
