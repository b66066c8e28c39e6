"""How often a step waits for the device, which must not depend on the number of its micro-batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyturn.batching.layout import LayoutSettings
from polyturn.training.hf import build_model
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.samples import sample_of

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "aten.equal", "unique")
"""Operations that need a value, or a shape that depends on values, from the device."""


class CountingMode(TorchDispatchMode):
    """Counts operations for which a program waits for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.update(name for name in WAITS if name in str(func))
        return func(*args, **(kwargs or {}))


def waits_of_a_step(*, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Return the number of micro-batches of a step, and how often it waits for the device."""
    rng = np.random.default_rng(0)
    samples = [
        sample_of(
            (str(i), "0", 0),
            rng.integers(0, 64, 32),
            np.r_[0, np.ones(31)].astype(np.float32),
            advantages=np.full(32, (-1.0) ** i, np.float32),
            rollout_logprobs=np.full(32, -4.0, np.float32),
        )
        for i in range(8)
    ]
    policy = local_policy(
        build_model(CONFIG, seed=0),
        optim=OptimSettings(),
        layout=LayoutSettings(max_tokens_per_batch=max_tokens, packed=True),
        loss=LossSettings(),
    )
    policy.forward_backward(samples)  # the first pass also tries whether the model can be packed
    policy.optim_step()
    counting = CountingMode()

    def counted(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counting.counts[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, method)

    for name in ("tolist", "numpy", "cpu"):
        counted(name)
    with counting:
        metrics = policy.forward_backward(samples).metrics
        policy.optim_step()
    return metrics["loss/micro_batches"].value, counting.counts.total()


def test_step_waits_for_device_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    few, waits_of_few = waits_of_a_step(max_tokens=128, monkeypatch=monkeypatch)
    many, waits_of_many = waits_of_a_step(max_tokens=32, monkeypatch=monkeypatch)
    assert few < many
    # The figures, the log-probabilities and entropies to compare with the engine's, and the gradient's norm.
    assert waits_of_few == waits_of_many == 4
