"""Alarms: detects from a few metrics that training goes wrong, some steps before the reward shows it.

    alarms.feed(31, {"policy/entropy": 0.04, ...})
      ->  [Alarm("entropy_collapse", "step 31: policy/entropy is 0.04, for 3 steps in a row below 20% of ... 0.9: ...")]

One alarm has absolute thresholds: trainer and engine disagree on the log-probabilities of sampled tokens. The position where
the disagreement starts indicates the cause (`diagnose`).

The code is pure: metrics go in, alarms come out. A resumed run feeds in the metrics that are already recorded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmThresholds:
    """Thresholds of the alarms. "Early" is the median over the first `early_steps` steps of the run."""

    early_steps: int = 5
    patience: int = 3
    """Number of steps in a row past a threshold that raise an alarm."""
    silent_steps: int = 10
    """Number of steps in a row with equal rewards in each group that raise an alarm."""
    entropy_share: float = 0.2
    """Alarm if the entropy is below this share of the early entropy."""
    shortest_share: float = 0.3
    """Alarm if the sampled tokens per trajectory are below this share of the early number."""
    longest_factor: float = 3.0
    """Alarm if the sampled tokens per trajectory are above this multiple of the early number."""
    single_turn: float = 1.05
    """Alarm if the mean number of turns is at most this, in a run with at least `multi_turn` early turns."""
    multi_turn: float = 1.5
    tool_errors_rise: float = 0.2
    """Alarm if the share of failed tool calls is above the early share by this much."""
    difference: float = 0.05
    """Alarm above this mean |logprob difference| between trainer and engine, in nats; bfloat16 causes less than a third."""
    difference_p99: float = 0.5
    """Alarm above this 99th percentile of the |logprob difference|, in nats."""
    difference_first_token: float = 0.5
    """Alarm above this mean difference over the first tokens of turns, in nats."""
    k3: float = 0.01
    """Alarm above this KL(engine || trainer): k3 estimate, in nats per token."""
    difference_large: float = 0.5
    """Mean difference in nats above which numerics cannot be the cause."""
    growth: float = 3.0
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

    def __init__(self, thresholds: AlarmThresholds | None = None) -> None:
        self._thresholds = thresholds or AlarmThresholds()
        self._rules = _rules(self._thresholds)
        self._watches = {rule.name: _Watch() for rule in self._rules}
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
        for rule in self._rules:
            value = metrics.get(rule.metric)
            if value is not None and math.isfinite(value) and self._is_news(rule, value):
                early = statistics.median(self._watches[rule.name].early)
                what = f"{self._thresholds.patience} steps in a row " + rule.what.format(early=f"{early:.3g}")
                raised.append(Alarm(rule.name, f"step {step}: {rule.metric} is {value:.3g}, for {what}; {rule.advice}"))
        raised += self._nothing_trained(step, metrics)
        raised += self._no_signal(step, metrics)
        if "policy/rollout_difference" in metrics:
            alarm = diagnose(metrics, self._thresholds)
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
        if self._num_idle != self._thresholds.patience:
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
        if self._num_silent < self._thresholds.silent_steps or self._is_silence_known:
            return []
        self._is_silence_known = True
        what = f"{self._num_silent} steps in a row all rewards of a group were equal: no answer is better than another"
        return [Alarm("no_signal", f"step {step}: {what}; {_for_a_signal(metrics)}")]

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


def diagnose(metrics: Mapping[str, float | None], thresholds: AlarmThresholds | None = None) -> Alarm | None:
    """Return an alarm if trainer and engine disagree on sampled tokens, with the likely cause; None if they agree.

    Args:
        metrics: The metrics policy/rollout_… and buffer/staleness of one step.
        thresholds: The thresholds.
    """
    t = thresholds or AlarmThresholds()

    def number(name: str) -> float:
        value = metrics.get(name)
        return math.nan if value is None else float(value)

    mean, p99, k3 = (number(f"policy/rollout_{n}") for n in ("difference", "difference_p99", "k3"))
    first, rest = (number(f"policy/rollout_difference_{n}_token{s}") for n, s in (("first", ""), ("later", "s")))
    first_turn = number("policy/rollout_difference_turn0")
    later = [v for n in ("turn1", "turn2", "turn3plus") if not math.isnan(v := number(f"policy/rollout_difference_{n}"))]
    latest = max(later, default=math.nan)
    if not (mean > t.difference or p99 > t.difference_p99 or k3 > t.k3 or first > t.difference_first_token):
        return None
    what = f"engine and trainer disagree on sampled tokens by {mean:.3g} nats on average, {p99:.3g} at the 99th percentile"
    if rest <= t.difference and first > t.growth * rest:
        return Alarm(
            "disagreement_scaffold",
            f"{what}: scaffold. The difference is {first:.3g} at the first token of a turn and {rest:.3g} after it, so "
            "the text that opens a turn differs between the two; compare the engine's prompt with the generation prompt "
            "that `polyturn check` shows",
        )
    if first_turn <= t.difference and latest > t.growth * first_turn:
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
    if mean > t.difference_large:
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


def _rules(t: AlarmThresholds) -> tuple[_Rule, ...]:
    length = "tokens/per_trajectory"
    return (
        _Rule(
            "entropy_collapse",
            "policy/entropy",
            lambda value, early: early > 0 and value < t.entropy_share * early,
            f"below {t.entropy_share:.0%} of its early median {{early}}: the policy hardly explores any more",
            "lower train.optim.lr, raise algorithm.loss.clip_high or set algorithm.entropy_coef",
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
            "look at rollout/cut and read some trajectories of this step",
        ),
        _Rule(
            "turns_collapse",
            "rollout/turns",
            lambda value, early: early >= t.multi_turn and value <= t.single_turn,
            "but the early median was {early}: the model no longer uses its turns",
            "check that late correct answers are still rewarded, and look at rollout/tool_calls",
        ),
        _Rule(
            "tool_errors",
            "rollout/tool_errors",
            lambda value, early: value > early + t.tool_errors_rise,
            f"more than {t.tool_errors_rise:g} above its early median {{early}}: more and more tool calls fail",
            "look at the errors in the tool results of this step, and check whether a tool's server is down",
        ),
    )
