"""An estimator and a loss of the user's own run once on made-up tasks before anything is sampled."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from polyturn import build
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from support.runs import write_tiny_run

HEAD = "import numpy as np\nfrom polyturn import TokenLoss, declare\n\n"
LOSS = "def own(logprobs_T, old_logprobs_T, advantages_T, clip_high=0.2):\n    "
ESTIMATOR = "def own(rewards_G, samples_G):\n    "


def place(folder: Path, key: str, code: str) -> build.ConfigSource:
    config = write_tiny_run(folder)
    (folder / "own.py").write_text(HEAD + code)
    loaded = load_config(RunConfig, config, [f"algorithm.{key}=own.py:own"])
    return build.ConfigSource(config=loaded.config, base=folder)


@pytest.mark.parametrize(
    ("key", "code", "says"),
    [
        ("loss", LOSS + "return logprobs_T.nothing", r"AttributeError.*own.py, line 5"),
        ("loss", LOSS + "return -(logprobs_T * advantages_T).mean()", "TokenLoss"),
        ("loss", LOSS + "return TokenLoss(-advantages_T * logprobs_T.detach())", "gradient"),
        ("loss", LOSS + "return TokenLoss(-advantages_T * logprobs_T, {'mine': 0.5})", "'mine'.*0.5"),
        ("advantage", ESTIMATOR + "return rewards_G + samples_G.size", r"AttributeError.*own.py, line 5"),
        ("advantage", ESTIMATOR + "return [[r] for r in rewards_G]", "with a number per token"),
        ("advantage", ESTIMATOR + "return [[s.loss_weights / 0 for s in ss] for ss in samples_G]", "finite|nan|inf"),
    ],
)
def test_own_code_that_cannot_work_is_refused(tmp_path: Path, key: str, code: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} 'own\.py:own'.*(?:{says})"):
        build.try_credit(place(tmp_path, key, code))


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("loss", LOSS + "return TokenLoss(-advantages_T * logprobs_T)"),
        ("loss", LOSS.replace("clip_high=0.2", "sequence_T") + "return TokenLoss(-logprobs_T * sequence_T)"),
        ("advantage", ESTIMATOR + "return [[s.loss_weights * r for s in ss] for r, ss in zip(rewards_G, samples_G)]"),
        (
            "advantage",
            "@declare(scope='batch', needs_turn_scores=True, needs_values=True, needs_greedy=True, needs_states=True)\n"
            "def own(batch):\n"
            "    return [[[s.values * m.turn_scores_K.sum() * g.greedy_reward for s in m.samples] for m in g.members]"
            " for g in batch]",
        ),
    ],
)  # fmt: skip
def test_own_code_that_works_passes(tmp_path: Path, key: str, code: str) -> None:
    build.try_credit(place(tmp_path, key, code))


def test_missing_component_of_made_up_rewards_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "@declare(scope='batch')\ndef own(batch):\n"
        "    return [[[s.loss_weights * m.components['format'] for s in m.samples] for m in g.members] for g in batch]"
    )
    with caplog.at_level(logging.WARNING, logger="polyturn"):
        build.try_credit(place(tmp_path, "advantage", code))
    assert "'format'" in caplog.text


def test_parts_of_the_library_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: object, **kwargs: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr("polyturn.algorithms.advantages.assign_advantages", called)
    config = load_config(RunConfig, write_tiny_run(tmp_path), []).config
    build.try_credit(build.ConfigSource(config=config, base=tmp_path))
