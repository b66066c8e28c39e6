"""Every aggregation mode on one batch whose coefficients can be written down, and its independence of segmentation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.algorithms.aggregate import MODES, loss_coefs
from polyturn.core.errors import ConfigError, UnknownNameError
from polyturn.core.sample import TrainSample
from support.refusals import refuses
from support.samples import sample_of


def sample(trajectory: str, weights: list[float], segment: int = 0) -> TrainSample:
    n = len(weights)
    return sample_of(("g", trajectory, segment), np.zeros(n, np.int32), np.array(weights, np.float32))


# Trajectory a: 3 weighted tokens in two segments; b: 1 weighted token; c: none, so it is not a trajectory of the loss.
BATCH = [sample("a", [0, 1, 1]), sample("a", [0, 1], 1), sample("b", [0, 0, 0, 1]), sample("c", [0, 0])]


@pytest.mark.parametrize(
    ("mode", "norm", "a", "b"),
    [
        ("token-mean", None, 1 / 4, 1 / 4),
        ("seq-mean-token-sum", None, 1 / 2, 1 / 2),
        ("seq-mean-token-mean", None, 1 / 6, 1 / 2),
        ("seq-mean-token-sum-norm", 10, 1 / 20, 1 / 20),
        ("seq-mean-token-sum-norm", None, 1 / 6, 1 / 6),
    ],
)
def test_coefficients_by_hand(mode, norm, a, b):
    found = loss_coefs(BATCH, mode=mode, norm_length=norm)
    assert [c.tolist() for c in found] == [
        pytest.approx([0, a, a]),
        pytest.approx([0, a]),
        pytest.approx([0, 0, 0, b]),
        [0, 0],
    ]


def test_weights_scale_the_coefficients():
    found = loss_coefs([sample("a", [0, 0.5, 1]), sample("b", [0, 0.5])], mode="token-mean")
    assert [c.tolist() for c in found] == [[0, 0.25, 0.5], [0, 0.25]]


@given(
    weights=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8), min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    cut=st.integers(1, 7),
)
def test_cuts_into_segments_change_no_coefficient(weights, mode, cut):
    whole = [sample(str(i), w) for i, w in enumerate(weights)]
    parts = [
        sample(s.id.trajectory, list(p), k) for s in whole for k, p in enumerate(np.split(s.loss_weights, [cut])) if len(p)
    ]
    joined = np.concatenate(loss_coefs(parts, mode=mode))
    assert np.array_equal(joined, np.concatenate(loss_coefs(whole, mode=mode)))


@given(weights=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8), min_size=1, max_size=4))
def test_means_are_means(weights):
    """token-mean and seq-mean-token-mean of a constant loss are that constant."""
    samples = [sample(str(i), w) for i, w in enumerate(weights)]
    total = 1.0 if any(any(w) for w in weights) else 0.0
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert sum(c.sum() for c in loss_coefs(samples, mode=mode)) == pytest.approx(total)


def test_bad_settings_are_named():
    refuses(lambda: loss_coefs(BATCH, mode="token_mean"), UnknownNameError, "'token_mean'", "'token-mean'")
    refuses(lambda: loss_coefs(BATCH, mode="seq-mean-token-sum-norm", norm_length=0), ConfigError, "norm_length is 0")
