"""Asynchronous runs through the command line, with each kind of buffer."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from polyturn.cli.main import main
from support.runs import call_command, trained_steps, write_tiny_run

call = functools.partial(call_command, main)
MIX = "data.sampler={name: mix, weights: {tiny: "


@pytest.mark.parametrize(
    "settings",
    [
        ["train.max_staleness=1", "train.minibatches=2", "engine.update=wait"],
        pytest.param(["train.max_staleness=1", "train.replay=0.5", "engine.update=abort_resume"], marks=pytest.mark.slow),
        pytest.param(
            ["train.max_staleness=2", "train.oversample=1", "train.leftover=carry", "train.dynamic_sampling=2"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stale_run_samples_beside_training(tmp_path: Path, settings: list[str]):
    """The engine's logprobs are the trainer's of the same weights, so weights arrive whole and in time."""
    config = write_tiny_run(tmp_path)
    called = call("train", config, "train.steps=6", "evaluation.every=3", "train.optim.lr=1e-2", *settings)
    assert called.code == 0, called.err
    steps = trained_steps(tmp_path / "runs/tiny")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert 1 <= max(s["buffer/staleness"] for s in steps) <= int(settings[0][-1])
    fresh = [s for s in steps if s["buffer/staleness"] == 0]
    assert fresh and all(s["policy/rollout_difference"] < 1e-4 for s in fresh)
    assert all(f"buffer/dropped_decile_{i}" in steps[0] for i in range(10))


def test_oversampling_cuts_off_and_counts(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    mix = ["data.sampler=mix", "data.sampler.weights.tiny=[[0, 1], [2, 3]]", "data.sampler.by_success=1"]
    called = call("train", config, "train.oversample=1", "train.dynamic_sampling=1", *mix)
    assert called.code == 0, called.err
    assert sum(s.get("buffer/groups_left_over", 0) for s in trained_steps(tmp_path / "runs/tiny")) > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.oversample=0.5", "engine.deterministic=true"], "with train.oversample 0.5 the trained groups depend on"),
        (["train.oversample=0.5", "train.leftover=carry"], "set oversample above 0 and at most to max_staleness"),
        (["train.dynamic_sampling=2", "train.group_size=1"], "the rewards of a group of one are always equal"),
        ([f"{MIX}1}}}}", "train.epochs=2"], "the sampler mix has no epochs; set train"),
        (
            [MIX.replace("tiny", "tini") + "1}}"],
            "the mix has a weight for 'tini', which no task has as its data_source. Did you mean 'tiny'?",
        ),
    ],
)
def test_impossible_asynchronous_settings_are_refused(tmp_path: Path, settings: list[str], says: str):
    called = call("train", write_tiny_run(tmp_path), *settings, "--dry-run")
    assert called.code == 2
    assert says in " ".join(called.err.split())
