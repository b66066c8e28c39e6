"""Trainer and engine compare logprobs of sampled tokens, and each planted fault is named."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from polyturn.core.metrics import merge, reduce
from polyturn.core.sample import TrainSample
from polyturn.tracking.alarms import Alarms, diagnose
from polyturn.training.agreement import agreement
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.models import tiny_model
from support.samples import sample_of

TURNS, LENGTH = 5, 12


def samples(count: int = 8) -> list[TrainSample]:
    """Conversations of five turns: a prompt of 4, then 12 sampled tokens and 4 observed ones a turn."""
    rng = np.random.default_rng(0)
    is_sampled = np.array([0] * 4 + ([1] * LENGTH + [0] * 4) * TURNS, np.float32)
    turn_ids = np.array([-1] * 4 + [t for t in range(TURNS) for _ in range(LENGTH + 4)], np.int32)
    return [
        sample_of(
            ("g", str(i), 0),
            np.arange(len(is_sampled)),
            is_sampled,
            turn_ids=turn_ids,
            versions=np.where(is_sampled > 0, 3, -1),
            rollout_logprobs=np.where(is_sampled > 0, rng.uniform(-3, -0.1, len(is_sampled)), 0.0),
        )
        for i in range(count)
    ]


def trainer(batch: list[TrainSample], *, noise: float = 1e-4, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [s.rollout_logprobs + (s.loss_weights * rng.normal(0, noise, len(s))).astype(np.float32) for s in batch]


def first_tokens(sample: TrainSample) -> np.ndarray:
    return (sample.loss_weights > 0) & (np.roll(sample.loss_weights, 1) == 0)


def test_k3_and_percentiles_are_those_of_the_sampled_tokens() -> None:
    batch = samples(1)
    own = [batch[0].rollout_logprobs + 0.2 * batch[0].loss_weights]
    found = reduce(agreement(batch, own))
    assert found["policy/rollout_k3"] == pytest.approx(np.expm1(0.2) - 0.2, rel=1e-4)
    for name in ("difference", "difference_p99", "difference_max", "difference_first_token", "difference_later_tokens"):
        assert found[f"policy/rollout_{name}"] == pytest.approx(0.2, rel=1e-4)
    turns = {name.rpartition("_")[2] for name in found if name.startswith("policy/rollout_k3_")}
    assert turns == {"turn0", "turn1", "turn2", "turn3plus"}


def test_tokens_without_weight_do_not_count() -> None:
    batch = samples(2)
    own = trainer(batch, noise=0)
    own[0] = own[0] + 100 * (batch[0].loss_weights == 0)
    assert reduce(agreement(batch, own))["policy/rollout_difference_max"] == 0
    half = [
        agreement([s], [o + d * s.loss_weights]) for s, o, d in zip(batch, trainer(batch, noise=0), (0.1, 0.3), strict=True)
    ]
    found = reduce(merge(half))
    assert found["policy/rollout_difference_p99"] == pytest.approx(0.2, rel=1e-4)
    assert found["policy/rollout_difference_max"] == pytest.approx(0.3, rel=1e-4)
    empty = batch[0].replace(loss_weights=np.zeros(len(batch[0])))
    assert agreement([empty], own[:1]) == {}


def planted(fault: str) -> dict[str, float]:
    """The metrics of a step in which a fault was planted on the trainer's side."""
    batch = samples()
    own = trainer(batch)
    for sample, array in zip(batch, own, strict=True):
        sampled = sample.loss_weights > 0
        rng = np.random.default_rng(2)
        wrong = rng.normal(0, 1.5, len(sample))
        if fault == "template":
            array += np.where(sampled & (sample.turn_ids >= 1), wrong, 0).astype(np.float32)
        if fault == "scaffold":
            array += np.where(first_tokens(sample), -2.0, 0).astype(np.float32)
        if fault == "numerics":
            array += np.where(sampled, rng.normal(0, 0.1, len(sample)), 0).astype(np.float32)
        if fault in ("stale", "weights"):
            array += np.where(sampled, wrong * (0.1 if fault == "stale" else 1), 0).astype(np.float32)
    return {**reduce(agreement(batch, own)), "buffer/staleness": 2.0 if fault == "stale" else 0.0}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("template", "disagreement_template"),
        ("scaffold", "disagreement_scaffold"),
        ("numerics", "disagreement_numerics"),
        ("stale", "disagreement_stale"),
        ("weights", "disagreement_stale"),
    ],
)
def test_planted_fault_is_named(fault: str, name: str) -> None:
    found = diagnose(planted(fault))
    assert found.name == name


def test_engines_that_agree_raise_no_alarm() -> None:
    assert diagnose(planted("none")) is None
    assert (
        diagnose({"policy/rollout_difference": 0.012, "policy/rollout_difference_p99": 0.09, "policy/rollout_k3": 4e-4})
        is None
    )


def test_alarm_is_raised_once_until_it_changes() -> None:
    alarms, fine = Alarms(), planted("none")
    steps = [fine, planted("template"), planted("template"), planted("scaffold"), fine, planted("scaffold")]
    said = [[a.name for a in alarms.feed(step, metrics)] for step, metrics in enumerate(steps)]
    assert said == [[], ["disagreement_template"], [], ["disagreement_scaffold"], [], ["disagreement_scaffold"]]
    (alarm,) = Alarms().feed(7, planted("template"))
    assert "step 7" in alarm.message


# The same faults in a real model: the engine's logprobs are those that it would really compute.


def peaked_model(seed: int = 0) -> PreTrainedModel:
    """A tiny model whose predictions depend on its context, as those of a trained one do."""
    model = tiny_model(64, hidden=32, seed=seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(6.0 if "embed" in name else 12.0)
    return model


def engine_logprobs(model: PreTrainedModel, batch: list[TrainSample]) -> list[np.ndarray]:
    policy = local_policy(copy.deepcopy(model), optim=OptimSettings())
    return policy.score([s.replace(rollout_logprobs=None) for s in batch])


def rewritten(sample: TrainSample, turns: range) -> np.ndarray:
    """Its ids with other observations behind the given turns."""
    is_observed = (sample.loss_weights == 0) & np.isin(sample.turn_ids, list(turns))
    return np.where(is_observed, (sample.token_ids + 7) % 64, sample.token_ids)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("none", None),
        ("bfloat16", None),
        ("template", "disagreement_template"),
        ("numerics", "disagreement_numerics"),
        ("stale", "disagreement_stale"),
        ("weights", "disagreement_stale"),
    ],
)
def test_fault_in_a_real_model_is_named(fault: str, name: str | None) -> None:
    rng = np.random.default_rng(3)
    batch = [
        s.replace(token_ids=rng.integers(0, 64, len(s)), advantages=np.ones(len(s)), rollout_logprobs=None)
        for s in samples(6)
    ]
    model = peaked_model()
    engine, seen = model, batch
    if fault == "template":
        seen = [s.replace(token_ids=rewritten(s, range(TURNS))) for s in batch]
    elif fault == "bfloat16":
        engine = copy.deepcopy(model).to(torch.bfloat16)
    elif fault == "numerics":
        engine = copy.deepcopy(model)
        with torch.no_grad():
            for weight in engine.parameters():
                weight.copy_(weight.to(torch.float8_e5m2).float())
    elif fault == "weights":
        engine = peaked_model(seed=1)
    elif fault == "stale":
        engine = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for weight in engine.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.05 * weight.std())
    batch = [s.replace(rollout_logprobs=lp) for s, lp in zip(batch, engine_logprobs(engine, seen), strict=True)]
    policy = local_policy(model, optim=OptimSettings())
    metrics = reduce(policy.forward_backward(batch).metrics) | {"buffer/staleness": float(fault == "stale")}
    found = diagnose(metrics)
    assert (found and found.name) == name, (found, {k: v for k, v in metrics.items() if "rollout_diff" in k})
