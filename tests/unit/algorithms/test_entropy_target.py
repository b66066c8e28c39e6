"""The weight of the entropy bonus that follows a target."""

import pytest

from polyturn.algorithms.entropy_target import EntropyController
from polyturn.algorithms.options import AlgorithmOptions
from polyturn.core.errors import ConfigError
from support.refusals import refuses


def controller(target: float | None = 0.5, *, coef: float = 0.01) -> EntropyController:
    return EntropyController(AlgorithmOptions(entropy_coef=coef, entropy_target=target, entropy_step=0.005))


def test_weight_follows_the_target() -> None:
    made, weights = controller(), []
    for entropy in (0.4, 0.3, 0.6, 0.5, 0.9, 0.9, 0.9, 0.1):
        made.update(entropy)
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
