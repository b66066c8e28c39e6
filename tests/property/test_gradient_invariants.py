"""I7: the gradient does not depend on the micro-batch split, the layout, or the ranks; `test_segment_invariants.py` cuts.

The comparison is a plain loop that knows none of them: one sample at a time, no padding, logits at every position.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyturn.algorithms.aggregate import MODES, loss_coefs
from polyturn.algorithms.correction import correct
from polyturn.algorithms.kl import entropy, k3
from polyturn.algorithms.losses import policy_losses, ppo_clip
from polyturn.algorithms.options import (
    AlgorithmOptions,
    AverageOptions,
    Bounds,
    CorrectionSettings,
    DistillSettings,
    KlOptions,
)
from polyturn.batching.layout import LayoutSettings
from polyturn.core.sample import TrainSample
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy, with_marks
from polyturn.training.rank_group import assign
from support.models import in_float64, tiny_model
from support.samples import sample_of

torch.set_num_threads(1)
VOCAB = 48
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


MODEL = in_float64(tiny_model(VOCAB, hidden=16, layers=2, heads=2, kv_heads=1))
TEACHER = tiny_model(VOCAB, hidden=16, layers=1, heads=2, kv_heads=1, seed=7).double()


def batch_of(seed: int, *, size: int = 6, longest: int = 24) -> list[TrainSample]:
    """Random samples: several trajectories, some with two segments, observed stretches, two temperatures."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(size):
        n = int(rng.integers(2, longest))
        weights = rng.choice([0.0, 0.5, 1.0], size=n).astype(np.float32)
        weights[0], weights[-1] = 0.0, 1.0
        samples.append(
            sample_of(
                ("g", str(i // 2 if i < 4 else i), i % 2),
                rng.integers(0, VOCAB, n),
                weights,
                old_logprobs=rng.normal(-3.8, 0.3, n),
                ref_logprobs=rng.normal(-3.8, 0.3, n),
                advantages=rng.normal(size=n),
                observed=(weights == 0) & (np.arange(n) > 0),
                temperature=1.0 if seed % 2 else float(rng.choice([0.7, 1.0])),
            )
        )
    return samples


def gradient(policy: ModelPolicy) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in policy.backend.model.named_parameters() if p.grad is not None}
    policy.backend.optimizer.zero_grad()
    return found


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < tolerance


def algorithm_of(mode: str, estimator: str | None = None) -> AlgorithmOptions:
    kl = KlOptions(coef=0.1, estimator=estimator)
    return AlgorithmOptions(aggregate=AverageOptions(name=mode), kl=kl, entropy_coef=0.01)  # type: ignore[arg-type]


def policy_of(dtype: torch.dtype, tokens: int, targets: int | None = None, mode: str = "token-mean") -> ModelPolicy:
    return local_policy(
        copy.deepcopy(MODEL).to(dtype),
        optim=OptimSettings(),
        loss=LossSettings(policy_loss_kwargs={"clip_high": 0.28}, algorithm=algorithm_of(mode)),
        layout=LayoutSettings(max_tokens_per_batch=tokens, max_targets_per_batch=targets),
        reference=True,
    )


def plain_gradient(samples: list[TrainSample], dtype: torch.dtype, mode: str) -> dict[str, Tensor]:
    model = copy.deepcopy(MODEL).to(dtype).train()
    total = torch.zeros((), dtype=dtype)
    for sample, coef in zip(samples, loss_coefs(samples, mode=mode), strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / sample.temperature, -1)
        chosen = logprobs[torch.arange(len(ids) - 1), ids[1:]]
        old, ref, advantages, weight = (
            torch.from_numpy(np.array(a))[1:].to(dtype)
            for a in (sample.old_logprobs, sample.ref_logprobs, sample.advantages, coef)
        )
        terms = ppo_clip(chosen, old, advantages, clip_high=0.28).loss_T + 0.1 * k3(chosen, ref) - 0.01 * entropy(logprobs)
        total = total + (terms * weight).sum()
    total.backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES), tokens=st.integers(1, 200), targets=st.integers(1, 60))
def test_gradient_equals_that_of_a_plain_loop(dtype, seed, mode, tokens, targets):
    samples = batch_of(seed)
    policy = policy_of(dtype, tokens, targets, mode)
    policy.forward_backward(samples)
    assert_close(gradient(policy), plain_gradient(samples, dtype, mode), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 200))
def test_supervised_gradient_is_independent_of_the_split(dtype, seed, tokens):
    samples = batch_of(seed)
    whole, split = policy_of(dtype, 10**6), policy_of(dtype, tokens)
    whole.sft_forward_backward(samples)
    split.sft_forward_backward(samples[::-1])
    assert_close(gradient(whole), gradient(split), TOLERANCE[dtype])


@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_tokens_without_weight_have_no_influence(seed):
    """Numbers on unweighted tokens, and tokens after the last weighted one, reach no gradient."""
    samples = batch_of(seed)
    rng = np.random.default_rng(seed)
    changed = []
    for sample in samples:
        noise = np.where(sample.loss_weights != 0, 0.0, rng.normal(size=len(sample))).astype(np.float32)
        longer = {
            name: np.append(getattr(sample, name) + noise, np.float32(rng.normal()))
            for name in ("advantages", "old_logprobs", "ref_logprobs")
        }
        changed.append(
            sample.replace(
                token_ids=np.append(sample.token_ids, rng.integers(0, VOCAB)),
                loss_weights=np.append(sample.loss_weights, 0.0),
                turn_ids=np.append(sample.turn_ids, 0),
                observed=np.append(sample.observed, 0.0),
                **longer,
            )
        )
    policy = policy_of(torch.float64, 100)
    policy.forward_backward(samples)
    expected = gradient(policy)
    policy.forward_backward(changed)
    assert_close(expected, gradient(policy), 1e-12)


OWN_LOSSES = sorted(n for n in policy_losses if policy_losses.resolve(n).__module__.startswith("polyturn.algorithms"))


@pytest.mark.parametrize("name", OWN_LOSSES)
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 200), targets=st.integers(1, 60), mode=st.sampled_from(MODES))
def test_loss_is_independent_of_the_split(name, seed, tokens, targets, mode):
    """With everything at once: corrected off-policy, marked tokens, KL, entropy, observations and a teacher. Sequences stay
    whole."""
    rng = np.random.default_rng(seed)
    samples = [s.replace(rollout_logprobs=s.old_logprobs + rng.normal(0, 0.3, len(s))) for s in batch_of(seed)]
    samples = correct(samples, CorrectionSettings(weight="sequence", reject={"token_k1": Bounds(0.5, 2.0)})).samples
    grads = []
    for max_tokens, max_targets in ((10**6, None), (tokens, targets)):
        made = local_policy(
            copy.deepcopy(MODEL).double(),
            optim=OptimSettings(),
            loss=LossSettings(
                policy_loss=policy_losses.resolve(name),
                distill=DistillSettings(teacher="teacher", coef=0.2),
                algorithm=dataclasses.replace(algorithm_of(mode, estimator="k3+"), observation_coef=0.3),
            ),
            layout=LayoutSettings(max_tokens_per_batch=max_tokens, max_targets_per_batch=max_targets),
            reference=True,
            teacher=TEACHER,
        )
        made.forward_backward(samples)
        grads.append(gradient(made))
    assert_close(*grads, 1e-9)
    assert any(float(g.abs().max()) > 1e-6 for g in grads[0].values())


LAYOUTS = {
    "rows": {},
    "packed": {"packed": True},
    "shared": {"shared_prefix": True, "min_shared": 2, "min_saving": 0.0},
}


@settings(max_examples=16)
@given(
    name=st.sampled_from(OWN_LOSSES),
    mode=st.sampled_from(MODES),
    kind=st.sampled_from(sorted(LAYOUTS)),
    num_ranks=st.integers(1, 3),
    tokens=st.integers(8, 200),
    seed=st.integers(0, 10**6),
)
def test_gradient_is_independent_of_layout_split_and_ranks(name, mode, kind, num_ranks, tokens, seed):
    """Each rank's share is laid out as the plan over all of them says; its gradients add up to that of one batch of rows."""
    samples = [s.replace(token_ids=np.concatenate([np.arange(8), s.token_ids])[: len(s)]) for s in batch_of(seed)]
    coefs = loss_coefs(samples, mode=mode)
    loss = LossSettings(policy_loss=policy_losses.resolve(name), algorithm=algorithm_of(mode))
    model = copy.deepcopy(MODEL).double()
    one = local_policy(model, optim=OptimSettings(), loss=loss, reference=True)
    marked = with_marks(samples, loss, score=one.score, seed=0)
    one.forward_backward(marked, coefs=coefs)
    expected = gradient(one)
    own = LayoutSettings(max_tokens_per_batch=tokens, **LAYOUTS[kind])
    rank = local_policy(model, optim=OptimSettings(), loss=loss, layout=own, reference=True)
    for share in assign(marked, settings=own, num_shares=num_ranks):
        if share:
            rank.forward_backward([marked[i] for i in share], coefs=[coefs[i] for i in share])
    assert_close(expected, gradient(rank), 1e-9)
