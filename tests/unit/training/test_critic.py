"""The critic: values at weighted tokens, the value loss by hand, learning, resuming; and the KL penalty of the rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms.options import KlOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError
from polyturn.core.metrics import merge, reduce
from polyturn.core.sample import TrainSample
from polyturn.training.critic import Critic, CriticSettings, local_critic, value_metrics
from polyturn.training.lora import add_lora
from polyturn.training.options import LoraSettings, OptimSettings
from polyturn.training.reward_kl import RewardKl
from support.models import tiny_model
from support.refusals import refuses
from support.samples import sample_of
from support.states import hand_over

VOCAB = 48


def samples(num: int = 4, **changes: Any) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(num):
        n = 6 + 2 * i
        weights = np.array([0, 0, 1, 1, 0, *[1] * (n - 5)], np.float32)
        made.append(
            sample_of(
                ("g", f"t{i}", 0),
                rng.integers(0, VOCAB, n),
                weights,
                values=np.zeros(n, np.float32),
                returns=np.where(weights != 0, rng.normal(size=n), 0.0),
            ).replace(**changes)
        )
    return made


def critic(*, seed: int = 0, lr: float = 1e-2, tokens: int = 4096, **settings: Any) -> Critic:
    return local_critic(
        tiny_model(VOCAB, hidden=16, seed=seed),
        optim=OptimSettings(lr=lr, weight_decay=0.0),
        settings=CriticSettings(**settings),
        layout=LayoutSettings(max_tokens_per_batch=tokens),
    )


def train(made: Critic, batch: list[TrainSample]) -> dict[str, float]:
    return reduce(merge([made.forward_backward(batch), made.optim_step()]))


def test_new_critic_has_values_of_0_and_leaves_the_policy() -> None:
    model = tiny_model(VOCAB, hidden=16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    made = local_critic(model, optim=OptimSettings(lr=1e-2))
    assert all(not v.any() for v in made.score(samples()))
    for _ in range(2):
        train(made, samples())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert any(v.any() for v in made.score(samples()))


def test_value_is_read_before_its_token() -> None:
    made = critic()
    for _ in range(3):
        train(made, samples())
    (plain,) = made.score(samples(1))
    sample = samples(1)[0]
    assert np.array_equal(plain != 0, sample.loss_weights != 0)
    ids = sample.token_ids.copy()
    last = int(np.flatnonzero(sample.loss_weights)[-1])
    ids[last] = (ids[last] + 1) % VOCAB
    assert np.array_equal(made.score([sample.replace(token_ids=ids)])[0], plain), "v_t does not see token t"
    ids[last - 1] = (ids[last - 1] + 1) % VOCAB
    assert made.score([sample.replace(token_ids=ids)])[0][last] != plain[last]


def test_value_loss_by_hand() -> None:
    batch = samples(2)
    old = [np.where(s.loss_weights != 0, 0.5, 0.0).astype(np.float32) for s in batch]
    batch = [s.replace(values=v) for s, v in zip(batch, old, strict=True)]
    errors = []
    for s in batch:
        assert s.returns is not None
        for t in np.flatnonzero(s.loss_weights):
            target, near = float(s.returns[t]), 0.5 - 0.2  # the value is 0, and the old one 0.5
            errors.append(max(0.5 * (0.0 - target) ** 2, 0.5 * (near - target) ** 2))
    found = reduce(critic(clip=0.2).forward_backward(batch))
    assert found["critic/value_loss"] == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    unclipped = reduce(critic(clip=None).forward_backward(batch))
    assert unclipped["critic/clip_fraction"] == 0 and unclipped["critic/value_loss"] <= found["critic/value_loss"]
    inside = reduce(critic(clip=9.0).forward_backward(batch))
    assert inside["critic/clip_fraction"] == 0 and inside["critic/value_loss"] == unclipped["critic/value_loss"]


def test_gradient_does_not_depend_on_micro_batches() -> None:
    def gradient(batch: list[TrainSample], tokens: int) -> torch.Tensor:
        made = critic(tokens=tokens)
        torch.nn.init.normal_(made.backend.model.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        made.forward_backward(batch)
        return torch.cat([p.grad.flatten() for p in made.backend.model.parameters() if p.grad is not None])

    batch = samples()
    torch.testing.assert_close(gradient(batch, 4096), gradient(batch, 16))
    last = batch[-1]
    unused = last.replace(returns=np.full(len(last), np.nan))
    torch.testing.assert_close(gradient([*batch[:-1], unused], 4096), gradient(batch[:-1], 4096))


def test_critic_learns_its_returns() -> None:
    made, batch = critic(clip=None, lr=3e-2), samples(returns=None)
    batch = [s.replace(returns=np.where(s.loss_weights != 0, 1.0 + i, 0.0)) for i, s in enumerate(batch)]
    for _ in range(60):
        train(made, batch)
    batch = [s.replace(values=v) for s, v in zip(batch, made.score(batch), strict=True)]
    assert reduce(value_metrics(batch))["critic/explained_variance"] > 0.9


def test_critic_resumes_bit_for_bit() -> None:
    one, two = critic(), critic(seed=1)
    train(one, samples())
    hand_over(one, two)
    for _ in range(2):
        train(one, samples())
        train(two, samples())
    assert all(np.array_equal(a, b) for a, b in zip(one.score(samples()), two.score(samples()), strict=True))
    other = local_critic(tiny_model(VOCAB, hidden=32), optim=OptimSettings())
    refuses(lambda: hand_over(one, other), CheckpointError, "checkpoint's critic is of another model")


def test_checkpoint_of_an_adapted_critic_has_its_head() -> None:
    def adapted() -> Critic:
        model = tiny_model(VOCAB, hidden=16)
        add_lora(model, LoraSettings(rank=2))
        return local_critic(model, optim=OptimSettings(lr=1e-2))

    one, two = adapted(), adapted()
    train(one, samples())
    hand_over(one, two)
    found = one.score(samples())
    assert any(v.any() for v in found)
    assert all(np.array_equal(a, b) for a, b in zip(found, two.score(samples()), strict=True))


def test_bad_input_is_refused() -> None:
    refuses(lambda: critic().forward_backward(samples(returns=None)), TrainingError, "has no values or returns")
    made, bad = critic(), [s.replace(returns=np.full(len(s), np.inf)) for s in samples(1)]
    for _ in range(OptimSettings().max_skipped):
        assert train(made, bad)["critic/skipped_steps"] == 1
    refuses(lambda: train(made, bad), TrainingError, "value loss is not finite", "algorithm.critic.optim.lr", "before it: 3")
    assert all(not v.any() for v in made.score(samples()))
    refuses(lambda: CriticSettings(clip=0.0), ConfigError, "clip is 0")


@pytest.mark.parametrize(
    ("name", "kl"), [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: np.expm1(-d) + d), ("abs", np.abs)]
)
def test_each_trained_token_costs_its_kl(name: str, kl: Any) -> None:
    rng = np.random.default_rng(1)
    batch = [s.replace(old_logprobs=rng.normal(size=len(s)), ref_logprobs=rng.normal(size=len(s))) for s in samples()]
    found, metrics = RewardKl(KlOptions(place="reward", coef=0.3, estimator=name)).apply(batch)
    total = 0.0
    for before, after in zip(batch, found, strict=True):
        assert before.old_logprobs is not None and before.ref_logprobs is not None and after.rewards is not None
        cost = np.where(before.loss_weights != 0, kl(before.old_logprobs - before.ref_logprobs), 0.0)
        np.testing.assert_allclose(after.rewards, -0.3 * cost, atol=1e-6)
        total += float(cost.sum())
    num_tokens = sum(s.num_weighted for s in batch)
    assert reduce(metrics)["policy/kl_in_reward"] == pytest.approx(total / num_tokens, rel=1e-5)


def test_weight_of_the_penalty_follows_its_target() -> None:
    batch = [s.replace(old_logprobs=np.ones(len(s)), ref_logprobs=np.zeros(len(s))) for s in samples()]
    made = RewardKl(KlOptions(place="reward", coef=0.1, target=0.5, horizon=10))
    made.apply(batch)
    made.apply(batch)
    assert made.coef == 0.1
    made.adapt()
    assert made.coef == pytest.approx(0.1 * (1 + 0.2 * 4 / 10))
    again = RewardKl(KlOptions(place="reward", coef=0.1, target=0.5, horizon=10))
    again.load_state_dict(made.state_dict())
    assert again.coef == made.coef
    refuses(lambda: made.apply(samples()), TrainingError, "no log-probabilities of the policy and the reference")
