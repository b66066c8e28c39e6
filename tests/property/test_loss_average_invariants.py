"""Every policy loss under every average: what the words say, and the same whatever the cut into batches and ranks (I7).

Here the log-probabilities themselves are the parameters, so all pairs fit into a second. That a model's gradient agrees too
is tests/property/test_gradient_invariants.py, on pairs drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms.aggregate import MODES, SEGMENT_WEIGHTS, loss_coefs
from polyturn.algorithms.correction import correct
from polyturn.algorithms.losses import bind, mark, policy_losses, selection_of
from polyturn.algorithms.options import Bounds, CorrectionSettings
from polyturn.core.sample import TrainSample
from support.samples import sample_of

LOSSES = sorted(n for n in policy_losses if policy_losses.resolve(n).__module__.startswith("polyturn.algorithms"))
NORM_LENGTH = 7.0


def batch_of(seed: int) -> list[TrainSample]:
    """Return trajectories of one to three segments, one of which has no weight at all, another one half weights."""
    rng = np.random.default_rng(seed)
    samples = []
    for trajectory, segments in enumerate([1, 3, 2, 1]):
        for segment in range(segments):
            n = int(rng.integers(3, 9))
            weights = rng.choice([0.0, 1.0] if trajectory else [0.0, 0.5], n) if trajectory != 3 else np.zeros(n)
            old = rng.normal(-2, 0.5, n)
            samples.append(
                sample_of(
                    ("g", str(trajectory), segment),
                    np.zeros(n, np.int32),
                    weights.astype(np.float32),
                    old_logprobs=old.astype(np.float32),
                    rollout_logprobs=(old + rng.normal(0, 0.2, n)).astype(np.float32),
                    advantages=rng.normal(size=n).astype(np.float32),
                )
            )
    reject = {"token_k1": Bounds(0.7, 1.5)}
    return correct(samples, CorrectionSettings(weight="token", cap=1.2, reject=reject)).samples


class Parameters:
    """The log-probability of every token of a batch, as the parameters of a policy."""

    def __init__(self, samples: Sequence[TrainSample], name: str, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self.samples = samples
        self.logprobs = [
            torch.tensor(np.float64(s.old_logprobs) + rng.normal(0, 0.3, len(s)), requires_grad=True) for s in samples
        ]
        loss = policy_losses.resolve(name)
        selection = selection_of(loss, kwargs={})
        self._marks = None if selection is None else mark(samples, selection, seed=seed)
        self._loss = bind(loss, kwargs={})

    def terms(self, chosen: Sequence[int]) -> list[torch.Tensor]:
        """Return for each of the chosen samples [n] the terms of its trained tokens, as one micro-batch computes them."""
        places = [np.flatnonzero(self.samples[i].loss_weights) for i in chosen]

        def flat(arrays: Sequence[Any]) -> torch.Tensor:
            return torch.tensor(np.concatenate([np.asarray(a, np.float64)[p] for a, p in zip(arrays, places, strict=True)]))

        own = [self.samples[i] for i in chosen]
        logprobs = torch.cat([self.logprobs[i][torch.from_numpy(p)] for i, p in zip(chosen, places, strict=True)])
        sequence = torch.tensor(np.repeat(np.arange(len(chosen)), [len(p) for p in places]))
        marks = None if self._marks is None else flat([self._marks[i] for i in chosen])
        old, advantages = flat([s.old_logprobs for s in own]), flat([s.advantages for s in own])
        found = self._loss(logprobs, old, advantages, sequence, marks).loss_T * flat([s.correction for s in own])
        return list(torch.split(found, [len(p) for p in places]))

    def backward(self, chosen: Sequence[int], coefs: Sequence[np.ndarray]) -> float:
        """Add the gradient of one micro-batch, and return its loss."""
        total = torch.zeros((), dtype=torch.float64)
        for i, term in zip(chosen, self.terms(chosen), strict=True):
            total = total + (term * torch.from_numpy(coefs[i][np.flatnonzero(self.samples[i].loss_weights)])).sum()
        if total.requires_grad:
            total.backward()
        return total.item()

    def gradient(self) -> torch.Tensor:
        found = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.logprobs])
        for p in self.logprobs:
            p.grad = None
        return found.detach().clone()


def shares(count: int, pieces: int, rng: np.random.Generator) -> list[list[int]]:
    """Return 0 to count - 1 in some order, dealt out to `pieces`."""
    order = rng.permutation(count).tolist()
    return [order[k::pieces] for k in range(pieces) if order[k::pieces]]


def in_words(parameters: Parameters, mode: str, segment_weight: str) -> float:
    """The average as its name says it, over trajectories and their tokens."""
    weighted: dict[str, float] = {}
    weights: dict[str, float] = {}
    for sample, term in zip(parameters.samples, parameters.terms(range(len(parameters.samples))), strict=True):
        w = sample.loss_weights[np.flatnonzero(sample.loss_weights)].astype(np.float64)
        id = sample.id.trajectory
        weighted[id] = weighted.get(id, 0.0) + float((term.detach() * torch.from_numpy(w)).sum())
        weights[id] = weights.get(id, 0.0) + float(w.sum())
    live = [id for id, w in weights.items() if w > 0]
    if segment_weight == "per_trajectory":  # every trajectory as heavy as the average one
        mean = sum(weights[id] for id in live) / len(live)
        weighted = {id: weighted[id] * mean / weights[id] for id in live}
        weights = dict.fromkeys(live, mean)
    sums, n = [weighted[id] for id in live], len(live)
    return {
        "token-mean": sum(sums) / sum(weights[id] for id in live),
        "seq-mean-token-sum": sum(sums) / n,
        "seq-mean-token-mean": sum(weighted[id] / weights[id] for id in live) / n,
        "seq-mean-token-sum-norm": sum(sums) / n / NORM_LENGTH,
    }[mode]


@pytest.mark.parametrize("segment_weight", SEGMENT_WEIGHTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_average_is_over_the_whole_step(name: str, mode: str, segment_weight: str) -> None:
    for seed in range(3):
        samples = batch_of(seed)
        parameters = Parameters(samples, name, seed)
        coefs = loss_coefs(samples, mode=mode, norm_length=NORM_LENGTH, segment_weight=segment_weight)
        whole = parameters.backward(range(len(samples)), coefs)
        expected = parameters.gradient()
        assert whole == pytest.approx(in_words(parameters, mode, segment_weight), abs=1e-12)
        assert name == "none" or float(expected.abs().max()) > 0
        rng = np.random.default_rng([seed, 2])
        for num_ranks in (1, 2, 3):
            total = 0.0
            for of_rank in shares(len(samples), num_ranks, rng):
                for batch in shares(len(of_rank), int(rng.integers(1, 4)), rng):
                    total += parameters.backward([of_rank[i] for i in batch], coefs)
            assert total == pytest.approx(whole, abs=1e-12)
            assert float((parameters.gradient() - expected).abs().max()) < 1e-12
