"""The policy loss on the tokens of highest entropy: against a loop over whole rows, however the step is cut."""

from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.high_entropy import select_high_entropy
from polyturn.algorithms.options import AlgorithmOptions, AverageOptions, KlOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.core.metrics import reduce
from polyturn.core.sample import TrainSample
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from support.models import tiny_model
from support.samples import sample_of

VOCAB, LENGTHS = 48, (9, 12, 5, 17, 7)


def samples(**changes: Any) -> list[TrainSample]:
    rng = np.random.default_rng(3)
    made = []
    for i, length in enumerate(LENGTHS):
        weights = (np.arange(length) > 1) & (rng.random(length) < 0.8)
        sample = sample_of(
            ("g", f"t{i}", 0),
            rng.integers(0, VOCAB, length),
            weights,
            advantages=weights * rng.normal(size=length),
            old_logprobs=np.full(length, -3.8),
            ref_logprobs=np.full(length, -3.9),
            temperature=0.7,
        )
        made.append(sample.replace(**changes))
    return made


def policy(share: float, mode: str = "token-mean", layout: LayoutSettings | None = None) -> ModelPolicy:
    kl, average = KlOptions(coef=0.1), AverageOptions(name=mode)  # type: ignore[arg-type]
    loss = LossSettings(algorithm=AlgorithmOptions(high_entropy_share=share, kl=kl, aggregate=average))
    model = tiny_model(VOCAB, hidden=16, seed=1).double()
    return local_policy(model, optim=OptimSettings(), loss=loss, layout=layout, reference=True)


def gradient(made: ModelPolicy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in made.backend.model.parameters() if p.grad is not None])


def brute_force(made: ModelPolicy, batch: list[TrainSample], share: float, mode: str) -> torch.Tensor:
    """Return the loss, PPO's clip at the chosen tokens and k3 at all, one sample at a time, the choice made by sorting."""
    rows = []
    for sample, coefs in zip(batch, loss_coefs(batch, mode=mode), strict=True):
        ids = torch.tensor(sample.token_ids.tolist())
        all_logprobs = torch.log_softmax(made.backend.model(input_ids=ids[None]).logits[0] / sample.temperature, -1)
        for t in np.flatnonzero(sample.loss_weights):
            at = all_logprobs[t - 1]
            entropy = float(-(at.exp() * at).sum().detach())
            old, reference = float(sample.old_logprobs[t]), float(sample.ref_logprobs[t])
            advantage = float(sample.advantages[t])
            ratio = (at[ids[t]] - old).exp()
            clip = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            log = reference - at[ids[t]]
            rows.append((entropy, coefs[t] * clip, coefs[t] * 0.1 * (log.exp() - 1 - log)))
    kept = sorted(range(len(rows)), key=lambda i: -rows[i][0])[: int(np.ceil(share * len(rows)))]
    return sum((rows[i][1] for i in kept), torch.zeros(())) + sum((row[2] for row in rows), torch.zeros(()))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(
    "layout",
    [
        LayoutSettings(),
        LayoutSettings(max_tokens_per_batch=10),
        LayoutSettings(max_tokens_per_batch=20, max_targets_per_batch=7),
        LayoutSettings(packed=True, max_tokens_per_batch=25),
    ],
    ids=["one_batch", "micro_batches", "few_targets", "packed"],
)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_gradient_is_that_of_the_chosen_tokens(layout, mode, share):
    made, batch = policy(share, mode, layout), samples()
    made.forward_backward(batch)
    found = gradient(made)
    made.backend.optimizer.zero_grad()
    brute_force(made, batch, share, mode).backward()
    assert torch.allclose(found, gradient(made), rtol=1e-6, atol=1e-8)


def test_threshold_is_reported():
    made = policy(0.2)
    metrics = reduce(made.forward_backward(samples()).metrics)
    assert 0 < metrics["policy/high_entropy_threshold"] < np.log(VOCAB)
    assert metrics["policy/high_entropy_threshold"] > metrics["policy/entropy"]
    assert "policy/high_entropy_threshold" not in reduce(policy(1.0).forward_backward(samples()).metrics)


def test_threshold_is_over_the_whole_step():
    """A sample of low entropies loses all of its tokens to another, and a factor that is there is kept."""
    low, high = (samples()[i].replace(loss_weights=np.ones(LENGTHS[i])) for i in (0, 1))
    entropies = [np.linspace(0.1, 0.5, LENGTHS[0]), np.linspace(1.0, 2.0, LENGTHS[1])]
    high = high.replace(correction=np.full(LENGTHS[1], 0.5))
    found = select_high_entropy([low, high], entropies, 12 / 21)
    assert not found.samples[0].correction.any()
    assert (found.samples[1].correction == 0.5).all()
    assert found.threshold == pytest.approx(1.0)


def test_equal_entropies_stay_together():
    sample = samples()[0].replace(loss_weights=np.ones(9))
    entropy = np.array([1, 1 + 1e-7, 1 - 1e-7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    found = select_high_entropy([sample], [entropy], 1 / 9)
    assert found.samples[0].correction.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_untrained_tokens_count_for_nothing():
    sample = samples()[0].replace(loss_weights=np.array([0, 0, 0, 0, 0, 1, 1, 1, 1]))
    entropy = np.array([9.0, 9, 9, 9, 9, 0.1, 0.2, 0.3, 0.4])
    assert select_high_entropy([sample], [entropy], 0.5).threshold == pytest.approx(0.3)
    assert select_high_entropy([], [], 0.5).samples == []
