"""The observation loss: cross-entropy on the texts of tools and users, beside a policy loss that does not see it."""

from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms.losses import policy_losses
from polyturn.algorithms.options import AlgorithmOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import TrainingError
from polyturn.core.metrics import reduce
from polyturn.core.sample import TrainSample
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from support.models import tiny_model
from support.samples import sample_of

VOCAB = 48
ROLES = ["ppaaooaoo", "ppaooooa", "ppppaa", "pao"]
"""Prompt, action (sampled) and observation; two samples end with an observation and one has none."""


def samples(**changes: Any) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    made = []
    for i, roles in enumerate(ROLES):
        weights = np.array([r == "a" for r in roles], np.float32)
        sample = sample_of(
            ("g", f"t{i}", 0),
            rng.integers(0, VOCAB, len(roles)),
            weights,
            advantages=weights * (1.0 if i % 2 else -1.0),
            observed=np.array([r == "o" for r in roles], np.float32),
        )
        made.append(sample.replace(**changes))
    return made


def policy(coef: float, *, name: str = "ppo_clip", layout: LayoutSettings | None = None) -> ModelPolicy:
    loss = LossSettings(policy_loss=policy_losses.resolve(name), algorithm=AlgorithmOptions(observation_coef=coef))
    model = tiny_model(VOCAB, hidden=16, seed=1).double()
    return local_policy(model, optim=OptimSettings(), loss=loss, layout=layout)


def gradient(made: ModelPolicy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in made.backend.model.parameters() if p.grad is not None])


def brute_force(model: Any, batch: list[TrainSample], coef: float) -> torch.Tensor:
    """Return coef times the mean cross-entropy over all observed tokens, from whole rows, one sample at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample, roles in zip(batch, ROLES, strict=True):
        ids = torch.tensor(sample.token_ids.tolist())
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        for t in (t for t, role in enumerate(roles) if role == "o"):
            total, count = total - logprobs[t - 1, ids[t]], count + 1
    return coef * total / count


@pytest.mark.parametrize(
    "layout",
    [
        LayoutSettings(),
        LayoutSettings(max_tokens_per_batch=9),
        LayoutSettings(packed=True),
        LayoutSettings(packed=True, max_targets_per_batch=6),
    ],
    ids=["one_batch", "micro_batches", "packed", "packed_micro_batches"],
)
def test_gradient_is_that_of_the_mean_cross_entropy(layout):
    made = policy(0.3, name="none", layout=layout)
    batch = samples(temperature=0.7)  # the policy's temperature; the cross-entropy is at 1
    found = reduce(made.forward_backward(batch).metrics)
    grads = gradient(made)
    made.backend.optimizer.zero_grad()
    loss = brute_force(made.backend.model, batch, 0.3)
    loss.backward()
    assert torch.allclose(grads, gradient(made), rtol=1e-6, atol=1e-7)
    assert found["loss/observation"] == found["loss/total"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["policy/observation_nll"] == pytest.approx(loss.item() / 0.3, rel=1e-6)
    assert found["tokens/observed"] == sum(roles.count("o") for roles in ROLES)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
def test_policy_terms_do_not_see_observations(name):
    """The gradient is the sum of the two, and every figure of the policy is the one without observations."""
    both, alone, observing = policy(0.3, name=name), policy(0.0, name=name), policy(0.3, name="none")
    batch = [
        s.replace(old_logprobs=lp - 0.1 * s.loss_weights) for s, lp in zip(samples(), both.score(samples()), strict=True)
    ]
    passed, plain = (reduce(made.forward_backward(batch).metrics) for made in (both, alone))
    observing.forward_backward(batch)
    assert torch.allclose(gradient(both), gradient(alone) + gradient(observing), rtol=1e-6, atol=1e-7)
    own = [key for key in plain if key.startswith(("policy/", "loss/policy", "tokens/trained"))]
    assert {key: passed[key] for key in own} == pytest.approx({key: plain[key] for key in own})
    assert "loss/observation" not in plain


def test_scores_are_those_without_observations():
    made = policy(0.3)
    plain = made.score(samples(observed=None))
    for sample, score, without in zip(samples(), made.score(samples()), plain, strict=True):
        assert np.allclose(score, without) and not score[sample.loss_weights == 0].any()


def test_samples_without_origins_are_refused():
    with pytest.raises(TrainingError, match=r"g/t0/0|t0.*observed"):
        policy(0.3).forward_backward(samples(observed=None))
