"""Parts written by their names: which options each has, how they are merged, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
import inspect
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

OWN = {field.name for field in dataclasses.fields(LossOptions)} | {"name"}


def algorithm(*overrides: str, path: Path | None = None) -> AlgorithmConfig:
    return load_config(RunConfig, path, ["model.path=x", *overrides]).config.algorithm


def test_a_part_is_written_by_its_name_or_with_options() -> None:
    assert algorithm("algorithm.loss=gspo").loss == algorithm("algorithm.loss={name: gspo}").loss
    found = algorithm("algorithm.loss={name: gspo, clip_low: 0.1}", "algorithm.advantage={name: 'mine.py:fn', wide: 2}")
    assert arguments_of(found.loss) == {"clip_low": 0.1} and arguments_of(found.advantage) == {"wide": 2}
    assert TypeAdapter(AlgorithmConfig).validate_python({"loss": "gspo"}).loss.name == "gspo"


def test_options_laid_over_a_name_keep_it(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("algorithm: {loss: gspo}\n")
    (tmp_path / "run.yaml").write_text("defaults: below.yaml\nalgorithm: {loss: {clip_low: 0.1}}\n")
    loss = algorithm("algorithm.loss.clip_high=0.2", path=tmp_path / "run.yaml").loss
    assert (loss.name, arguments_of(loss)) == ("gspo", {"clip_low": 0.1, "clip_high": 0.2})


def test_a_run_of_ones_own_loss_keeps_the_arguments_that_losses_of_ours_have_too(tmp_path: Path) -> None:
    loaded = load_config(RunConfig, None, ["model.path=x", "algorithm.loss={name: 'mine.py:f', clip_low: 0.1}"])
    write_resolved(loaded.resolved, tmp_path / "config.yaml")
    assert arguments_of(load_config(RunConfig, tmp_path).config.algorithm.loss)["clip_low"] == 0.1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.advantage={name: gae, lma: 0.9}", "Did you mean 'algorithm.advantage.lam'"),
        ("algorithm.advantage={name: gae, lam: x}", "algorithm.advantage.lam is 'x'"),
        ("algorithm.advantage.lam=0.9", "It is for algorithm.advantage.name gae or turn_gae or bilevel_gae"),
        ("algorithm.loss={name: 'mine.py:f', correction: {cap: -1}}", "algorithm.loss.correction.cap is -1"),
        ("algorithm.loss=5", "algorithm.loss is 5"),
        ("algorithm.loss={name: clip_cov, clip_cov_lb: 5, clip_cov_ub: 1}", "nothing lies between them"),
        (
            "algorithm.aggregate=tokenmean",
            "algorithm.aggregate is 'tokenmean' (from the override 'algorithm.aggregate=token",
        ),
        ("algorithm.aggregate={name: tokenmean}", "algorithm.aggregate.name is 'tokenmean'"),
        ("algorithm.norm_length=9", "write algorithm.aggregate: {name: seq-mean-token-sum-norm, norm_length: …}"),
        ("rollout.parser={name: hermes, reasonning: qwen3}", "Did you mean 'rollout.parser.reasoning'"),
        ("train.optim.schedule={name: cosine, min_lr: 0.1}", "Did you mean 'train.optim.schedule.min_lr_ratio'"),
        ("train.optim.schedule=cosinus", "train.optim.schedule is 'cosinus'"),
        ("algorithm.critic.optim.min_lr_ratio=0.1", "no key any more; write schedule: {name: cosine, min_lr_ratio: …}"),
        ("model.train_tokenizer.corpus=a.py:f", "no key any more; write model.tokenizer: {corpus: …, vocab_size: …}"),
        (
            "reward.function={name: 'a.py:f', kwargs: {bonus: 1}}",
            "no key any more; write them beside the name: reward.function",
        ),
        ("train.layout=dense", "train.layout is 'dense'"),
        ("rollout.reasoning_parser=qwen3", "no key any more; write rollout.parser: {reasoning: …}"),
        ("algorithm.clip_low=0.1", r"no key any more; write algorithm.loss: {name: ppo_clip, clip_low: …}"),
    ],
)
def test_a_wrong_option_is_one_sentence(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        algorithm(override)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_key_that_is_no_text_is_an_unknown_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("algorithm: {advantage: {name: grpo, 3: 4}}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.advantage\.3', set to 4 \(in .*run\.yaml\)"):
        algorithm(path=tmp_path / "run.yaml")


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "-7"])
@pytest.mark.parametrize("union", [NamedEstimatorOptions, NamedLossOptions])
def test_no_option_of_a_part_is_a_number_that_no_formula_can_mean(union: Any, value: str) -> None:
    """A bound may be infinite, which is none, and a weight below 0; nothing may be what makes every loss NaN."""
    section = "advantage" if union is NamedEstimatorOptions else "loss"
    may_be = {"clip_low": ".inf", "clip_high": ".inf", "dual_clip": ".inf"}
    signed = {"clip_cov_lb", "clip_cov_ub", "outcome_weight", "step_weight"}
    for options in get_args(union):
        name, *_ = kinds_of(options)["name"]
        for key, found in keys_of(options).items():
            if "float" not in str(found.annotation) or key in ("correction", "distill", "weights"):
                continue
            if may_be.get(key) == value or (value == "-7" and key in signed):
                continue
            with pytest.raises(ConfigError, match=key):
                algorithm(f"algorithm.{section}={{name: {name}, {key}: {value}}}")


def named(union: Any) -> dict[str, type]:
    return {name: options for options in get_args(union) for name in kinds_of(options)["name"]}


def test_the_options_of_a_loss_are_the_arguments_of_its_function() -> None:
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


def test_the_options_of_an_estimator_are_the_arguments_of_its_function() -> None:
    found = named(NamedEstimatorOptions)
    ours = [name for name in advantages if advantages.resolve(name).__module__.startswith("polyturn.algorithms")]
    assert sorted(found) == sorted(ours)
    for name, options in found.items():
        parameters = inspect.signature(advantages.resolve(name)).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(keys_of(options)) - {"name"}, name
