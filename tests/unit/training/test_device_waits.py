"""Where a step waits for its device: once for the results of all micro-batches, once for the gradient's norm, and never in a
micro-batch.

The first is counted on the CPU. The second is tried on torch's meta device, which has no values, so that whatever needs one
raises, as do shapes that depend on values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyturn.algorithms.losses import policy_losses
from polyturn.algorithms.options import AlgorithmOptions, KlOptions, RoutingOptions
from polyturn.batching.layout import LayoutSettings, layout
from polyturn.core.sample import TrainSample
from polyturn.engines.routers import Routers
from polyturn.training.backend import TermWeights
from polyturn.training.hf import build_model
from polyturn.training.loss_terms import LossSettings, PassFigures, PolicyTerms
from polyturn.training.model import PolicyModel
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.models import tiny_model
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


class UploadMode(TorchDispatchMode):
    """Notes copies to the meta device for which a program would wait, as it does without `non_blocking`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_upload = func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and result.is_meta
        if is_upload and not kwargs.get("non_blocking"):
            self.blocking.append(f"{tuple(result.shape)} {result.dtype}")
        return result


def samples_of(*, routes: tuple[int, ...] | None = None, has_observed: bool = False, **arrays: Any) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    weights = (np.arange(32) > 4).astype(np.float32)
    observed = np.where(weights == 0, np.arange(32) / 100, 0).astype(np.float32)
    arrays |= {"observed": observed} if has_observed else {}
    return [
        sample_of(
            (str(i), "0", 0),
            rng.integers(0, 64, 32),
            weights,
            advantages=np.full(32, (-1.0) ** i, np.float32),
            rollout_logprobs=np.full(32, -4.0, np.float32),
            routed_experts=None if routes is None else rng.integers(0, 4, (32, *routes)).astype(np.uint8),
            **{name: np.broadcast_to(np.float32(value), 32) for name, value in arrays.items()},
        )
        for i in range(8)
    ]


def waits_of_a_step(*, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Return the number of micro-batches of a step, and how often it waits for the device."""
    samples = samples_of()
    policy = local_policy(
        build_model(CONFIG, seed=0),
        optim=OptimSettings(),
        layout=LayoutSettings(max_tokens_per_batch=max_tokens, packed=True),
        loss=LossSettings(),
    )
    policy.forward_backward(samples)  # the first pass also tries whether the model can be packed
    policy.optim_step()
    counting = CountingMode()

    def counted(name: str, is_wait: Callable[..., bool]) -> None:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counting.counts[name] += is_wait(*args, **kwargs)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, method)

    counted("cpu", lambda *args, **kwargs: True)
    counted("to", lambda *args, **kwargs: "cpu" in (*args, *kwargs.values()))
    with counting:
        metrics = policy.forward_backward(samples).metrics
        policy.optim_step()
    return metrics["loss/micro_batches"].value, counting.counts.total()


def test_step_waits_for_device_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    few, waits_of_few = waits_of_a_step(max_tokens=128, monkeypatch=monkeypatch)
    many, waits_of_many = waits_of_a_step(max_tokens=32, monkeypatch=monkeypatch)
    assert few < many
    # The results of the pass, and the gradient's norm.
    assert waits_of_few == waits_of_many == 2


def run_on_meta(model: Any, samples: list[TrainSample], *, settings: LossSettings) -> UploadMode:
    """Compute a micro-batch forward and backward on the meta device."""
    network = PolicyModel(model, routers=Routers.of(model))
    model.to("meta")
    coefs = [s.loss_weights for s in samples]
    (batch,) = layout(samples, coefs, settings=LayoutSettings(max_tokens_per_batch=512, packed=True), device="meta")
    terms_of = PolicyTerms(settings, has_reference=True).bind(samples, TermWeights(kl=0.1, entropy=0.1))
    figures = PassFigures()
    with UploadMode() as uploads, network.routed(batch):
        terms = terms_of(network, batch)
        loss = terms.total(batch.loss_coef_S)
        figures.add(batch, terms, loss)
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return uploads


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_micro_batch_needs_no_value(name: str) -> None:
    algorithm = AlgorithmOptions(kl=KlOptions(coef=0.1, importance=True), observation_coef=0.1)
    settings = LossSettings(policy_loss=policy_losses.resolve(name), algorithm=algorithm)
    samples = samples_of(old_logprobs=-4.0, ref_logprobs=-4.1, correction=1.0, marks=1.0, has_observed=True)
    uploads = run_on_meta(build_model(CONFIG, seed=0), samples, settings=settings)
    assert uploads.blocking == []


@pytest.mark.parametrize(("experts", "dtype"), [("batched_mm", torch.float32), ("grouped_mm", torch.bfloat16)])
def test_micro_batch_with_experts_needs_no_value(experts: str, dtype: torch.dtype) -> None:
    algorithm = AlgorithmOptions(kl=KlOptions(coef=0.1), routing=RoutingOptions(balance_coef=0.1))
    model = tiny_model(64, "qwen3_moe", experts=4).to(dtype)
    model.set_experts_implementation(experts)
    samples = samples_of(ref_logprobs=-4.1, routes=(2, 2))
    uploads = run_on_meta(model, samples, settings=LossSettings(algorithm=algorithm))
    assert uploads.blocking == []
