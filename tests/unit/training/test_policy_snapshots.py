"""Snapshots of the policy: their version at each step, and their state in a checkpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from polyturn.core.errors import CheckpointError
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.training.hf import frozen_copy, plain_weights
from polyturn.training.lora import LoraSettings, add_lora
from polyturn.training.policy_snapshots import PolicySnapshot, PolicySnapshots
from support.models import tiny_model


def trained(hidden: int = 32) -> Any:
    return tiny_model(64, hidden=hidden, layers=1)


def follower(model: Any, **options: Any) -> PolicySnapshot:
    copied = frozen_copy(model)
    return PolicySnapshot(name="past", model=copied, engine=EmbeddedEngine(copied, num_slots=2, max_context=64), **options)


def followers(model: Any, one: PolicySnapshot) -> PolicySnapshots:
    return PolicySnapshots([one], weights=lambda: plain_weights(model))


def step(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)


def first(model: Any) -> float:
    return float(next(iter(plain_weights(model).values())).flatten()[0])


@pytest.mark.parametrize(("every", "versions"), [(3, [0, 0, 3, 3, 3, 6]), (1, [1, 2, 3, 4, 5, 6]), (None, [0] * 6)])
async def test_snapshot_is_refreshed_every_so_many_steps(every: int | None, versions: list[int]) -> None:
    model = trained()
    one = follower(model, refresh_every=every)
    all_of_them = followers(model, one)
    await all_of_them.start(0)
    was = {0: first(model)}
    found = []
    for number in range(1, 7):
        step(model)
        was[number] = first(model)
        await all_of_them.follow(number)
        found.append(one.version)
        assert first(one.model) == was[one.version or 0]
    assert found == versions and one.engine.version == versions[-1]  # type: ignore[attr-defined]


async def test_checkpoint_holds_a_snapshot_that_differs() -> None:
    model = trained()
    one = follower(model, refresh_every=3)
    all_of_them = followers(model, one)
    await all_of_them.start(0)
    assert all_of_them.state_dict(0) == {}
    value = first(model)
    step(model)
    await all_of_them.follow(1)
    saved = all_of_them.state_dict(1)
    assert saved["past"]["version"] == 0
    assert float(next(iter(saved["past"]["weights"].values())).flatten()[0]) == value
    for number in (2, 3):
        step(model)
        await all_of_them.follow(number)
    assert all_of_them.state_dict(3) == {}
    assert float(next(iter(saved["past"]["weights"].values())).flatten()[0]) == value, "no refresh changes what was saved"


@pytest.mark.parametrize("at", [3, 4, 5])
async def test_resumed_run_has_the_snapshots_of_a_whole_run(at: int) -> None:
    model = trained()
    one = follower(model, refresh_every=3)
    before = followers(model, one)
    await before.start(0)
    for number in range(1, at + 1):
        step(model)
        await before.follow(number)
    saved = before.state_dict(at)
    other = follower(trained(hidden=32), refresh_every=3)
    step(other.model)
    after = followers(model, other)
    after.load_state_dict(saved)
    await after.start(at)
    assert other.version == one.version == 3 and first(other.model) == first(one.model)
    assert other.engine.version == 3  # type: ignore[attr-defined]
    assert after.state_dict(at).keys() == saved.keys()


async def test_missed_refresh_is_made_up_for_on_resume() -> None:
    """A run may be stopped between a step and the refresh that it brings."""
    model = trained()
    one = follower(model, refresh_every=2)
    before = followers(model, one)
    await before.start(0)
    for _ in range(2):
        step(model)
    assert before.state_dict(2) == {}
    again = follower(model, refresh_every=2)
    after = followers(model, again)
    after.load_state_dict({})
    await after.start(2)
    assert again.version == 2 and first(again.model) == first(model)


async def test_snapshot_new_to_the_checkpoint_is_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    model = trained()
    one = follower(model, refresh_every=3)
    step(model)
    await followers(model, one).start(4)
    assert one.version == 4 and first(one.model) == first(model)
    assert "the checkpoint has no policy 'past'; it starts from the trained policy of step 4" in caplog.text


def test_snapshot_of_another_model_is_refused() -> None:
    other = trained(hidden=16)
    with pytest.raises(CheckpointError, match="the checkpoint's policy 'past': the weights do not fit"):
        followers(other, follower(other)).load_state_dict({"past": {"version": 1, "weights": trained().state_dict()}})


def test_copy_shares_no_memory_and_has_no_gradients() -> None:
    model = trained()
    copied = frozen_copy(model)
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in copied.parameters()}
    assert not any(p.requires_grad for p in copied.parameters()) and all(p.requires_grad for p in model.parameters())


def test_copy_of_an_adapted_model_has_it_merged() -> None:
    pytest.importorskip("peft")
    model = trained()
    add_lora(model, LoraSettings(rank=2), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.2)
    copied = frozen_copy(model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(copied(ids).logits, model.eval()(ids).logits, atol=1e-5)
    one = PolicySnapshot(
        name="past", model=copied, engine=EmbeddedEngine(copied, num_slots=2, max_context=64), refresh_every=1
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.4)
    asyncio.run(followers(model, one).follow(1))
    with torch.no_grad():
        assert torch.allclose(one.model(ids).logits, model(ids).logits, atol=1e-5)


def test_copy_of_a_bfloat16_model_has_exact_positions() -> None:
    pytest.importorskip("peft")
    model = tiny_model(64, layers=1, spread=0.2)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    add_lora(model, LoraSettings(rank=2), seed=0)
    copied = frozen_copy(model)
    assert copied.dtype == torch.bfloat16
    ids = torch.arange(900)[None] % 64
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, model.eval()(ids).logits)
