"""Self-distillation: the policy, with privileged text in its prompt, scores the tokens that it sampled without the text.

    sample     [ prompt                    | sampled, observed, sampled ]     log policy(y_t | x, y_<t)
    teacher    [ prompt + privileged text  | the same ids               ]     log policy(y_t | x, c, y_<t)

    advantage_t <- advantage_coef * advantage_t + coef * (log policy(y_t | x, c, y_<t) - log policy(y_t | x, y_<t))

The privileged text c is a hint, a demonstration or the environment's feedback. It is appended to the prompt's last user
message, and only the ids up to the end of that message are new: all later ids stay as sampled and observed. The message is
encoded as text of the environment, so neither c nor the task's text can become a control token.

Sources: SDPO (Hübotter et al. 2026, arXiv 2601.20802), where c is feedback or a successful attempt of the group and the
advantages mix as above; OPSD (Zhao et al. 2026, arXiv 2601.18734), where c is the solution; prime-rl's `opsd`, TRL's `sdpo`
and `sdft`. `level: turn` takes the mean over a turn, as AgentOPSD (Wang et al. 2026, arXiv 2608.05987) aggregates token
differences into turns. Differences from these papers: OPSD compares whole distributions and SDPO the most likely tokens;
this module compares the sampled token. SDPO's teacher is a slow average of the policy; here it is the policy at the start of
the step. AgentOPSD updates a belief over turns and reweights the outcome's advantage with it; this module adds the mean.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from polyturn.algorithms.options import SelfDistillOptions
from polyturn.algorithms.teacher_advantage import Score, taught, untaught
from polyturn.core.arrays import Ids, joined_support
from polyturn.core.errors import DataError, TrainingError, did_you_mean, errors_at, plugin_errors_as
from polyturn.core.messages import Message, Origin
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

Privileged = Callable[[Trajectory, TrajectoryGroup], str | None]
"""(a trajectory, its group) -> the privileged text, or None."""
Encode = Callable[[Task], Ids]
"""A task -> the ids of its prompt and the generation prompt, as rollouts encode them."""
Skipped = Literal["without_privileged", "other_prompt", "too_long"]
"""Reasons why the policy does not score a sample."""

_WARNINGS: dict[Skipped, str] = {
    "other_prompt": "do not start with the prompt of their task (an edited history, a branch, media, or a scheduler with "
    "other prompts)",
    "too_long": "do not fit the model's context with the privileged text; lower rollout.limits.max_context, or shorten the "
    "text",
}


class SelfDistillation:
    """Adds to advantages the policy's scores with privileged text."""

    def __init__(
        self, options: SelfDistillOptions, *, privileged: Privileged | None, encode: Encode, max_positions: int
    ) -> None:
        """Score with `options`.

        Args:
            options: The weights, the level and the template.
            privileged: Returns the text for a trajectory; None reads the column of the row.
            encode: Encodes a task's prompt as the run's rollouts do.
            max_positions: Largest length of a sequence for the model, in tokens.
        """
        self._options, self._privileged, self._encode = options, privileged, encode
        self._max_positions = max_positions
        self._has_warned: set[str] = set()

    def apply(
        self, groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample], *, score: Score
    ) -> tuple[list[TrainSample], Metrics]:
        """Return the samples with changed advantages, and the metrics of the step.

        A sample that cannot be scored keeps the estimator's advantage, times `advantage_coef`, and is counted.

        Raises:
            DataError: a row has no privileged text, or no user message that the text can join.
            TrainingError: the function for the text raised, or did not return text.
        """
        origin = {(g.id, t.id): (t, g) for g in groups for t in g.trajectories}
        privileged: dict[int, TrainSample] = {}
        skipped: Counter[Skipped] = Counter()
        for index, sample in enumerate(samples):
            trajectory, group = origin[sample.id.group, sample.id.trajectory]
            result = self._with_privileged(sample, trajectory, group) if sample.num_weighted else None
            if isinstance(result, TrainSample):
                privileged[index] = result
            elif result is not None:
                skipped[result] += 1
        self._warn(skipped, len(samples))
        scores = dict(zip(privileged, score(list(privileged.values())) if privileged else [], strict=True))
        out, gap_sum, num_tokens = [], 0.0, 0
        for index, sample in enumerate(samples):
            if index not in scores:
                out.append(untaught(sample, self._options))
                continue
            # The ids from the first trained token on are the same, so align both from the end.
            teacher_T = np.zeros(len(sample), np.float32)
            tail = len(sample) - int(np.argmax(sample.loss_weights != 0))
            teacher_T[-tail:] = scores[index][-tail:]
            taught_sample = taught(sample, teacher_T, self._options)
            out.append(taught_sample.sample)
            gap_sum, num_tokens = gap_sum + taught_sample.gap_sum, num_tokens + sample.num_weighted
        return out, {
            "policy/teacher_gap": Mean(gap_sum, num_tokens),
            "buffer/samples_taught": Sum(len(privileged)),
            "buffer/samples_without_privileged": Sum(skipped["without_privileged"]),
            "buffer/samples_other_prompt": Sum(skipped["other_prompt"]),
            "buffer/samples_privileged_too_long": Sum(skipped["too_long"]),
        }

    def _with_privileged(self, sample: TrainSample, trajectory: Trajectory, group: TrajectoryGroup) -> TrainSample | Skipped:
        """Return the sample with the privileged text in its prompt, or the reason why there is none."""
        task = trajectory.task
        text = self._text(trajectory, group)
        if text is None:
            return "without_privileged"
        prompt_P, with_text_Q = self._encode(task), self._encode(privileged_task(task, text))
        # The ids after the user message, such as the generation prompt, are the same in both prompts, but may differ in a
        # segment that renders the history again. So only the ids before them are compared with the sample.
        tail = _common_tail(prompt_P, with_text_Q)
        start, new_start = len(prompt_P) - tail, len(with_text_Q) - tail
        if sample.media or not np.array_equal(sample.token_ids[:start], prompt_P[:start]):
            return "other_prompt"
        if new_start + len(sample) - start > self._max_positions:
            return "too_long"
        blank = np.zeros(new_start)
        return TrainSample(
            id=sample.id,
            token_ids=np.concatenate([with_text_Q[:new_start], sample.token_ids[start:]]),
            loss_weights=np.concatenate([blank, sample.loss_weights[start:]]),
            turn_ids=np.concatenate([blank - 1, sample.turn_ids[start:]]),
            temperature=sample.temperature,
            # Both log-probabilities are normalised over the same tokens.
            support=None
            if sample.support is None
            else joined_support([(new_start, None), (len(sample) - start, sample.support[start:])]),
        )

    def _text(self, trajectory: Trajectory, group: TrajectoryGroup) -> str | None:
        """Return the text to append to the prompt; None if it is missing and the option `missing` is skip."""
        if self._privileged is None:
            return text_of_row(trajectory.task, self._options)
        with plugin_errors_as(f"algorithm.self_distill.privileged {self._options.privileged!r}", TrainingError):
            text = self._privileged(trajectory, group)
        with errors_at(self._privileged):
            return _in_template(text, trajectory.task, self._options)

    def _warn(self, skipped: Counter[Skipped], num_samples: int) -> None:
        """Log, once per cause, samples that were not scored for a reason other than a missing text."""
        for reason, sentence in _WARNINGS.items():
            if skipped[reason] and reason not in self._has_warned:
                self._has_warned.add(reason)
                logger.warning(
                    "algorithm.self_distill: %d of %d samples %s; they keep the estimator's advantage",
                    skipped[reason], num_samples, sentence,
                )  # fmt: skip


def text_of_row(task: Task, options: SelfDistillOptions) -> str | None:
    """Return the text of the row's privileged column in the template; None if it is missing and `options.missing` is skip.

    Raises:
        DataError: the text is missing, or is not text.
    """
    column = str(options.privileged)
    return _in_template(task.ground_truth if column == "ground_truth" else task.extra.get(column), task, options)


def _in_template(text: object, task: Task, options: SelfDistillOptions) -> str | None:
    name = str(options.privileged)
    if text is not None and not isinstance(text, str):
        raise DataError(f"row {task.id!r} has {type(text).__name__} in {name!r} as its privileged text; give text")
    if text:
        return options.template.replace("{privileged}", text)
    if options.missing == "skip":
        return None
    hint = did_you_mean(name, task.extra) if task.extra and ":" not in name and name not in task.extra else ""
    raise DataError(
        f"row {task.id!r} has no privileged text in {name!r}; add it to the row, or set algorithm.self_distill.missing to "
        f"skip.{hint}"
    )


def privileged_task(task: Task, text: str) -> Task:
    """Return the task with `text` appended to its last user message, which is then encoded as text of the environment.

    Raises:
        DataError: the prompt has no user message.
    """
    index = max((i for i, message in enumerate(task.prompt) if message.role == "user"), default=None)
    if index is None:
        raise DataError(f"the prompt of row {task.id!r} has no user message to append the privileged text to; add one")
    message: Message = task.prompt[index]
    content = message.content
    joined = f"{content}\n\n{text}" if isinstance(content, str) else (*content, {"type": "text", "text": f"\n\n{text}"})
    changed = dataclasses.replace(message, content=joined, origin=Origin.ENVIRONMENT)
    return dataclasses.replace(task, prompt=(*task.prompt[:index], changed, *task.prompt[index + 1 :]))


def _common_tail(one: Ids, other: Ids) -> int:
    """Return the length of the common suffix of two sequences of ids."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[len(one) - size :][::-1] != other[len(other) - size :][::-1])
    return int(differs[0]) if len(differs) else size
