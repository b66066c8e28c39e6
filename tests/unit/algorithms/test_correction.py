"""Off-policy correction against its definitions, written out in plain Python."""

import math

import numpy as np
import pytest

from polyturn.algorithms.correction import correct
from polyturn.algorithms.options import REJECTIONS, Bounds, CorrectionSettings
from polyturn.core.errors import ConfigError, TrainingError, UnknownNameError
from polyturn.core.metrics import reduce
from polyturn.core.sample import TrainSample
from support.refusals import refuses
from support.samples import sample_of


def sample(name: str, logs: list[float], *, advantage: float = 1.0, versions: list[int] | None = None) -> TrainSample:
    """Two tokens of prompt, then one trained token per log ratio, with an observation in the middle."""
    n, cut = len(logs), len(logs) // 2
    weights = np.array([0, 0] + [1] * cut + [0] + [1] * (n - cut), np.float32)
    mu, pi = np.zeros(n + 3, np.float32), np.zeros(n + 3, np.float32)
    mu[weights != 0] = -1.5
    pi[weights != 0] = -1.5 + np.array(logs)
    pi[2 + cut] = 7.0  # an observation: nothing may read it
    tags = np.full(n + 3, -1, np.int32)
    tags[weights != 0] = versions or 0
    return sample_of(
        ("g", name, 0),
        np.arange(n + 3),
        weights,
        rollout_logprobs=mu,
        old_logprobs=pi,
        advantages=np.full(n + 3, advantage, np.float32),
        versions=tags,
    )


BATCH = [[0.1, -0.3, 0.9, 0.0], [-2.0, 0.2], [0.05, 0.02, -0.01], [1.5]]


def trained(found: TrainSample, original: TrainSample, array: np.ndarray) -> list[float]:
    return array[original.loss_weights != 0].tolist()


@pytest.mark.parametrize("kind", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("beyond", ["truncate", "drop"])
def test_weights_are_capped_ratios(kind, beyond):
    batch = [sample(str(i), logs) for i, logs in enumerate(BATCH)]
    found = correct(batch, CorrectionSettings(weight=kind, cap=1.2, beyond=beyond)).samples
    for logs, before, after in zip(BATCH, batch, found, strict=True):
        for t, value in enumerate(trained(after, before, after.correction)):
            ratio = {"token": logs[t], "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[kind]
            expected = math.exp(ratio) if math.exp(ratio) <= 1.2 else (1.2 if beyond == "truncate" else 0.0)
            assert value == pytest.approx(expected, rel=1e-5)
        assert (after.correction[before.loss_weights == 0] == 0).all()
        assert after.loss_weights is before.loss_weights


def test_normalised_weights_have_mean_one():
    found = correct([sample(str(i), logs) for i, logs in enumerate(BATCH)], CorrectionSettings(normalize=True)).samples
    assert np.mean(np.concatenate([s.correction[s.loss_weights != 0] for s in found])) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in REJECTIONS if name != "token_binary_kl"])
def test_tokens_out_of_bounds_are_rejected(name):
    batch = [sample(str(i), logs) for i, logs in enumerate(BATCH)]
    bounds = Bounds(0.8, 1.3) if name.endswith("k1") else Bounds(-math.inf, 0.05)
    found = correct(batch, CorrectionSettings(weight="none", reject={name: bounds}))
    num_rejected = 0
    for logs, before, after in zip(BATCH, batch, found.samples, strict=True):
        terms = {"k1": logs, "k2": [x * x / 2 for x in logs], "k3": [math.exp(x) - 1 - x for x in logs]}[name[-2:]]
        level = name[:-3]
        over = {"seq_sum": sum(terms), "seq_mean": sum(terms) / len(terms), "seq_max": max(terms)}
        values = terms if level == "token" else [over[level]] * len(terms)
        values = [math.exp(v) for v in values] if name.endswith("k1") else values
        kept = [float(bounds.low <= v <= bounds.high) for v in values]
        assert trained(after, before, after.loss_weights) == kept
        assert after.correction is None
        num_rejected += kept.count(0.0)
    assert 0 < num_rejected < 10
    assert reduce(found.metrics)["tokens/dropped_rejected"] == num_rejected


def test_token_is_rejected_by_its_binary_divergence():
    """KL of (mu, 1 - mu) from (pi, 1 - pi): the same ratio is far for a likely token only."""
    batch = [sample(str(i), logs) for i, logs in enumerate(BATCH[:3])]
    found = correct(batch, CorrectionSettings(weight="none", reject={"token_binary_kl": 0.05})).samples
    mu = math.exp(-1.5)
    kept = []
    for logs in BATCH[:3]:
        pis = [math.exp(-1.5 + x) for x in logs]
        kls = [mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi)) for pi in pis]
        kept.append([float(kl <= 0.05) for kl in kls])
    assert [trained(after, before, after.loss_weights) for before, after in zip(batch, found, strict=True)] == kept
    assert 0 < sum(map(sum, kept)) < 9


def test_impossible_token_vetoes_its_sequence():
    batch = [sample("a", [0.0, -9.5, 0.0]), sample("b", [0.0, -9.0])]
    found = correct(batch, CorrectionSettings(weight="none", veto=1e-4)).samples
    assert [s.num_weighted for s in found] == [0, 2]


def test_stale_mistakes_are_left_out_alone():
    """DeepSeek-V3.2, equation 9: negative advantage and a divergence above the bound."""
    batch = [sample("a", [-0.5, -0.3], advantage=-1), sample("b", [-0.5, -0.3]), sample("c", [-0.1, 0.1], advantage=-1)]
    found = correct(batch, CorrectionSettings(weight="none", negative_bound=0.3)).samples
    assert [s.num_weighted for s in found] == [0, 2, 2]


def test_metrics_are_their_definitions():
    batch = [sample(str(i), logs) for i, logs in enumerate(BATCH)]
    found = reduce(correct(batch, CorrectionSettings(weight="token", cap=2.0)).metrics)
    flat = np.array([x for logs in BATCH for x in logs])
    weights = np.minimum(np.exp(flat), 2.0)
    assert found["policy/off_policy_kl"] == pytest.approx(-flat.mean(), abs=1e-6)
    assert found["policy/off_policy_k3"] == pytest.approx((np.exp(flat) - 1 - flat).mean(), rel=1e-5)
    assert found["policy/off_policy_chi2"] == pytest.approx((np.exp(flat) ** 2).mean() - 1, rel=1e-5)
    sums = np.array([sum(logs) for logs in BATCH])
    assert found["policy/off_policy_chi2_sequence"] == pytest.approx((np.exp(sums) ** 2).mean() - 1, rel=1e-5)
    assert found["policy/off_policy_ppl_gap"] == pytest.approx(np.mean([-np.mean(logs) for logs in BATCH]), abs=1e-6)
    assert found["policy/correction_weight"] == pytest.approx(weights.mean(), rel=1e-5)
    assert found["policy/correction_weight_max"] == pytest.approx(math.exp(1.5), rel=1e-5)
    assert found["policy/correction_capped_share"] == pytest.approx(0.2)
    assert found["policy/correction_effective_share"] == pytest.approx(weights.mean() ** 2 / (weights**2).mean(), rel=1e-5)
    assert found["policy/correction_rejected_share"] == 0


def test_differences_are_split_by_staleness():
    """Versions are per token: weights may have changed in the middle of a completion."""
    batch = [sample("a", [0.1, -0.2, 0.4], versions=[5, 6, 7]), sample("b", [1.0], versions=[1])]
    found = reduce(correct(batch, CorrectionSettings(), version=7).metrics)
    differences = {name[-5:]: value for name, value in found.items() if "difference_lag" in name}
    assert differences == pytest.approx({"_lag0": 0.4, "_lag1": 0.2, "_lag2": 0.1, "3plus": 1.0}, rel=1e-5)


def test_equal_policies_are_left_alone():
    batch = [sample("a", [0.0] * 4)]
    settings = CorrectionSettings(reject={n: Bounds(0.9, 1.1) if n.endswith("k1") else Bounds(0, 0.1) for n in REJECTIONS})
    found = correct(batch, settings).samples
    assert trained(found[0], batch[0], found[0].correction) == [1.0] * 4
    assert (found[0].loss_weights == batch[0].loss_weights).all()


def test_batch_without_trained_tokens_passes():
    empty = sample("a", []).replace(loss_weights=np.zeros(3, np.float32))
    assert correct([empty], CorrectionSettings(normalize=True, veto=0.1)).samples[0].num_weighted == 0
    assert correct([], CorrectionSettings()) == ([], {})


def test_bad_settings_and_samples_are_refused():
    refuses(
        lambda: correct([sample("a", [0.1]).replace(old_logprobs=None)], CorrectionSettings()),
        TrainingError,
        "has no old_logprobs",
    )
    refuses(lambda: CorrectionSettings(reject={"seq_meen_k1": Bounds(0.5, 2.0)}), UnknownNameError, "'seq_mean_k1'")
    refuses(
        lambda: CorrectionSettings(reject={"token_k1": Bounds(1.5, 2.0)}),
        ConfigError,
        "must contain the ratio 1",
    )
    refuses(lambda: CorrectionSettings(cap=0), ConfigError, "cap")
    refuses(lambda: CorrectionSettings(veto=2), ConfigError, "veto is 2")
    refuses(lambda: CorrectionSettings(weight="tokens"), UnknownNameError, "tokens")
