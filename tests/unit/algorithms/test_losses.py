"""PPO's clipped loss, token by token, against hand-computed values."""

import math

import pytest
import torch

from polyturn.algorithms.losses import ppo_clip


def clip_of(ratio: float, advantage: float, **options: float) -> tuple[float, float, float]:
    """Return loss, gradient with respect to the logprob, and whether it was clipped."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    found = ppo_clip(new, old, torch.tensor([advantage], dtype=torch.float64), **options)
    found.loss_T.sum().backward()
    return found.loss_T.item(), new.grad.item(), found.stats["clip_fraction"].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # on policy: -A, and its gradient is -A
        (1.1, 1.0, -1.1, -1.1, 0),  # inside the range
        (1.5, 1.0, -1.28, 0.0, 1),  # above 1 + clip_high with A > 0: no gradient
        (0.5, 1.0, -0.5, -0.5, 0),  # below the range with A > 0: the minimum is the open term
        (0.5, -1.0, 0.8, 0.0, 1),  # below 1 - clip_low with A < 0: no gradient
        (1.5, -1.0, 1.5, 1.5, 0),  # above the range with A < 0: the open term again
    ],
)
def test_ppo_clip(ratio, advantage, loss, gradient, clipped):
    """Schulman et al. 2017, equation 7 and figure 1, with the separate bounds of DAPO: [1 - 0.2, 1 + 0.28]."""
    assert clip_of(ratio, advantage, clip_low=0.2, clip_high=0.28) == pytest.approx((loss, gradient, clipped))


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    """Ye et al. 2020, equation 5: with c = 3 a ratio of 10 and A = -1 lose 3, not 10, and have no gradient."""
    assert clip_of(10.0, -1.0, dual_clip=3.0) == pytest.approx((3.0, 0.0, 1))
    assert clip_of(2.0, -1.0, dual_clip=3.0) == pytest.approx((2.0, 2.0, 0))
    assert clip_of(10.0, 1.0, dual_clip=3.0) == pytest.approx((-1.28, 0.0, 1))


def test_statistics_are_detached_and_named():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    stats = ppo_clip(new, torch.tensor([-1.0, -1.0]), torch.ones(2)).stats
    assert stats["ratio"].tolist() == pytest.approx([1.0, math.exp(-1)])
    assert stats["approx_kl"].tolist() == pytest.approx([0.0, math.exp(-1) - 1 + 1])
    assert not any(v.requires_grad for v in stats.values())


def test_an_extreme_ratio_stays_finite():
    new = torch.tensor([-0.1], requires_grad=True)
    loss = ppo_clip(new, torch.tensor([-1e4]), torch.tensor([-1.0])).loss_T
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()
