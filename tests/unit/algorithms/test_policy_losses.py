"""Every policy loss against its definition, written out token by token in plain Python, with its gradient in float64."""

import math

import numpy as np
import pytest
import torch

from polyturn.algorithms.losses import MAX_LOG_RATIO, TokenLoss, bind, policy_losses, selection_of, takes_option
from polyturn.algorithms.losses.covariance import choose_largest, choose_within, covariance
from polyturn.core.errors import ConfigError, TrainingError
from support.refusals import refuses

SEQUENCES = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
LOW, HIGH = 0.2, 0.28


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def sequence_of(t: int) -> list[int]:
    return next(s for s in SEQUENCES if t in s)


def ppo_clip(new, old, adv, t, marks):
    r = math.exp(new[t] - old[t])
    return -min(r * adv[t], clip(r, 1 - LOW, 1 + HIGH) * adv[t])


def policy_gradient(new, old, adv, t, marks):
    return -adv[t] * new[t]


def cispo(new, old, adv, t, marks, frozen):
    return -clip(math.exp(frozen[t] - old[t]), 1 - LOW, 1 + HIGH) * adv[t] * new[t]


def sapo(new, old, adv, t, marks):
    r = math.exp(new[t] - old[t])
    tau = 1.0 if adv[t] > 0 else 1.05
    return -adv[t] * 4 / tau / (1 + math.exp(-tau * (r - 1)))


def gspo_sequence(new, old, adv, t, marks):
    s = math.exp(mean(new[i] - old[i] for i in sequence_of(t)))
    return -min(s * adv[t], clip(s, 1 - LOW, 1 + HIGH) * adv[t])


def gspo(new, old, adv, t, marks, frozen):
    s = math.exp(mean(frozen[i] - old[i] for i in sequence_of(t))) * math.exp(new[t] - frozen[t])
    return -min(s * adv[t], clip(s, 1 - LOW, 1 + HIGH) * adv[t])


def geo_mean(new, old, adv, t, marks):
    logs = []
    for i in sequence_of(t):
        sign = 1 if adv[i] >= 0 else -1
        ratio = new[i] - old[i]
        logs.append(sign * min(sign * ratio, sign * clip(ratio, -LOW, HIGH)))
    return -mean(adv[i] for i in sequence_of(t)) * math.exp(mean(logs))


def clip_cov(new, old, adv, t, marks):
    return 0.0 if marks[t] else ppo_clip(new, old, adv, t, marks)


def kl_cov(new, old, adv, t, marks):
    return -adv[t] * math.exp(new[t] - old[t]) + marks[t] * abs(new[t] - old[t])


def _moved_on(new, old, adv, t, how_far) -> bool:
    """Whether the advantage pushes a token further that is already beyond its bound."""
    pushed_on = adv[t] * (new[t] - old[t]) > 0
    return pushed_on and how_far > (HIGH if adv[t] > 0 else LOW)


def dppo_tv(new, old, adv, t, marks, frozen):
    if _moved_on(frozen, old, adv, t, abs(math.exp(frozen[t]) - math.exp(old[t]))):
        return 0.0
    return -min(math.exp(frozen[t] - old[t]), 20.0) * adv[t] * new[t]


def dppo_kl(new, old, adv, t, marks, frozen):
    p, q = math.exp(frozen[t]), math.exp(old[t])
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    if _moved_on(frozen, old, adv, t, divergence):
        return 0.0
    return -min(math.exp(frozen[t] - old[t]), 20.0) * adv[t] * new[t]


def dro(new, old, adv, t, marks):
    return -(adv[t] * new[t] - 0.05 * (new[t] - old[t]) ** 2)


def vespo(new, old, adv, t, marks, frozen):
    w = math.exp(sum(frozen[i] - old[i] for i in sequence_of(t)))
    k, decay = (2.0, 3.0) if adv[t] >= 0 else (3.0, 2.0)
    return -(w**k) * math.exp(decay * (1 - w)) * adv[t] * new[t]


def none(new, old, adv, t, marks):
    return 0.0


DEFINITIONS = {
    "ppo_clip": ppo_clip,
    "dapo": ppo_clip,
    "policy_gradient": policy_gradient,
    "gpg": policy_gradient,
    "cispo": cispo,
    "sapo": sapo,
    "gspo": gspo,
    "gspo_sequence": gspo_sequence,
    "luspo": gspo_sequence,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "vespo": vespo,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "none": none,
}
FREEZES = {"cispo", "gspo", "dppo_tv", "dppo_kl", "vespo"}
"""Their definitions hold a copy of the log-probabilities that has no gradient."""


def arrays(seed: int):
    rng = np.random.default_rng(seed)
    old = np.minimum(rng.normal(-2, 1, 12), -0.4)
    return np.minimum(old + rng.normal(0, 0.3, 12), -0.01), old, rng.normal(size=12), (rng.random(12) < 0.3).astype(float)


def defined(name: str, new, old, adv, t, marks, frozen) -> float:
    told = {"frozen": frozen} if name in FREEZES else {}
    return DEFINITIONS[name](new, old, adv, t, marks, **told)


def of_library(name: str, new, old, adv, marks):
    found = policy_losses.resolve(name)
    bounds = {n: v for n, v in (("clip_low", LOW), ("clip_high", HIGH)) if takes_option(found, n)}
    loss = bind(found, kwargs=bounds)
    leaf = torch.tensor(new, requires_grad=True)
    sequence = torch.tensor([SEQUENCES.index(sequence_of(t)) for t in range(len(new))])
    return leaf, loss(leaf, torch.tensor(old), torch.tensor(adv), sequence, torch.tensor(marks))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "options"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, {}),  # on policy: -A, and its gradient is -A
        (1.1, 1.0, -1.1, -1.1, 0, {}),  # inside the range
        (1.5, 1.0, -1.28, 0.0, 1, {}),  # above 1 + clip_high with A > 0: no gradient
        (0.5, 1.0, -0.5, -0.5, 0, {}),  # below the range with A > 0: the minimum is the open term
        (0.5, -1.0, 0.8, 0.0, 1, {}),  # below 1 - clip_low with A < 0: no gradient
        (1.5, -1.0, 1.5, 1.5, 0, {}),  # above the range with A < 0: the open term again
        (10.0, -1.0, 3.0, 0.0, 1, {"dual_clip": 3.0}),  # it bounds the loss of a negative advantage alone
        (2.0, -1.0, 2.0, 2.0, 0, {"dual_clip": 3.0}),
        (10.0, 1.0, -1.28, 0.0, 1, {"dual_clip": 3.0}),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, gradient, clipped, options):
    """Schulman et al. 2017, equation 7 and figure 1, with the bounds [1 - 0.2, 1 + 0.28] of DAPO; Ye et al. 2020, equation
    5."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    loss_of = bind(policy_losses.resolve("ppo_clip"), kwargs={"clip_low": LOW, "clip_high": HIGH, **options})
    found = loss_of(new, old, torch.tensor([advantage], dtype=torch.float64), torch.zeros(1))
    found.loss_T.sum().backward()
    assert found.loss_T.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(gradient)
    assert found.stats["clip_fraction"].item() == clipped
    assert found.stats["ratio"].item() == pytest.approx(ratio)


def test_every_loss_has_a_definition_here():
    own = {name for name in policy_losses if policy_losses.resolve(name).__module__.startswith("polyturn.algorithms")}
    assert own == set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_of_each_token_is_its_definition(name, seed):
    new, old, adv, marks = arrays(seed)
    _, found = of_library(name, new, old, adv, marks)
    expected = [defined(name, new, old, adv, t, marks, new) for t in range(12)]
    assert found.loss_T.tolist() == pytest.approx(expected, abs=1e-12)
    assert all(not v.requires_grad and v.shape == (12,) for v in found.stats.values())


@pytest.mark.parametrize("name", DEFINITIONS)
def test_gradient_is_that_of_the_definition(name):
    """Central differences of the weighted sum; weights are those of a mean over sequences."""
    new, old, adv, marks = arrays(3)
    weights = np.array([1 / len(sequence_of(t)) / len(SEQUENCES) for t in range(12)])
    leaf, found = of_library(name, new, old, adv, marks)
    (found.loss_T * torch.tensor(weights)).sum().backward()
    for i in range(12):
        sides = []
        for step in (1e-6, -1e-6):
            moved = new.copy()
            moved[i] += step
            sides.append(sum(weights[t] * defined(name, moved, old, adv, t, marks, new) for t in range(12)))
        assert leaf.grad[i].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_on_policy_loss_has_the_plain_policy_gradient(name):
    """With a ratio of 1 and one advantage a sequence: -A times the gradient of the log-probability."""
    new, _, _, _ = arrays(4)
    adv = np.array([[0.7, -1.3, 0.4, 1.1][SEQUENCES.index(sequence_of(t))] for t in range(12)])
    leaf, found = of_library(name, new, new, adv, np.zeros(12))
    found.loss_T.sum().backward()
    assert leaf.grad.tolist() == pytest.approx((0 * adv if name == "none" else -adv).tolist(), abs=1e-12)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_extreme_ratio_stays_finite(name):
    new, old, adv, marks = arrays(5)
    leaf, found = of_library(name, new.astype(np.float32), (old - 1e4).astype(np.float32), adv.astype(np.float32), marks)
    found.loss_T.sum().backward()
    assert torch.isfinite(found.loss_T).all() and torch.isfinite(leaf.grad).all()
    assert math.exp(MAX_LOG_RATIO) < 3e38


def test_ratio_beyond_its_bound_has_no_gradient():
    """Where A < 0 and r is large, PPO clips nothing, and this token's gradient would be 5e8 times that of another."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss_T = policy_losses.resolve("ppo_clip")(logprobs, torch.tensor([-22.0, -1.0]), torch.tensor([-1.0, -1.0])).loss_T
    loss_T.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 1.0]


def test_kl_cov_pulls_a_marked_token_back_from_any_distance():
    logprobs = torch.tensor([-1.0, -40.0], requires_grad=True)
    options = {"marks_T": torch.ones(2), "ppo_kl_coef": 0.5}
    loss_T = policy_losses.resolve("kl_cov")(logprobs, torch.tensor([-40.0, -1.0]), torch.zeros(2), **options).loss_T
    loss_T.sum().backward()
    assert loss_T.tolist() == [19.5, 19.5] and logprobs.grad.tolist() == [0.5, -0.5]


def test_forms_of_gspo_agree_for_one_advantage_a_sequence():
    """Zheng et al. 2025, section 4.3."""
    new, old, _, marks = arrays(6)
    adv = np.array([[0.7, -1.3, 0.4, 1.1][SEQUENCES.index(sequence_of(t))] for t in range(12)])
    grads = []
    for name in ("gspo", "gspo_sequence"):
        leaf, found = of_library(name, new, old, adv, marks)
        found.loss_T.sum().backward()
        grads.append(leaf.grad)
    assert torch.allclose(grads[0], grads[1], atol=1e-12)


def test_clip_cov_marks_tokens_of_a_band():
    """Cui et al. 2025, equation 10: a share of all tokens, at least one, drawn from those with lb < c < ub."""
    rng = np.random.default_rng(0)
    old, adv = rng.normal(-2, 1, 1000), rng.normal(size=1000)
    value = covariance(old, adv)
    assert value == pytest.approx([(a - adv.mean()) * (o - old.mean()) for a, o in zip(adv, old, strict=True)])
    marked = choose_within(old, adv, np.random.default_rng(1), clip_cov_ratio=0.01, clip_cov_lb=0.5, clip_cov_ub=2.0)
    assert marked.sum() == 10 and ((value[marked] > 0.5) & (value[marked] < 2.0)).all()
    assert choose_within(old, adv, np.random.default_rng(1), clip_cov_ratio=0.0).sum() == 1
    assert not choose_within(old, adv, np.random.default_rng(1), clip_cov_lb=1e9, clip_cov_ub=2e9).any()
    one = np.array([1.0, -1.0])  # each token's share is 1
    for low, high, marks in ((0.5, 2.0, 1), (1.0, 2.0, 0), (0.5, 1.0, 0)):
        assert choose_within(one, one, rng, clip_cov_lb=low, clip_cov_ub=high).sum() == marks


def test_kl_cov_marks_the_largest():
    rng = np.random.default_rng(0)
    old, adv = rng.normal(-2, 1, 1000), rng.normal(size=1000)
    marked = choose_largest(old, adv, rng, kl_cov_ratio=0.005)
    assert set(np.flatnonzero(marked)) == set(np.argsort(covariance(old, adv))[-5:])


@pytest.mark.parametrize(
    "name", ["ppo_clip", "gspo", "gspo_sequence", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl"]
)
def test_unset_bounds_are_those_of_the_loss(name):
    """A sequence's ratio stays within a thousandth of 1; the bounds of a token's ratio would never clip it."""
    new, old, adv, marks = (torch.tensor(a) for a in arrays(7))
    sequence = torch.tensor([SEQUENCES.index(sequence_of(t)) for t in range(12)])
    plain = bind(policy_losses.resolve(name), kwargs={})(new, old, adv, sequence, marks).loss_T
    given = bind(policy_losses.resolve(name), kwargs={"clip_low": 0.01, "clip_high": 0.01})
    assert not torch.equal(given(new, old, adv, sequence, marks).loss_T, plain)


def test_own_loss_gets_the_usual_bounds():
    def own(logprobs_T, old_logprobs_T, advantages_T, *, clip_low, clip_high, dual_clip, wide=3.0):
        options.append((clip_low, clip_high, dual_clip, wide))
        return TokenLoss(logprobs_T)

    options: list[tuple[float | None, ...]] = []
    bare = torch.zeros(1)
    unset = bind(own, kwargs={})
    unset(bare, bare, bare, bare)
    given = bind(own, kwargs={"clip_low": 0.1, "dual_clip": 3.0, "wide": 1.0})
    given(bare, bare, bare, bare)
    assert options == [(0.2, 0.28, None, 3.0), (0.1, 0.28, 3.0, 1.0)]


def test_options_go_to_the_loss_or_to_its_selection():
    loss = policy_losses.resolve("clip_cov")
    assert selection_of(loss, kwargs={"clip_cov_ratio": 0.5}) is not None
    assert selection_of(policy_losses.resolve("ppo_clip"), kwargs={}) is None
    bind(loss, kwargs={"clip_cov_ratio": 0.5, "clip_low": 0.1})
    refuses(lambda: bind(loss, kwargs={"clip_cov_ration": 0.5}), ConfigError, "'clip_cov_ration'", "clip_cov_ratio")
    of_sapo = bind(policy_losses.resolve("sapo"), kwargs={"tau_pos": 0})
    refuses(lambda: of_sapo(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1)), ConfigError, "tau_pos 0")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: x.mean(), "tensor"),
        (lambda x: TokenLoss(x.mean(), {}), r"TokenLoss\(loss_T=tensor"),
        (lambda x: TokenLoss(x, {"mine": 0.5}), r"'mine' as 0\.5"),
        (lambda x: 1 / 0, r"ZeroDivisionError: "),
    ],
    ids=["a tensor", "one number", "one figure", "raises"],
)
def test_loss_with_a_wrong_result_is_refused(returned, said):
    """One number for all tokens would be broadcast, and count once for each of them."""
    loss = bind(lambda logprobs_T, old_logprobs_T, advantages_T: returned(logprobs_T), kwargs={})
    ones = torch.ones(3)
    with pytest.raises(TrainingError, match=rf"{said}.*\(test_policy_losses.py, line \d+\)$"):
        loss(ones, ones, ones, ones)
