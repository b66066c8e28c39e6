"""verl's section `distillation` becomes a teacher in the loss, or advantages from served teachers, or is refused by key."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.compat.verl_config.compose import compose_name
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.config.translate.translation import Translation
from polyturn.core.errors import ConfigError
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # the first test imports Hydra

LOSS = "distillation.distillation_loss"
ACTOR = "actor_rollout_ref.actor"
ONE = ["distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=org/large"]
TWO = [
    "distillation.enabled=True",
    "+distillation.teacher_models.maths.key=openai/gsm8k",
    "+distillation.teacher_models.maths.model_path=org/maths",
    "+distillation.teacher_models.maths.inference.gpu_memory_utilization=0.4",
    "+distillation.teacher_models.code.key=apps",
    "+distillation.teacher_models.code.model_path=./code",
]
GRADIENT = [f"{LOSS}.use_policy_gradient=True", f"{LOSS}.loss_mode=k1"]
ALONE = f"{LOSS}.use_task_rewards=False"
SERVERS = "+polyturn.algorithm.served_teachers.teachers=[{url: 'http://HOST:8000'}]"


def translated(*overrides: str) -> Translation:
    return translate(compose_name("ppo_trainer", folder=None, overrides=["actor_rollout_ref.model.path=m", *overrides]))


def algorithm(*overrides: str) -> Any:
    made = translated("data.train_files=t.parquet", *overrides)
    return load_values(RunConfig, made.native, origin=made.origin).config.algorithm


def notices(*overrides: str) -> dict[str, str]:
    """Return written key -> the notice about it."""
    lines = (line.split(": ", 1) for line in translated(*overrides).notices())
    return {key: reason for keys, reason in lines for key in keys.split(", ")}


@pytest.mark.parametrize(("mode", "estimator"), [(None, "k3"), ("low_var_kl", "k3"), ("mse", "k2"), ("abs", "abs")])
def test_supervised_loss_adds_a_term(mode: str | None, estimator: str):
    chosen = [] if mode is None else [f"{LOSS}.loss_mode={mode}"]
    loss = algorithm(*ONE, *chosen, f"{LOSS}.distillation_loss_coef=0.5", f"{ACTOR}.policy_loss.loss_mode=gpg").loss
    assert (loss.name, loss.distill.teacher) == ("gpg", "org/large")
    assert (loss.distill.estimator, loss.distill.coef) == (estimator, 0.5)


def test_folder_of_a_teacher_is_a_path():
    made = translated("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=./large")
    assert ("algorithm", "loss", "distill", "teacher") in made.paths


def test_distillation_loss_alone_replaces_terms_of_the_actor():
    others = [f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.policy_loss.loss_mode=gspo"]
    others += [f"{ACTOR}.clip_ratio_high=0.3", f"{LOSS}.distillation_loss_coef=0.5"]
    written = [*ONE, ALONE, *others]
    found = algorithm(*written)
    assert (found.loss.name, found.loss.distill.coef) == ("none", 1.0), "verl's coefficient belongs to task rewards"
    assert (found.entropy_coef, found.kl.coef, found.aggregate.name) == (0.0, 0.0, "token-mean")
    assert notices(*written).keys() == {override.partition("=")[0] for override in others}


def test_teachers_with_policy_gradient_are_servers():
    bounds = [f"{LOSS}.loss_max_clamp=10.0", f"{LOSS}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio=0.1"]
    found = algorithm(*ONE, *GRADIENT, ALONE, SERVERS, *bounds)
    taught, loss = found.served_teachers, found.loss
    assert (taught.coef, taught.advantage_coef, taught.clip) == (1.0, 0.0, 10.0)
    assert [one.url for one in taught.teachers] == ["http://HOST:8000"]
    assert (loss.name, loss.clip_low, loss.clip_high, loss.dual_clip) == ("ppo_clip", 0.2, 0.28, 3.0)
    assert loss.distill is None


def test_teachers_add_to_the_advantages_of_rewards():
    bounds = [f"{section}.clip_ratio_high=0.28" for section in (ACTOR, LOSS)]
    found = algorithm(*ONE, *GRADIENT, SERVERS, *bounds, f"{LOSS}.distillation_loss_coef=0.3")
    taught = found.served_teachers
    assert (taught.coef, taught.advantage_coef, taught.clip, found.loss.clip_high) == (0.3, 1.0, None, 0.28)


def test_refusal_of_unserved_teachers_shows_the_missing_key():
    with pytest.raises(ConfigError) as refused:
        translated(*TWO, *GRADIENT)
    message = str(refused.value)
    assert "org/maths" in message and "./code" in message
    override = message.rpartition('add "')[2].removesuffix('"')
    teachers = algorithm(*TWO, *GRADIENT, override).served_teachers.teachers
    assert [one.data_sources for one in teachers] == [("openai/gsm8k",), ("apps",)]
    ignored = notices(*TWO, *GRADIENT, override)
    assert "servers" in ignored["distillation.teacher_models.maths.key"]
    assert "servers" in ignored["distillation.teacher_models.code.model_path"]


def test_default_teacher_beside_others_is_left_out_with_a_notice():
    key = "distillation.teacher_models.teacher_model.model_path"
    written = [f"{key}=org/large", *TWO[:4]]
    assert algorithm(*written).loss.distill.teacher == "org/maths"
    assert "teacher_model" in notices(*written)[key]


def test_disabled_section_has_no_effect():
    written = [*ONE[1:], *GRADIENT, "distillation.teacher_key=domain", f"{LOSS}.loss_mode=forward_kl_topk"]
    assert translated(*written).native == translated().native
    assert len(translated(*written).notices()) == 1


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["distillation.enabled=True"], ["distillation.enabled", "teacher_model.model_path"]),
        ([*ONE, f"{LOSS}.loss_mode=forward_kl_topk"], [f"{LOSS}.loss_mode", "forward_kl_topk", "k1"]),
        ([*ONE, f"{LOSS}.loss_mode=k4"], [f"{LOSS}.loss_mode", "k4", "'k3'"]),
        ([*ONE, f"{LOSS}.loss_mode=k1"], [f"{LOSS}.loss_mode", "use_policy_gradient"]),
        ([*ONE, f"{LOSS}.loss_max_clamp=10"], [f"{LOSS}.loss_max_clamp", "10", "null"]),
        ([*ONE, f"{LOSS}.policy_loss_mode=dppo_tv"], [f"{LOSS}.policy_loss_mode", "dppo_tv", "vanilla"]),
        (TWO, [f"{LOSS}.use_policy_gradient", "maths, code"]),
        ([*ONE, SERVERS, f"{LOSS}.use_policy_gradient=True", f"{LOSS}.loss_mode=k3"], [f"{LOSS}.loss_mode", "k1"]),
        ([*TWO, *GRADIENT, SERVERS, "distillation.teacher_key=domain"], ["distillation.teacher_key", "data_source"]),
        (
            [*ONE, *GRADIENT, SERVERS, f"{ACTOR}.clip_ratio_high=0.28"],
            [f"{ACTOR}.clip_ratio_high", "0.28", f"{LOSS}.clip_ratio_high is 0.2"],
        ),
        (
            [*ONE, *GRADIENT, SERVERS, f"{ACTOR}.policy_loss.loss_mode=gspo"],
            [f"{ACTOR}.policy_loss.loss_mode", "gspo", "use_task_rewards"],
        ),
        (["+distillation.teacher_models.maths.inference.tensor_paralel_size=2"], ["tensor_paralel_size"]),
        (["+distillation.teacher_models.maths.modle_path=org/maths"], ["modle_path"]),
    ],
)
def test_what_has_no_equivalent_is_refused_by_key(overrides: list[str], parts: list[str]):
    refuses(lambda: translated(*overrides), ConfigError, *parts)
