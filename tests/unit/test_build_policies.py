"""From the section `policies` to further policies: which model, tokenizer and engine each has, and refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from polyturn import build
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, PolyturnError
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.pool import EnginePool
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.training.hf import save_model
from support.example_schedulers import FOLDER
from support.models import tiny_model
from support.refusals import refuses
from support.runs import write_tiny_run


def place(folder: Path, policies: dict[str, Any], *overrides: str, **sections: Any) -> build.ConfigSource:
    config = write_tiny_run(folder)
    data = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**data, "policies": policies, **sections}))
    return build.ConfigSource(config=load_config(RunConfig, config, overrides).config, base=folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of another tokenizer and template than the run's."""
    folder = tmp_path / "opponent"
    tokenizer = tiny_tokenizer(vocab_size=320)
    tiny_model(tokenizer, max_positions=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_policy_of_its_own_model_has_tokenizer_and_engine(tmp_path: Path, model: Path) -> None:
    parts = build.build_parts(place(tmp_path, {"opponent": {"model": "opponent"}}, "engine.num_slots=3"))
    one: Any = parts.policies.by_name["opponent"]
    assert isinstance(one.engine, EmbeddedEngine) and one.engine is not parts.engine
    assert one.engine.capabilities.max_context == 1024
    assert one.codec.fingerprint != parts.context.codec.fingerprint
    assert one.sampling.max_tokens == 6 and one.sampling.temperature == 1.0
    assert parts.context.also == (one.engine,) and parts.policies.snapshots == ()


def test_settings_are_checked_before_a_policy_is_loaded(tmp_path: Path) -> None:
    source = place(tmp_path, {"opponent": {"model": "opponent"}}, "algorithm.loss=ppo_clop")  # there is no such folder
    tasks = build.build_run_tasks(source)
    with pytest.raises(ConfigError, match="ppo_clip"):
        build.build_parts(source, check=lambda plugins, tools: build.check_before_weights(source, tasks, plugins, tools))


def test_copy_of_the_policy_has_memory_of_its_own(tmp_path: Path) -> None:
    parts = build.build_parts(place(tmp_path, {"past": {"model": "self", "refresh_every": 2}}))
    one: Any = parts.policies.by_name["past"]
    assert one.codec is parts.context.codec
    (snapshot,) = parts.policies.snapshots
    own, copied = dict(parts.model.named_parameters()), dict(snapshot.model.named_parameters())
    assert all(torch.equal(own[name], copied[name]) and own[name].data_ptr() != copied[name].data_ptr() for name in own)
    assert snapshot.refresh_every == 2 and snapshot.engine is one.engine


def test_checkpoint_may_be_named_by_its_run(tmp_path: Path, model: Path) -> None:
    step = tmp_path / "old/checkpoints/step-000004"
    step.mkdir(parents=True)
    model.rename(step / "model")
    parts = build.build_parts(place(tmp_path, {"earlier": {"checkpoint": "old", "max_context": 64, "max_tokens": 3}}))
    one = parts.policies.by_name["earlier"]
    assert one.engine.capabilities.max_context == 64 and one.sampling.max_tokens == 3


def test_adapter_checkpoint_is_put_on_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    lora = ["model.lora={rank: 2}"]
    first = build.build_parts(place(tmp_path, {}, *lora))
    with torch.no_grad():
        for name, parameter in first.model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    save_model(first.model, tmp_path / "adapter", tokenizer=first.tokenizer, adapter_only=True)
    parts = build.build_parts(place(tmp_path, {"earlier": {"checkpoint": "adapter"}}, *lora))
    one: Any = parts.policies.by_name["earlier"]
    saved, held = dict(first.model.named_parameters()), dict(one.engine.module.named_parameters())
    assert all(torch.equal(saved[name], held[name]) for name in saved)
    monkeypatch.setenv("HOME", str(tmp_path))
    own = build.build_parts(place(tmp_path, {}, "model.lora={rank: 2, adapter: ~/adapter}")).model
    assert all(torch.equal(saved[name], value) for name, value in own.named_parameters())


def test_policy_engines_have_their_own_settings(tmp_path: Path, model: Path) -> None:
    policies = {
        "served": {"model": "opponent", "engine": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]}},
        "small": {"model": "opponent", "engine": {"num_slots": 3}},
        "sampled": {"model": "opponent", "sampling": {"temperature": 0.3, "top_p": 0.9}},
    }
    found: Any = build.build_parts(place(tmp_path, policies)).policies.by_name
    assert isinstance(found["served"].engine, EnginePool) and found["small"].engine.stats is not None
    assert (found["sampled"].sampling.temperature, found["sampled"].sampling.top_p) == (0.3, 0.9)


def test_scheduler_may_let_a_policy_judge(tmp_path: Path, model: Path) -> None:
    scheduler = {
        "scheduler": f"{FOLDER}/lookahead.py:Lookahead",
        "scheduler_kwargs": {"judge": {"policy": "critic", "rubric": "Is it kind?"}},
    }
    where = place(tmp_path, {"critic": {"model": "opponent"}}, rollout=scheduler)
    assert type(build.build_scheduler(where, build.build_policies(where))).__name__ == "Lookahead"
    refuses(lambda: build.build_scheduler(where), ConfigError, "'critic'")


@pytest.mark.parametrize("policies", [{}, {"critic": {"model": "opponent"}}])
def test_scheduler_keeps_its_own_policies_argument(policies: dict[str, Any], tmp_path: Path, model: Path) -> None:
    where = place(tmp_path, policies, rollout={"scheduler": "compaction", "scheduler_kwargs": {"budget": 100}})
    found: Any = build.build_scheduler(where, build.build_policies(where))
    assert found.policies == ("drop_reasoning", "window")


def test_run_without_training_has_no_copy_of_itself(tmp_path: Path) -> None:
    refuses(lambda: build.build_policies(place(tmp_path, {"past": {"model": "self"}})), ConfigError, "policies.past")


@pytest.mark.parametrize(
    ("policies", "says"),
    [
        ({"opponent": {}}, "a policy needs a model"),
        ({"policy": {"model": "x"}}, "a policy is named 'policy', which has another meaning in lists of players"),
        ({"random": {"model": "x"}}, "'random', which has another meaning"),
        ({"a.b": {"model": "x"}}, "'a.b', which is not a valid name"),
        ({"a": {"model": "x", "refresh_every": 3}}, "refresh_every is 3 and model is not self"),
        ({"a": {"model": "self", "refresh_every": 0}}, "refresh_every"),
        ({"a": {"model": "self", "checkpoint": "x"}}, "model is self and checkpoint is 'x'"),
        ({"a": {"model": "self", "engine": {"kind": "vllm"}}}, "model is self and engine.kind is 'vllm'"),
        ({"a": {"modle": "x"}}, "policies.a.model"),
    ],
)
def test_wrong_policies_section_is_refused(tmp_path: Path, policies: dict[str, Any], says: str) -> None:
    refuses(lambda: place(tmp_path, policies), ConfigError, says)


@pytest.mark.parametrize(
    ("one", "says"),
    [
        ({"model": "./nowhere"}, "policies.opponent: there is no folder"),
        ({"checkpoint": "nowhere"}, "policies.opponent: there is no model in"),
        ({"model": "opponent", "engine": {"kind": "vllm", "update": "sleep"}}, "opponent: engine.update is sleep, and only"),
        (
            {
                "model": "opponent",
                "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:1"]},
                "sampling": {"temperature": 0.001},
            },
            "policies.opponent: sampling.temperature is 0.001",
        ),
        (
            {"model": "opponent", "max_context": 4096},
            "opponent: max_context is 4096 and the model has 1024 positions",
        ),
    ],
)
def test_policy_that_cannot_be_made_is_refused_by_name(tmp_path: Path, model: Path, one: dict[str, Any], says: str) -> None:
    refuses(lambda: build.build_parts(place(tmp_path, {"opponent": one})), ConfigError, says)


@pytest.mark.parametrize(
    "sections",
    [
        {
            "rollout": {
                "interactions": [
                    {
                        "class_name": "polyturn.interactions.simulated_user.SimulatedUser",
                        "config": {"goal": "x", "policy": "opponnt"},
                    }
                ]
            }
        },
        {"reward": {"function": {"name": "judge", "policy": "opponnt"}}},
    ],
)
def test_unknown_policy_is_refused_with_the_nearest(tmp_path: Path, model: Path, sections: dict[str, Any]) -> None:
    where = place(tmp_path, {"opponent": {"model": "opponent"}}, **sections)
    refuses(lambda: check(where), PolyturnError, "'opponnt'", "'opponent'")


def check(where: build.ConfigSource) -> None:
    build.check_run(build.build_parts(where), build.build_train_tasks(where), name="data.train")
