"""verl.trainer.ppo.core_algos: registries that reach the native ones, and the formulas on padded tensors."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms import losses
from polyturn.algorithms.advantages import BatchAdvantages, GroupView, MemberView, advantages, bind_estimator, traits_of
from polyturn.compat.verl import core_algos as algos
from polyturn.compat.verl import torch_functional as functional
from polyturn.compat.verl.configs import ActorConfig, PolicyLossConfig
from polyturn.compat.verl.core_algos import compute_policy_loss_dro, compute_policy_loss_vanilla
from polyturn.core.errors import ConfigError
from polyturn.core.sample import SampleId, TrainSample
from support.refusals import refuses

INDEX = np.array(["a", "a", "b"], dtype=object)
MASK = torch.tensor([[1.0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
REWARDS = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])


def sample(group: str, length: int, weights: list[float]) -> TrainSample:
    return TrainSample(
        id=SampleId("g", group, 0),
        token_ids=np.arange(length, dtype=np.int32),
        loss_weights=np.array(weights, np.float32),
        turn_ids=np.zeros(length, np.int32),
    )


def test_outcome_estimators_without_a_native_twin() -> None:
    assert algos.compute_gpg_outcome_advantage(REWARDS, MASK, INDEX)[0][:, 0].tolist() == [0.75, -0.75, 1.5]
    refuses(lambda: algos.compute_grpo_passk_outcome_advantage(REWARDS, MASK, INDEX), ValueError, "at least 2 samples")


@pytest.mark.parametrize("name", ["grpo", "grpo_passk"])
def test_equal_scores_give_zero_with_any_epsilon(name: str) -> None:
    rewards, index = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), np.array(["a", "a"], dtype=object)
    advantages, _ = algos.get_adv_estimator_fn(name)(rewards, torch.ones(2, 2), index=index, epsilon=0.0)
    assert advantages.tolist() == [[0, 0], [0, 0]]


def view(rewards: list[float], samples: list[list[TrainSample]], id: str = "g", greedy: float | None = None) -> GroupView:
    members = [
        MemberView(id=str(i), reward=r, samples=tuple(s)) for i, (r, s) in enumerate(zip(rewards, samples, strict=True))
    ]
    return GroupView(id=id, members=tuple(members), greedy_reward=greedy)


@pytest.mark.parametrize(
    ("name", "native", "options"),
    [
        (algos.AdvantageEstimator.GRPO, "grpo", {}),
        ("rloo", "rloo", {}),
        ("opo", "opo", {}),
        ("grpo_passk", "grpo_passk", {}),
        ("remax", "remax", {}),
        ("reinforce_plus_plus", "reinforce_plus_plus", {"gamma": 0.9}),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", {}),
        ("gae", "gae", {"gamma": 0.9, "lam": 0.8}),
    ],
)
def test_estimator_equals_the_native_one(name: str, native: str, options: dict[str, Any]) -> None:
    """With rewards on single tokens, values, groups of different size and trajectories of several samples."""
    rng = np.random.default_rng(0)
    scale = 0.0 if name == "remax" else 0.1  # verl's credits penalties to the tokens before them there

    def trained(i: int, segment: int = 0) -> TrainSample:
        made = sample(f"t{i}", 6, [0, 1, 1, 0, 1, 1])
        arrays = {"values": rng.normal(size=6), "rewards": scale * rng.normal(size=6)}
        return made.replace(turn_ids=np.full(6, segment), **arrays)

    batch = [
        view([1.0, 0.0, 0.5], [[trained(0), trained(0, 1)], [trained(1)], [trained(2)]], "a", greedy=0.4),
        view([0.0, 2.0], [[trained(3)], [trained(4)]], "b", greedy=1.5),
    ]
    wrapped = algos.as_estimator(algos.get_adv_estimator_fn(name))
    found = wrapped(batch, **options)
    fn = bind_estimator(
        advantages.resolve(native), offered={}, kwargs={**options, **({"outcome": "end"} if name == "gae" else {})}
    )
    if traits_of(fn).scope == "batch":
        expected = fn(batch)
    else:
        expected = BatchAdvantages([fn(g.totals, [list(m.samples) for m in g.members]) for g in batch])
    for ours, theirs in ((found.advantages, expected.advantages), (found.returns, expected.returns)):
        assert (ours is None) == (theirs is None)
        for a, b in zip(flat(ours), flat(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
    assert traits_of(wrapped).needs_values == (name == "gae") and traits_of(wrapped).needs_greedy == (name == "remax")


def flat(found: Any) -> list[Any]:
    return [array for group in found or [] for member in group for array in member]


def test_registered_estimator_has_a_native_name() -> None:
    @algos.register_adv_est("mine_in_test")
    def mine(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, config: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = token_level_rewards.sum(-1) * (config.scale or 1.0)
        return scores.unsqueeze(-1) * response_mask, token_level_rewards

    assert algos.get_adv_estimator_fn("mine_in_test") is mine
    native = advantages.resolve("mine_in_test")
    samples = [[sample("t0", 3, [0, 1, 1]), sample("t0", 2, [0, 1])], [sample("t1", 4, [0, 1, 0, 1])], []]
    found = native([view([1.0, 2.0, 5.0], samples)], scale=2.0).advantages[0]
    assert [[a.tolist() for a in arrays] for arrays in found] == [[[0, 2, 2], [0, 2]], [[0, 4, 0, 4]], []]
    refuses(lambda: algos.register_adv_est("mine_in_test")(lambda *a, **k: None), ValueError, "already been registered")
    refuses(lambda: algos.get_adv_estimator_fn("mine_in_tst"), ValueError, "mine_in_tst.", "'mine_in_test'")


def test_registered_estimator_replaces_a_native_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algos, "ADV_ESTIMATOR_REGISTRY", {})
    own = advantages.resolve("gdpo")

    @algos.register_adv_est("gdpo")
    def mine(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **kwargs: Any) -> Any:
        return 7 * response_mask, 7 * response_mask

    native = advantages.resolve("gdpo")
    advantages.register("gdpo", replace=True)(own)
    found = native([view([1.0], [[sample("t0", 2, [0, 1])]])], norm_by_std=True).advantages
    assert found[0][0][0].tolist() == [0, 7]


def test_edited_estimator_replaces_its_old_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from polyturn.compat.verl.core_algos import register_adv_est\n@register_adv_est('edited_in_test')\n"
        "def mine(token_level_rewards, response_mask, **kwargs):\n    return FACTOR * response_mask, response_mask\n"
    )
    file = tmp_path / "edited_estimator.py"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(text.replace("FACTOR", "2"))
    module = importlib.import_module("edited_estimator")
    file.write_text(text.replace("FACTOR", "30"))
    importlib.reload(module)
    assert algos.get_adv_estimator_fn("edited_in_test") is module.mine
    found = advantages.resolve("edited_in_test")([view([1.0], [[sample("t0", 2, [0, 1])]])]).advantages
    assert found[0][0][0].tolist() == [0, 30]


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 21 / 6),
        ("token-sum", 21.0),
        ("seq-mean-token-sum", 21 / 2),
        ("seq-mean-token-mean", (2 + 5) / 2),
        ("seq-mean-token-sum-norm", 21 / 2 / 4),
    ],
)
def test_losses_are_aggregated_over_rows_with_tokens(mode: str, value: float) -> None:
    matrix = torch.tensor([[1.0, 2, 3, 99], [4, 5, 6, 99], [99, 99, 99, float("nan")]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    assert float(algos.agg_loss(matrix, mask, mode)) == pytest.approx(value)
    refuses(lambda: algos.agg_loss(MASK, MASK, "token-men"), ValueError, "token-men")


def test_one_process_gives_its_share_of_the_batch() -> None:
    matrix, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1, 1], [1, 0]])
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        whole = algos.agg_loss(matrix, mask, mode, loss_scale_factor=2)
        counts = {"dp_size": 2, "batch_num_tokens": 3, "global_batch_size": 2, "loss_scale_factor": 2}
        parts = [algos.agg_loss(matrix[[i]], mask[[i]], mode, **counts) for i in range(2)]  # type: ignore[arg-type]
        assert float(sum(parts) / 2) == pytest.approx(float(whole)), mode
        if mode != "token-sum":
            with pytest.raises(ValueError, match="is required when dp_size > 1"):
                algos.agg_loss(matrix, mask, mode, dp_size=2)


@pytest.mark.parametrize("config", [{"gamma": 0.5}, SimpleNamespace(gamma=0.5)])
def test_discount_comes_from_a_mapping_or_an_object(config: Any) -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 4.0]]), torch.tensor([[1, 0, 1]])
    _, returns = algos.get_adv_estimator_fn("reinforce_plus_plus")(rewards, mask, config=config)
    assert returns.tolist() == [[2.0, 0.0, 4.0]]


def test_registered_policy_loss_is_a_native_loss_per_token() -> None:
    @algos.register_policy_loss("plain_in_test")
    def plain(
        old_log_prob: Any,
        log_prob: Any,
        advantages: Any,
        response_mask: Any,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
    ) -> Any:
        loss = -advantages * log_prob
        return algos.agg_loss(loss_mat=loss, loss_mask=response_mask, loss_agg_mode=loss_agg_mode), {"actor/x": 1.0}

    assert algos.get_policy_loss_fn("plain_in_test") is plain
    native = losses.policy_losses.resolve("plain_in_test")
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = native(logprobs, torch.zeros(2), torch.tensor([1.0, 3.0]))
    assert found.loss_T.tolist() == [1.0, 6.0]
    found.loss_T.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, -3.0]
    sums_itself = algos.as_policy_loss(lambda *rows: (rows[1].sum(), {}))
    refuses(lambda: sums_itself(logprobs, torch.zeros(2), torch.zeros(2)), ConfigError, "must return the result of agg_loss")


def test_policy_loss_of_sequences_gets_a_row_per_sample() -> None:
    def per_sequence(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, mode: str, config: Any) -> Any:
        ratios = ((log_prob - old_log_prob) * response_mask).sum(-1, keepdim=True).exp().expand_as(log_prob)
        logged = algos.agg_loss(log_prob, response_mask, mode)
        loss = algos.agg_loss(-advantages * ratios * config.policy_loss.scale, response_mask, "seq-mean-token-mean")
        return loss, {"actor/logprob": logged.item()}

    native = algos.as_policy_loss(per_sequence)
    logprobs = torch.tensor([0.5, 0.25, 0.0])
    found = native(logprobs, torch.zeros(3), torch.ones(3), sequence_T=torch.tensor([7, 3, 7]), scale=2.0)
    expected = [-2 * math.exp(0.5), -2 * math.exp(0.25), -2 * math.exp(0.5)]
    assert found.loss_T.tolist() == pytest.approx(expected), "what is only logged is not part of the loss"


def test_policy_loss_gets_the_counts_of_its_rows() -> None:
    seen: list[dict[str, Any]] = []

    def counted(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, mode: str, config: Any) -> Any:
        seen.append(dict(config.global_batch_info))
        config.global_batch_info["mine"] = 1
        info = {key: value for key, value in config.global_batch_info.items() if key != "mine"}
        return algos.agg_loss(-advantages * log_prob, response_mask, mode, **info), {}

    native = algos.as_policy_loss(counted)
    for _ in range(2):
        found = native(torch.ones(3), torch.zeros(3), torch.ones(3), sequence_T=torch.tensor([7, 3, 7]))
        assert found.loss_T.tolist() == [-1.0] * 3
    assert seen == 2 * [{"dp_size": 1, "batch_num_tokens": 3, "global_batch_size": 2, "loss_scale_factor": None}]


def test_policy_loss_reads_the_clips_of_the_run() -> None:
    native = losses.bind(algos.as_policy_loss(algos.compute_policy_loss_vanilla), kwargs={"clip_low": 0.1, "clip_high": 0.3})
    new, old, gain = torch.tensor([0.5, -0.5]), torch.zeros(2), torch.tensor([1.0, -1.0])
    assert native(new, old, gain, torch.zeros(2)).loss_T.tolist() == pytest.approx([-1.3, 0.9])


def test_vanilla_loss_is_the_native_one() -> None:
    old, new = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.2, -3.0]])
    gain = torch.tensor([[1.0, -1.0]])
    loss, metrics = algos.compute_policy_loss_vanilla(old, new, gain, torch.ones(1, 2), config={"clip_ratio": 0.2})
    assert float(loss) == pytest.approx(
        float(losses.ppo_clip(new[0], old[0], gain[0], clip_high=0.2, dual_clip=3.0).loss_T.mean())
    )
    assert metrics["actor/pg_clipfrac"] == 1.0
    loss, _ = algos.compute_policy_loss_vanilla(old, new, gain.abs(), torch.ones(1, 2), config={"clip_ratio_high": 0.0})
    assert float(loss) == pytest.approx(-(1 + math.exp(-2.0)) / 2)


def test_value_loss_takes_the_worse_of_clipped_and_not() -> None:
    values, returns, mask = torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2)
    loss, clipped = algos.compute_value_loss(torch.tensor([[1.0, 0.5]]), returns, values, mask, cliprange_value=0.5)
    assert float(loss) == pytest.approx(0.5 * (0.25 + 0.25) / 2) and float(clipped) == pytest.approx(0.5)


def test_kl_estimates_and_straight_through_gradients() -> None:
    new, ref = torch.tensor([[-1.0]], requires_grad=True), torch.tensor([[-2.0]])
    assert algos.kl_penalty(new, ref, "kl").item() == algos.kl_penalty(new, ref, "abs").item() == 1.0
    assert algos.kl_penalty(new, ref, "mse").item() == 0.5
    low = algos.kl_penalty(new, ref, "low_var_kl+")
    assert low.item() == pytest.approx(algos.kl_penalty(new, ref, "k3").item())
    low.backward()
    assert new.grad is not None and new.grad.item() == 1.0
    with pytest.raises(NotImplementedError):
        algos.kl_penalty(new, ref, "full")


def test_masked_statistics_of_estimators() -> None:
    values, mask = torch.tensor([[1.0, 3.0, math.inf], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert functional.masked_mean(values, mask).item() == pytest.approx(3.0)
    assert functional.masked_sum(values, mask, axis=-1).tolist() == [4.0, 5.0]
    finite = values.clamp(max=9)
    assert functional.masked_var(finite, mask).item() == pytest.approx(4.0)
    assert functional.masked_whiten(finite, mask)[0, 0].item() == pytest.approx(-1.0)
    refuses(lambda: functional.masked_var(finite, torch.zeros_like(mask)), ValueError, "not defined")
    logits = torch.log(torch.tensor([0.25, 0.75]))
    assert functional.logprobs_from_logits(logits, torch.tensor(1), inplace_backward=False).exp().item() == pytest.approx(
        0.75
    )
    assert functional.entropy_from_logits(torch.zeros(4)).item() == pytest.approx(math.log(4))
    assert functional.clip_by_value(values[0, :2], 2.0, torch.tensor([2.5, 2.5])).tolist() == [2.0, 2.5]


OLD_LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5, -9.0], [-1.0, -1.0, -1.0, -9.0]])
NEW_LOGPROBS = torch.tensor([[-1.5, -1.0, -0.5, 0.0], [-1.1, -0.9, -1.0, 0.0]])
LOSS_MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]])


def test_configs_do_not_share_their_defaults() -> None:
    ActorConfig().global_batch_info["dp_size"] = 2
    assert ActorConfig().global_batch_info == {}


def test_losses_read_an_actors_config() -> None:
    config = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=0.5), global_batch_info={"batch_num_tokens": 12}
    )
    advantages = torch.ones_like(OLD_LOGPROBS)
    loss, _ = compute_policy_loss_dro(NEW_LOGPROBS, OLD_LOGPROBS, advantages, LOSS_MASK, "token-mean", config)
    expected = ((0.25 * (OLD_LOGPROBS - NEW_LOGPROBS).square() - OLD_LOGPROBS) * LOSS_MASK).sum() / 12
    torch.testing.assert_close(loss, expected)
    halved, _ = compute_policy_loss_vanilla(NEW_LOGPROBS, OLD_LOGPROBS, advantages, LOSS_MASK, config=config)
    whole, _ = compute_policy_loss_vanilla(NEW_LOGPROBS, OLD_LOGPROBS, advantages, LOSS_MASK, config=ActorConfig())
    torch.testing.assert_close(2 * halved, whole)
    with pytest.raises(ConfigError, match="dro_beta"):
        compute_policy_loss_dro(NEW_LOGPROBS, OLD_LOGPROBS, advantages, LOSS_MASK, "token-mean", ActorConfig())
