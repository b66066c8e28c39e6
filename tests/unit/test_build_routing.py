"""A run on a mixture of experts: the engine reports the routes, training replays them; bad settings are refused early."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn import build
from polyturn.cli.main import main
from polyturn.core.errors import ConfigError
from polyturn.core.routing import has_route
from polyturn.store.stored_run import open_store
from support.refusals import refuses
from support.runs import SEVERAL_TURNS, call_command, tiny_source, trained_steps, write_tiny_run

EXPERTS = (
    "model.init.model_type=qwen3_moe",
    "model.init.num_experts=8",
    "model.init.num_experts_per_tok=2",
    "model.init.moe_intermediate_size=16",
    "model.init.norm_topk_prob=true",
)


def test_run_replays_the_experts_of_its_engine(tmp_path: Path) -> None:
    settings = ("algorithm.routing.balance_coef=0.01", "train.minibatches=2", "evaluation.data=null", "train.steps=2")
    called = call_command(main, "train", write_tiny_run(tmp_path), *EXPERTS, *SEVERAL_TURNS, *settings)
    assert called.code == 0, called.err
    run = tmp_path / "runs" / "tiny"
    steps = trained_steps(run)
    assert [s["policy/router_missing"] for s in steps] == [0, 0]
    assert all(s["loss/router_balance"] > 0 and s["policy/rollout_difference_max"] < 1e-4 for s in steps)
    for trajectory in open_store(run).trajectories():
        for segment in trajectory.segments:
            assert has_route(segment.routed_experts)[:-1].all()


def test_engine_is_asked_for_routes_that_are_replayed(tmp_path: Path) -> None:
    small = ("model.init.num_hidden_layers=1",)
    assert build.build_parts(tiny_source(tmp_path, *EXPERTS, *small)).engine.capabilities.routes
    off = build.build_parts(tiny_source(tmp_path, *EXPERTS, "algorithm.routing.replay=off"))
    assert not off.engine.capabilities.routes
    assert not build.build_parts(tiny_source(tmp_path)).engine.capabilities.routes, "a model without experts has none"


@pytest.mark.parametrize("wrong", ["algorithm.routing.replay=on", "algorithm.routing.balance_coef=0.1"])
def test_routing_without_experts_is_refused_early(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.build.parts.build_model", lambda *_, **__: pytest.fail("weights were loaded"))
    refuses(lambda: build.build_parts(tiny_source(tmp_path, wrong)), ConfigError, "Qwen3ForCausalLM has no experts")
