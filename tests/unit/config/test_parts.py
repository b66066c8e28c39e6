"""Parts written by their names: which options each has, and how they are merged."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from polyturn.algorithms.advantages import advantages
from polyturn.algorithms.estimator_options import NamedEstimatorOptions
from polyturn.algorithms.loss_options import LossOptions, NamedLossOptions
from polyturn.algorithms.losses import policy_losses, takes_option
from polyturn.config.load import load_config, write_resolved
from polyturn.config.models import AlgorithmConfig, RunConfig
from polyturn.config.parts import arguments_of
from polyturn.config.schema import keys_of, kinds_of
from polyturn.core.errors import ConfigError
from support.refusals import refuses

OWN = {field.name for field in dataclasses.fields(LossOptions)} | {"name"}


def algorithm(*overrides: str, path: Path | None = None) -> AlgorithmConfig:
    return load_config(RunConfig, path, ["model.path=x", *overrides]).config.algorithm


def test_part_is_written_by_name_or_with_options() -> None:
    assert algorithm("algorithm.loss=gspo").loss == algorithm("algorithm.loss={name: gspo}").loss
    found = algorithm("algorithm.loss={name: gspo, clip_low: 0.1}", "algorithm.advantage={name: 'mine.py:fn', wide: 2}")
    assert arguments_of(found.loss) == {"clip_low": 0.1} and arguments_of(found.advantage) == {"wide": 2}
    assert TypeAdapter(AlgorithmConfig).validate_python({"loss": "gspo"}).loss.name == "gspo"


def test_options_over_a_name_keep_the_name(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("algorithm: {loss: gspo}\n")
    (tmp_path / "run.yaml").write_text("defaults: below.yaml\nalgorithm: {loss: {clip_low: 0.1}}\n")
    loss = algorithm("algorithm.loss.clip_high=0.2", path=tmp_path / "run.yaml").loss
    assert (loss.name, arguments_of(loss)) == ("gspo", {"clip_low": 0.1, "clip_high": 0.2})


def test_own_loss_keeps_arguments_named_like_ours(tmp_path: Path) -> None:
    loaded = load_config(RunConfig, None, ["model.path=x", "algorithm.loss={name: 'mine.py:f', clip_low: 0.1}"])
    write_resolved(loaded.resolved, tmp_path / "config.yaml")
    assert arguments_of(load_config(RunConfig, tmp_path).config.algorithm.loss)["clip_low"] == 0.1


def named(union: Any) -> dict[str, type]:
    return {name: options for options in get_args(union) for name in kinds_of(options)["name"]}


def test_options_of_a_loss_are_its_arguments() -> None:
    found = named(NamedLossOptions)
    ours = [name for name in policy_losses if policy_losses.resolve(name).__module__.startswith("polyturn.algorithms")]
    assert sorted(found) == sorted(ours)
    for name, options in found.items():
        loss = policy_losses.resolve(name)
        arguments = {n for n, p in inspect.signature(loss).parameters.items() if p.kind is p.KEYWORD_ONLY} - {
            "sequence_T",
            "marks_T",
        }
        assert arguments <= set(keys_of(options)), name
        assert all(takes_option(loss, key) for key in set(keys_of(options)) - OWN), name


def test_every_estimator_has_options_that_pickle_finds() -> None:
    found = named(NamedEstimatorOptions)
    ours = [name for name in advantages if advantages.resolve(name).__module__.startswith("polyturn.algorithms")]
    assert sorted(found) == sorted(ours)
    for name, options in found.items():
        made = options(name=name)
        assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{name: gae, lam: 1.5}", ["algorithm.advantage.lam", "1.5", "1"]),
        ("{name: grpo, norm_by_sdt: false}", ["norm_by_sdt", "norm_by_std"]),
        ("{name: mt_grpo, outcome: rset}", ["algorithm.advantage.outcome", "'rset'", "'rest'"]),
        ("{name: grpo_passk, k: 0}", ["algorithm.advantage.k", "0", "at least 1"]),
    ],
)
def test_wrong_option_of_an_estimator_is_refused(options: str, words: list[str]) -> None:
    refuses(lambda: load_config(RunConfig, None, ["model.path=x", f"algorithm.advantage={options}"]), ConfigError, *words)
