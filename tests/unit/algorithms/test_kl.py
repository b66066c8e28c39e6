"""KL estimators where everything can be summed exactly, and the weights of KL and entropy that follow a target."""

import math

import pytest
import torch

from polyturn.algorithms.entropy_target import EntropyController
from polyturn.algorithms.kl import KlController, entropy, k1, k2, k3, kl_estimators
from polyturn.algorithms.options import AlgorithmOptions, KlOptions
from polyturn.core.errors import ConfigError
from support.refusals import refuses

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
KL = float((P * (P / Q).log()).sum())


def expected(estimator) -> float:
    return float((P * estimator(P.log(), Q.log())).sum())


def test_k1_and_k3_are_unbiased_and_k2_is_close():
    assert expected(k1) == pytest.approx(KL)
    assert expected(k3) == pytest.approx(KL)
    assert expected(k2) == pytest.approx(KL, rel=0.1)


def test_estimators_by_hand():
    """log r = ref - policy = ln 2: k1 = -ln 2, k2 = (ln 2)^2 / 2, k3 = 2 - 1 - ln 2."""
    policy, ref = torch.tensor([0.0]), torch.tensor([math.log(2)])
    assert k1(policy, ref).item() == pytest.approx(-math.log(2))
    assert k2(policy, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(policy, ref).item() == pytest.approx(1 - math.log(2))


def test_k3_is_zero_only_where_both_agree():
    x = torch.arange(-50, 51, dtype=torch.float64) / 10
    values = k3(x, torch.zeros_like(x))
    assert (values >= 0).all()
    assert values[50] == 0


def test_k3_pulls_a_token_back_from_any_distance():
    """Its gradient is 1 - r; far on the other side, where e^r would be infinite, it is bounded."""
    policy = torch.tensor([-1.0, -100.0], requires_grad=True)
    values = k3(policy, torch.tensor([-100.0, -1.0]))
    values.sum().backward()
    assert values[0].item() == pytest.approx(98.0) and policy.grad.tolist() == pytest.approx([1.0, 0.0])
    assert torch.isfinite(values).all()


@pytest.mark.parametrize(("estimator", "is_exact"), [(k1, False), (k2, True)])
def test_gradient_of_k2_is_that_of_the_kl(estimator, is_exact):
    """Averaged over samples of the policy itself, with the samples held fixed."""
    logits = P.log().clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - Q.log())).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((P * estimator(logprobs, Q.log())).sum(), logits)
    assert torch.allclose(found, true if is_exact else torch.zeros_like(true), atol=1e-12)


def test_entropy_of_a_uniform_distribution():
    assert entropy(torch.log_softmax(torch.zeros(2, 8), -1)).tolist() == pytest.approx([math.log(8)] * 2)


@pytest.mark.parametrize("name", ["k1", "k3", "abs"])
def test_straight_through_takes_the_gradient_of_the_kl(name):
    logits = P.log().clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    plain, through = kl_estimators.resolve(name), kl_estimators.resolve(f"{name}+")
    assert torch.allclose(through(logprobs, Q.log()), plain(logprobs, Q.log()), atol=1e-12)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - Q.log())).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((P * through(logprobs, Q.log())).sum(), logits)
    assert torch.allclose(found, true, atol=1e-12)


def test_adaptive_weight_follows_its_target():
    """Ziegler et al. 2019, section 2.2: the error is clipped to a fifth and scaled by trajectories over horizon."""
    control = KlController(KlOptions(coef=0.1, target=0.5, horizon=100))
    control.update(0.55, num_trajectories=10)
    assert control.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    control.update(50.0, num_trajectories=10)
    assert control.coef == pytest.approx(0.101 * 1.02)
    control.update(0.0, num_trajectories=10)
    assert control.coef == pytest.approx(0.101 * 1.02 * 0.98)


def test_controller_continues_from_its_state():
    control, later = KlController(KlOptions(coef=0.1, target=0.5)), KlController(KlOptions(coef=0.7, target=0.5))
    control.update(1.0, num_trajectories=1000)
    later.load_state_dict(control.state_dict())
    assert later.coef == control.coef == pytest.approx(0.102)
    fixed = KlController(KlOptions(coef=0.3))
    fixed.update(9.0, num_trajectories=10)
    fixed.load_state_dict(control.state_dict())
    assert fixed.coef == 0.3


def test_adaptive_weight_starts_above_zero():
    refuses(lambda: KlController(KlOptions(coef=0.1, target=0.0)), ConfigError, "target")


def controller(target: float | None = 0.5, *, coef: float = 0.01) -> EntropyController:
    return EntropyController(AlgorithmOptions(entropy_coef=coef, entropy_target=target, entropy_step=0.005))


def test_weight_follows_the_target() -> None:
    made, weights = controller(), []
    for measured in (0.4, 0.3, 0.6, 0.5, 0.9, 0.9, 0.9, 0.1):
        made.update(measured)
        weights.append(made.coef)
    # Above the target it is off and shrinks to 0 underneath; at the target it shrinks and is on.
    assert weights == pytest.approx([0.015, 0.02, 0.0, 0.01, 0.0, 0.0, 0.0, 0.005])


def test_weight_without_target_stays() -> None:
    made = controller(None)
    made.update(9.0)
    assert made.coef == 0.01 and made.state_dict() == {}


def test_weight_resumes() -> None:
    made, again = controller(), controller()
    made.update(0.1)
    made.update(0.9)
    again.load_state_dict(made.state_dict())
    assert again.coef == made.coef == 0.0
    for one in (made, again):
        one.update(0.1)
    assert again.coef == made.coef == pytest.approx(0.015)


def test_target_with_negative_weight_is_refused() -> None:
    refuses(lambda: controller(coef=-0.1), ConfigError, "entropy_target")
