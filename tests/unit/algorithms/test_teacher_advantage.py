"""The advantage that a teacher's log-probabilities give, against plain loops in float64."""

import math
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.options import AlgorithmOptions, SelfDistillOptions, ServedTeachersOptions, TeacherAdvantageOptions
from polyturn.algorithms.teacher_advantage import taught, untaught
from polyturn.core.errors import ConfigError, TrainingError
from polyturn.core.sample import SampleId, TrainSample
from support.refusals import refuses

WEIGHTS = [0, 0, 1, 1, 0, 1, 0, 1]
TURNS = [-1, -1, 0, 0, 0, 1, 1, 1]
POLICY = [0, 0, -1.5, -0.25, 0, -3.0, 0, -0.5]
TEACHER = [9, 9, -0.5, -2.25, 9, -0.5, 9, -1.0]
ADVANTAGES = [0, 0, 0.5, 0.5, 0, -1.0, 0, -1.0]


def sample(**changes: Any) -> TrainSample:
    fields: dict[str, Any] = {
        "id": SampleId("g", "t", 0),
        "token_ids": range(8),
        "loss_weights": WEIGHTS,
        "turn_ids": TURNS,
        "old_logprobs": POLICY,
        "advantages": ADVANTAGES,
    }
    return TrainSample(**{name: np.array(value) if name != "id" else value for name, value in (fields | changes).items()})


def expected(*, coef: float, advantage_coef: float, level: str, clip: float) -> list[float]:
    gaps = [max(-clip, min(clip, TEACHER[t] - POLICY[t])) for t in range(8)]
    out = [0.0] * 8
    for t in (t for t in range(8) if WEIGHTS[t]):
        of_turn = [gaps[u] for u in range(8) if WEIGHTS[u] and TURNS[u] == TURNS[t]]
        gap = gaps[t] if level == "token" else math.fsum(of_turn) / len(of_turn)
        out[t] = advantage_coef * ADVANTAGES[t] + coef * gap
    return out


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("advantage_coef", [1.0, 0.0, 0.25])
def test_advantage_equals_the_formula(level: Any, clip: float | None, advantage_coef: float) -> None:
    options = TeacherAdvantageOptions(coef=0.75, advantage_coef=advantage_coef, level=level, clip=clip)
    made = taught(sample(), np.array(TEACHER, np.float64), options)
    want = expected(coef=0.75, advantage_coef=advantage_coef, level=level, clip=clip or math.inf)
    np.testing.assert_allclose(made.sample.advantages, want, rtol=1e-7)
    assert made.gap_sum == sum(t - p for t, p, w in zip(TEACHER, POLICY, WEIGHTS, strict=True) if w)


def test_unjudged_sample_keeps_its_weighted_advantage() -> None:
    kept = untaught(sample(), TeacherAdvantageOptions(advantage_coef=0.5))
    np.testing.assert_allclose(kept.advantages, np.array(ADVANTAGES) / 2)


def test_expected_gradient_is_that_of_the_reverse_kl() -> None:
    rng = np.random.default_rng(0)
    logits_V, teacher_V = rng.normal(size=7), rng.normal(size=7)

    def log_softmax(x_V: np.ndarray) -> np.ndarray:
        return x_V - np.log(np.exp(x_V).sum())

    def kl(x_V: np.ndarray) -> float:
        return float((np.exp(log_softmax(x_V)) * (log_softmax(x_V) - log_softmax(teacher_V))).sum())

    policy_V, options = np.exp(log_softmax(logits_V)), TeacherAdvantageOptions(advantage_coef=0.0)
    gradient_V = np.zeros(7)
    for token in range(7):  # the expectation over what the policy samples, of -advantage * d log policy / d logits
        one = sample(
            token_ids=[0, token], loss_weights=[0, 1], turn_ids=[-1, 0], advantages=[0, 0],
            old_logprobs=[0, log_softmax(logits_V)[token]],
        )  # fmt: skip
        advantage = taught(one, np.array([0, log_softmax(teacher_V)[token]]), options).sample.advantages[1]
        gradient_V -= policy_V[token] * advantage * (np.eye(7)[token] - policy_V)
    numeric_V = [(kl(logits_V + h) - kl(logits_V - h)) / 2e-5 for h in 1e-5 * np.eye(7)]
    np.testing.assert_allclose(gradient_V, numeric_V, atol=1e-6)


@pytest.mark.parametrize("lacking", ["old_logprobs", "advantages"])
def test_sample_without_numbers_is_refused(lacking: str) -> None:
    plain = sample().replace(**{lacking: None})
    refuses(lambda: taught(plain, np.zeros(8), TeacherAdvantageOptions()), TrainingError, lacking)


def test_two_teachers_of_advantages_are_refused() -> None:
    served = ServedTeachersOptions(teachers=())
    with pytest.raises(ConfigError, match=r"self_distill and algorithm\.served_teachers"):
        AlgorithmOptions(self_distill=SelfDistillOptions(privileged="hint"), served_teachers=served)
