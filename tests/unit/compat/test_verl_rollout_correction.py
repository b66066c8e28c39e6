"""Weights and rejection [B, R] in verl's names, against the native correction and hand-made cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from polyturn.algorithms.correction import measure
from polyturn.compat.verl.configs import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from polyturn.compat.verl.core_algos import compute_policy_loss_dro, compute_policy_loss_vanilla
from polyturn.compat.verl.protocol import DataProto
from polyturn.compat.verl.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
)
from polyturn.core.errors import ConfigError, UnknownNameError

OLD = torch.tensor([[-1.0, -2.0, -0.5, -9.0], [-1.0, -1.0, -1.0, -9.0]])
ROLLOUT = torch.tensor([[-1.5, -1.0, -0.5, 0.0], [-1.1, -0.9, -1.0, 0.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]])


def correct(**options: object) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(OLD, ROLLOUT, MASK, **options)  # type: ignore[arg-type]
    return None if weights is None else weights.batch["rollout_is_weights"], mask, metrics


def test_weights_are_cut_or_dropped_at_thresholds() -> None:
    rho = (OLD - ROLLOUT).exp() * MASK
    weights, mask, metrics = correct(rollout_is="token", rollout_is_threshold=1.5)
    assert weights is not None and torch.equal(mask, MASK)
    torch.testing.assert_close(weights, rho.clamp(max=1.5))
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)
    dropped, mask, metrics = correct(rollout_is="token", rollout_is_threshold="0.5_1.5")
    assert dropped is not None and torch.equal(mask, MASK)
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 6)
    torch.testing.assert_close(dropped, torch.where((rho >= 0.5) & (rho <= 1.5), rho, 0.0))
    whole, _, _ = correct(rollout_is="sequence", rollout_is_threshold=9.0)
    assert whole is not None
    torch.testing.assert_close(whole[0], math.exp(-0.5) * MASK[0])


@pytest.mark.parametrize("option", sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_each_criterion_equals_the_native_one(option: str) -> None:
    """k1 is bounded as the ratio of the rollout policy to the old one, the inverse of the native ratio."""
    rows = [measure((OLD - ROLLOUT)[row, :3].double().numpy(), option) for row in range(2)]
    native = np.stack([1 / row for row in rows] if option.endswith("_k1") else rows)
    bound = float(np.median(native)) + 1e-4
    _, mask, metrics = correct(rollout_rs=option, rollout_rs_threshold=f"1e-9_{bound}" if option.endswith("_k1") else bound)
    assert mask[:, :3].bool().tolist() == (native <= bound).tolist()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(float((native > bound).mean()))


def test_first_names_bound_the_ratio_itself() -> None:
    _, mask, metrics = correct(rollout_rs="token", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.5)
    assert mask.tolist() == [[1, 0, 1, 0], [1, 1, 1, 0]]
    assert metrics["rollout_corr/rollout_rs_mean"] == pytest.approx(
        float(((OLD - ROLLOUT).exp() * MASK).sum() / 6), rel=1e-5
    )
    _, mask, metrics = correct(rollout_token_veto_threshold=0.5)
    assert mask.tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]] and metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollout_is": "tokens"}, "Invalid rollout_is: tokens"),
        ({"rollout_is": "token", "rollout_is_threshold": -1}, "positive number"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "low <= high"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "Did you mean 'token_k"),
        ({"rollout_rs": "token_k2"}, "must be provided"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "one upper bound"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"}, "has 3 bounds"),
        ({"rollout_token_veto_threshold": 0}, "must be positive"),
    ],
)
def test_impossible_options_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        correct(**options)


def test_batch_takes_weights_and_mask_of_a_config() -> None:
    batch = DataProto.from_dict({"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK})
    config = RolloutCorrectionConfig.decoupled_geo_rs_token_tis(rs_threshold="0.9_1.1")
    found, metrics = compute_rollout_correction_and_add_to_batch(batch, config)
    assert found.batch["response_mask"].sum(-1).tolist() == [0, 3] and "rollout_is_weights" in found.batch
    assert "rollout_corr/kl" in metrics and dict(config)["rollout_is"] == "token"
    with pytest.raises(UnknownNameError, match="no field 'rollout_isx'"):
        RolloutCorrectionConfig(rollout_isx="token")


def test_losses_read_an_actors_config() -> None:
    config = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=0.5), global_batch_info={"batch_num_tokens": 12}
    )
    advantages = torch.ones_like(OLD)
    loss, _ = compute_policy_loss_dro(ROLLOUT, OLD, advantages, MASK, "token-mean", config)
    expected = ((0.25 * (OLD - ROLLOUT).square() - OLD) * MASK).sum() / 12
    torch.testing.assert_close(loss, expected)
    halved, _ = compute_policy_loss_vanilla(ROLLOUT, OLD, advantages, MASK, config=config)
    whole, _ = compute_policy_loss_vanilla(ROLLOUT, OLD, advantages, MASK, config=ActorConfig())
    torch.testing.assert_close(2 * halved, whole)
    with pytest.raises(ConfigError, match="dro_beta"):
        compute_policy_loss_dro(ROLLOUT, OLD, advantages, MASK, "token-mean", ActorConfig())
