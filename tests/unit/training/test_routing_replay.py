"""In training, tokens go to the experts that they went to when they were sampled, and gradients still reach the router."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms.options import AlgorithmOptions, RoutingOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import AlignmentError, ConfigError
from polyturn.core.metrics import reduce
from polyturn.core.routing import RouteShape
from polyturn.core.sample import TrainSample
from polyturn.engines.routers import Routers, RoutingPass
from polyturn.training.hf import checkpoint_activations
from polyturn.training.lora import add_lora
from polyturn.training.loss_terms import LossSettings
from polyturn.training.options import LoraSettings, OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from support.models import tiny_model
from support.refusals import refuses
from support.samples import sample_of

VOCAB = 48
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3")
SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=8)


def make(kind: str = "qwen3_moe") -> Any:
    return tiny_model(VOCAB, kind, hidden=16, layers=3 if kind == "deepseek_v3" else 2, spread=0.2)


def routes(count: int, rng: np.random.Generator) -> Any:
    """Return [count, 2, 2] experts by chance, two different ones a token, all but the last known."""
    drawn = np.argsort(rng.random((count, 2, 8)), axis=-1)[:, :, :2].astype(np.uint8)
    drawn[-1] = 255
    return drawn


def samples(seed: int = 0, num: int = 6, *, prefix: int = 20) -> list[TrainSample]:
    """Return samples of which each three begin alike: same tokens, same experts."""
    rng = np.random.default_rng(seed)
    made: list[TrainSample] = []
    for i in range(num):
        own = int(rng.integers(4, 12))
        weights = np.array([0.0] * prefix + [1.0] * own, np.float32)
        ids, chosen = rng.integers(0, VOCAB, prefix + own), routes(prefix + own, rng)
        if i % 3:
            before = made[-1]
            ids[:prefix], chosen[:prefix] = before.token_ids[:prefix], before.routed_experts[:prefix]
        made.append(
            sample_of(("g0", f"t{i}", 0), ids, weights, advantages=weights * (1.0 if i % 2 else -0.7), routed_experts=chosen)
        )
    return made


def policy(model: Any, *, replays: bool = True, balance: float = 0.0, **layout: Any) -> ModelPolicy:
    return local_policy(
        model,
        optim=OptimSettings(lr=1e-2),
        loss=LossSettings(
            algorithm=AlgorithmOptions(routing=RoutingOptions(replay="auto" if replays else "off", balance_coef=balance))
        ),
        layout=LayoutSettings(**layout),
    )


def gradients(made: ModelPolicy, batch: list[TrainSample]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the gradients of one step, and its metrics."""
    metrics = reduce(made.forward_backward(batch).metrics)
    found = {n: p.grad.clone() for n, p in made.backend.model.named_parameters() if p.grad is not None}
    made.backend.optimizer.zero_grad()
    return found, metrics


def without(batch: list[TrainSample]) -> list[TrainSample]:
    return [s.replace(routed_experts=None) for s in batch]


def own_routes(model: Any, batch: list[TrainSample]) -> list[TrainSample]:
    """Return the samples with the routes that `model` chooses now."""
    routers = Routers.of(model)
    assert routers is not None
    found = []
    for sample in batch:
        with torch.no_grad(), RoutingPass(routers) as routing:
            model(torch.from_numpy(sample.token_ids.astype(np.int64))[None])
            found.append(sample.replace(routed_experts=SHAPE.read(routing.read_choices().numpy())))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_own_routes_changes_nothing(kind: str) -> None:
    model, batch = make(kind), samples()
    made = policy(model)
    live, _ = gradients(made, without(batch))
    replayed, metrics = gradients(made, own_routes(model, batch))
    assert live.keys() == replayed.keys()
    assert all(torch.equal(live[name], replayed[name]) for name in live)
    assert metrics["policy/router_changed"] == metrics["policy/router_missing"] == 0
    told = made.score(batch)
    alone = made.score(without(batch))
    assert max(float(np.abs(a - b).max()) for a, b in zip(told, alone, strict=True)) > 1e-3
    off = policy(model, replays=False).score(batch)
    assert all(np.array_equal(a, b) for a, b in zip(off, alone, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_router_through_told_experts(kind: str) -> None:
    """The choice is given, so the loss is smooth in the router's weights: its gradient is that of finite differences."""
    model, batch = make(kind), samples(num=2, prefix=4)
    made = policy(model)
    routers = Routers.of(model)
    weight = routers.modules[0].weight
    made.forward_backward(batch)
    analytic = weight.grad.clone()

    def loss() -> float:
        total = sum(float((s.advantages * lp).sum()) for s, lp in zip(batch, made.score(batch), strict=True))
        return -total / sum(s.num_weighted for s in batch)

    # Scores are float32, so the step is wide and the comparison coarse.
    for place in ((0, 0), (3, 5), (7, 2)):
        with torch.no_grad():
            weight[place] += 0.05
            above = loss()
            weight[place] -= 0.1
            below = loss()
            weight[place] += 0.05
        assert float(analytic[place]) == pytest.approx((above - below) / 0.1, rel=0.05, abs=2e-4)


def test_gradients_do_not_depend_on_the_layout() -> None:
    """I7, in float32, which routers compute in: with told routes, missing ones and the balance loss."""
    model, batch = make(), samples()
    batch[1] = batch[1].replace(routed_experts=None)
    layouts: list[dict[str, Any]] = [
        {},
        {"max_tokens_per_batch": 40},
        {"packed": True},
        {"packed": True, "shared_prefix": True, "min_saving": 0.0, "min_shared": 4},
    ]
    found = [gradients(policy(model, balance=0.3, **one), batch) for one in layouts]
    first = found[0][0]
    for other, metrics in found[1:]:
        for name, grad in first.items():
            torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=1e-6)
        assert metrics["loss/router_balance"] == pytest.approx(found[0][1]["loss/router_balance"])
    assert found[3][1]["tokens/shared_prefix"] > 0


def test_prefix_with_other_experts_is_not_shared() -> None:
    model, batch = make(), samples()
    changed = batch[1].routed_experts.copy()
    changed[10] = (changed[10] + 1) % 8
    batch[1] = batch[1].replace(routed_experts=changed)
    shared = {"packed": True, "shared_prefix": True, "min_saving": 0.0, "min_shared": 4}
    grads, _ = gradients(policy(model, **shared), batch)
    plain, _ = gradients(policy(model), batch)
    for name, grad in plain.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_choose_the_same_experts(kind: str) -> None:
    batch = samples()
    plain, _ = gradients(policy(make(kind), balance=0.1), batch)
    model = make(kind)
    checkpoint_activations(model)
    again, _ = gradients(policy(model, balance=0.1), batch)
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6)


def test_missing_route_is_chosen_live_and_counted() -> None:
    model, batch = make(), samples(num=2)
    made = policy(model)
    half = [batch[0], batch[1].replace(routed_experts=None)]
    _, metrics = gradients(made, half)
    sizes = [len(s) - 1 for s in batch]
    assert metrics["policy/router_missing"] == pytest.approx(sizes[1] / sum(sizes))
    mixed, alone = made.score(half), made.score(without(batch))
    assert np.array_equal(mixed[1], alone[1])
    assert not np.array_equal(mixed[0], alone[0])
    assert gradients(made, without(batch))[1]["policy/router_missing"] == 1


def test_balance_loss_evens_out_experts() -> None:
    model = make()
    batch = [s.replace(routed_experts=None, advantages=np.zeros(len(s), np.float32)) for s in samples()]
    made = policy(model, replays=False, balance=1.0)
    before = reduce(made.forward_backward(batch).metrics)["policy/router_balance"]
    for _ in range(20):
        made.optim_step()
        after = reduce(made.forward_backward(batch).metrics)["policy/router_balance"]
    assert before > after > 0.99


def test_reference_chooses_its_own_experts() -> None:
    model = make()
    made = local_policy(model, optim=OptimSettings(), reference=True)
    batch = samples()
    reference = made.score(batch, reference=True)
    assert all(np.array_equal(a, b) for a, b in zip(reference, made.score(without(batch)), strict=True))


def test_routes_that_cannot_be_replayed_are_refused() -> None:
    refuses(lambda: policy(tiny_model(VOCAB), balance=0.1), ConfigError, "has no experts")
    adapted = make()
    add_lora(adapted, LoraSettings(target_modules=["gate"]))
    refuses(
        lambda: policy(adapted),
        ConfigError,
        "model.lora adapts the 8 experts",
        "set model.lora.target_modules to layers of attention",
    )
    batch = samples(num=1)
    assert batch[0].routed_experts is not None
    three = dataclasses.replace(batch[0], routed_experts=np.repeat(batch[0].routed_experts, 2, axis=1)[:, :3])
    refuses(lambda: policy(make()).score([three]), AlignmentError, "8 experts in each of 2 layers")
    many = dataclasses.replace(batch[0], routed_experts=np.full((len(batch[0]), 2, 2), 9, np.uint8))
    refuses(lambda: policy(make()).score([many]), AlignmentError, "experts up to 9")
