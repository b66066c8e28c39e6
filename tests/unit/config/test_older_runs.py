"""A folder of an older version's run loads: what was set moves to today's keys, and defaults of its time say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyturn.algorithms.estimator_options import GaeOptions
from polyturn.algorithms.loss_options import ClipOptions
from polyturn.algorithms.options import KlOptions
from polyturn.config.load import load_config, write_resolved
from polyturn.config.models import RunConfig, TrainTokenizerConfig
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError
from polyturn.data.options import MixOptions
from polyturn.tokens.options import ParserOptions
from polyturn.training.options import ScheduleOptions


@pytest.mark.parametrize("engine", [{"kind": "embedded", "num_slots": 8}, {"kind": "vllm", "timeout_s": 5.0, "launch": {}}])
def test_older_run_with_keys_of_every_kind_loads(
    tmp_path: Path, engine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As when one section had them all, so that those of other kinds were written down without an effect."""
    caplog.set_level("INFO")
    every = {"urls": [], "kwargs": {}, "max_in_flight": 256, "order": "longest_first", "weights": "auto", "launch": None}
    every |= {"weights_folder": None, "prefill_chunk": 256, "process": "auto", "deterministic": False}
    values = {"model": {"path": "tiny"}, "engine": {**every, **engine}}
    folder = tmp_path / "run"
    write_resolved(values, folder / "config.yaml")
    loaded = load_config(RunConfig, folder)
    now = loaded.config.engine
    assert all(getattr(now, key) == value for key, value in engine.items() if key != "launch")
    other = "engine.prefill_chunk" if engine["kind"] == "vllm" else "engine.max_in_flight"
    assert other in caplog.text
    (tmp_path / "mine.yaml").write_text((folder / "config.yaml").read_text().partition("\n")[2])
    with pytest.raises(ConfigError, match=rf"{other}.* It is for engine.kind"):
        load_config(RunConfig, tmp_path / "mine.yaml")


EARLIER = {
    "model": {
        "init": {"model_type": "qwen3"},
        "tokenizer": None,
        "train_tokenizer": {"corpus": "a.py:f", "vocab_size": 400},
    },
    "warm_start": {"optim": {"schedule": "cosine", "warmup_steps": 0, "warmup_ratio": 0.1, "min_lr_ratio": 0.2}},
    "reward": {
        "function": "a.py:f",
        "routes": {"own/*": {"name": "b.py:f", "kwargs": {"bonus": 0.5}}},
        "batch_size": 8,
        "batch_wait_s": 0.05,
    },
    "rollout": {"parser": "hermes", "reasoning_parser": None, "calls_in_reasoning": True},
    "algorithm": {
        "advantage": "gae",
        "advantage_kwargs": {"whiten_batch": True},
        "norm_by_std": True,
        "gamma": 0.9,
        "lam": None,
        "loss": "gspo",
        "loss_kwargs": {},
        "clip_low": 0.1,
        "clip_dual": 3.0,
        "correction": None,
        "kl_coef": 0.1,
        "kl_horizon": 10_000.0,
        "kl_in_reward": {"coef": 0.0, "estimator": "k1", "target": None, "horizon": 10_000.0},
    },
    "data": {"sampler": None, "sampler_kwargs": {}, "mix": {"weights": {"a": 2.0}, "by_success": 0.5}},
    "train": {"distributed": {"ranks": 2, "strategy": "fsdp"}},
}


def test_older_run_with_retired_keys_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run wrote every key down. What was set moves to the key in its place; a default of its time says nothing."""
    caplog.set_level("INFO")
    write_resolved(EARLIER, tmp_path / "config.yaml")
    config = load_config(RunConfig, tmp_path).config
    assert config.algorithm.advantage == GaeOptions(name="gae", gamma=0.9, whiten_batch=True)
    assert config.algorithm.loss == ClipOptions(name="gspo", clip_low=0.1), "which never read clip_dual"
    assert config.algorithm.kl == KlOptions(coef=0.1) and config.train.distributed.ranks == 2
    assert config.model.tokenizer == TrainTokenizerConfig(corpus="a.py:f", vocab_size=400)
    assert arguments_of(config.reward.routes["own/*"]) == {"bonus": 0.5} and config.reward.batch.size == 8
    assert config.rollout.parser == ParserOptions(name="hermes", calls_in_reasoning=True)
    optim, schedule = config.warm_start.optim, ScheduleOptions(name="cosine", min_lr_ratio=0.2)
    assert (optim.lr, optim.warmup_steps, optim.schedule) == (1e-4, 0.1, schedule)
    assert config.data.sampler == MixOptions(weights={"a": 2.0}, by_success=0.5)
    assert "algorithm.gamma" in caplog.text and "algorithm.advantage.gamma" in caplog.text


@pytest.mark.parametrize(
    ("had", "says"),
    [
        ({"train": {"distributed": {"strategy": "megatron"}}}, "'train.distributed.strategy', set to 'megatron'.* FSDP2"),
        ({"algorithm": {"kl_in_reward": {"coef": 0.1, "estimator": "k1"}}}, "'algorithm.kl_in_reward'.*place: reward"),
        ({"algorithm": {"gama": 0.9}}, "unknown key 'algorithm.gama'"),
    ],
)
def test_older_setting_without_a_successor_is_refused(had: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_resolved({"model": {"path": "tiny"}, **had}, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=says) as problem:
        load_config(RunConfig, tmp_path)
    assert len(str(problem.value).splitlines()) == 1
