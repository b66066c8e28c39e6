"""The losses that TRL has too, against TRL's own code: the value, and the gradient by each log-probability, in float64.

TRL runs in the interpreter that `python scripts/environments/build.py trl` makes, 1.16.0; without it these are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.high_entropy import select_high_entropy
from polyturn.algorithms.kl import k3
from polyturn.algorithms.losses import bind, policy_losses
from support.samples import sample_of

ROOT = Path(__file__).parents[3]
LENGTHS = (9, 14, 4, 11, 3)
"""41 tokens: TRL's quantile interpolates between two entropies, and of 41 the fifth is the same set by both."""


class Case(NamedTuple):
    """A loss under the names of both libraries."""

    trl: dict[str, Any]
    loss: str
    average: str
    options: Mapping[str, Any] = MappingProxyType({})
    kl: float = 0.0
    is_weighed_kl: bool = False
    share: float = 1.0


SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
CASES = {
    "grpo": Case({"loss_type": "grpo"}, "ppo_clip", "seq-mean-token-mean"),
    "bnpo": Case({"loss_type": "bnpo"}, "ppo_clip", "token-mean"),
    "dapo": Case({"loss_type": "dapo"}, "dapo", "token-mean"),
    "dr_grpo": Case({"loss_type": "dr_grpo"}, "ppo_clip", "seq-mean-token-sum-norm"),
    "gspo": Case({"loss_type": "grpo", **SEQUENCE}, "gspo_sequence", "seq-mean-token-mean"),
    "luspo": Case({"loss_type": "luspo", **SEQUENCE}, "luspo", "seq-mean-token-sum"),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 1.28}, "cispo", "token-mean"),
    "sapo": Case(  # TRL holds its temperatures in float32, which 1.05 is not
        {"loss_type": "sapo", "sapo_temperature_neg": 1.25}, "sapo", "seq-mean-token-mean", {"tau_neg": 1.25}
    ),
    "vespo": Case({"loss_type": "vespo"}, "vespo", "token-mean"),
    "dual clip": Case({"loss_type": "grpo", "delta": 1.5}, "ppo_clip", "seq-mean-token-mean", {"dual_clip": 1.5}),
    "kl": Case({"loss_type": "grpo", "beta": 0.1}, "ppo_clip", "seq-mean-token-mean", kl=0.1),
    "kl importance": Case(
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        "ppo_clip",
        "seq-mean-token-mean",
        kl=0.1,
        is_weighed_kl=True,
    ),
    "high entropy": Case({"loss_type": "grpo", "top_entropy_quantile": 0.2}, "ppo_clip", "seq-mean-token-mean", share=0.2),
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(0), (len(LENGTHS), max(LENGTHS))
    mask = (np.arange(shape[1])[None] < np.array(LENGTHS)[:, None]).astype(float)
    logprobs = -rng.gamma(2.0, 0.7, shape)
    return {
        "logprobs": logprobs,
        "old": logprobs + rng.normal(0, 0.25, shape),
        "ref": logprobs + rng.normal(0, 0.25, shape),
        "entropies": rng.gamma(2.0, 0.5, shape).astype(np.float32),  # TRL's threshold is in float32
        "mask": mask,
        "advantages": rng.normal(size=shape[0]),
    }


@pytest.fixture(scope="module")
def theirs(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    where = [sys.executable, str(ROOT / "scripts/environments/build.py"), "trl", "--where"]
    python = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    if not (python.parents[1] / ".complete").exists():
        pytest.skip("TRL's interpreter is not built: python scripts/environments/build.py trl")
    request = {k: v.tolist() for k, v in arrays.items()} | {"cases": {name: case.trl for name, case in CASES.items()}}
    worker = [str(python), "-P", str(ROOT / "tests/support/trl_losses.py")]  # beside it lies a `tokenizers.py`
    done = subprocess.run(worker, input=json.dumps(request), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ours(arrays: dict[str, np.ndarray], case: Case) -> tuple[float, np.ndarray]:
    """Return the loss and its gradient, through the functions and coefficients that a run takes."""
    samples = [sample_of(("g", str(i), 0), np.ones(n), np.ones(n)) for i, n in enumerate(LENGTHS)]
    entropies = [arrays["entropies"][i, :n] for i, n in enumerate(LENGTHS)]
    if case.share < 1:
        samples = select_high_entropy(samples, entropies, case.share).samples
    coefs = np.concatenate(loss_coefs(samples, mode=case.average))
    factors = np.concatenate([np.ones(len(s)) if s.correction is None else s.correction for s in samples])
    is_token = arrays["mask"] > 0
    logprobs = torch.tensor(arrays["logprobs"][is_token], requires_grad=True)
    old, ref = (torch.tensor(arrays[name][is_token]) for name in ("old", "ref"))
    of_token = torch.tensor(np.repeat(arrays["advantages"], LENGTHS))
    sequence = torch.tensor(np.repeat(np.arange(len(LENGTHS)), LENGTHS))
    loss = bind(policy_losses.resolve(case.loss), kwargs=case.options)(logprobs, old, of_token, sequence).loss_T
    loss = loss * torch.tensor(factors)
    if case.kl:
        kl = k3(logprobs, ref)
        loss = loss + case.kl * (kl * (logprobs - old).exp() if case.is_weighed_kl else kl)
    total = (loss * torch.tensor(coefs)).sum()
    total.backward()
    gradient = np.zeros_like(arrays["mask"])
    gradient[is_token] = logprobs.grad
    return float(total.detach()), gradient


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(arrays: dict[str, np.ndarray], theirs: dict[str, Any], name: str) -> None:
    loss, gradient = ours(arrays, CASES[name])
    difference = np.abs(gradient - np.array(theirs[name]["gradient"]) * (arrays["mask"] > 0)).max()
    assert loss == pytest.approx(theirs[name]["loss"], rel=1e-12, abs=1e-14)
    assert difference < 1e-12
    assert np.abs(gradient).max() > 1e-4
