"""Converter for verl's on-policy distillation: the section `distillation` of releases from 0.8 on.

    use_policy_gradient    verl's loss                                native keys
    false                  coef * estimator of KL(policy || teacher)  algorithm.loss.distill: a model in the trainer
    true                   coef * PPO's loss of the advantage -k1     algorithm.served_teachers: models behind endpoints

With `use_task_rewards` it is added to the actor's loss; without it, it is the whole loss and coef is 1. verl starts a server
for each teacher. A run here does not, so the config has to name the servers in native keys.

Source: verl/trainer/distillation/losses.py (`distillation_ppo_loss`) and verl/workers/config/distillation.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyturn.compat.verl_config.convert_loss import (
    ACTOR,
    DISTILLATION,
    KL_ESTIMATORS,
    NO_REWARDS,
    USES_REWARDS,
    is_taught_by_advantages,
    ratio_bound,
    trains_on_rewards,
)
from polyturn.core.errors import did_you_mean

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source

ENABLED = "distillation.enabled"
MODE, GRADIENT, CLAMP, COEF = (
    f"{DISTILLATION}.{name}" for name in ("loss_mode", "use_policy_gradient", "loss_max_clamp", "distillation_loss_coef")
)
TEACHERS = "distillation.teacher_models"
DEFAULT_TEACHER = "teacher_model"
"""The teacher in verl's tree, which verl leaves out beside others."""
SERVERS = "algorithm.served_teachers.teachers"


def distillation(s: Source) -> None:
    """Set the teacher of the loss, or the weights of served teachers."""
    if not s.switch(ENABLED):
        return
    mode = s.text(MODE, "k3")
    if mode not in KL_ESTIMATORS:
        s.refuse(
            MODE,
            "a teacher scores only the sampled tokens; set k2 or k3, or k1 with use_policy_gradient=True"
            if mode == "forward_kl_topk"
            else f"there is no such loss.{did_you_mean(mode, KL_ESTIMATORS)}",
        )
        return
    teachers = _teachers(s)
    if nameless := [name for name, path in teachers.items() if path is None]:
        s.refuse(ENABLED, f"it needs a teacher; set {TEACHERS}.{nameless[0]}.model_path")
        return
    is_alone = not trains_on_rewards(s)
    if is_alone and s.get(f"{ACTOR}.entropy_coeff"):
        s.put("algorithm.entropy_coef", 0.0, by=f"{ACTOR}.entropy_coeff")
        s.notes[f"{ACTOR}.entropy_coeff"] = NO_REWARDS
    coef = 1.0 if is_alone else s.number(COEF, 1.0)
    teach = _in_advantages if is_taught_by_advantages(s) else _in_loss
    teach(s, teachers, KL_ESTIMATORS[mode], coef=coef, is_alone=is_alone)


def _teachers(s: Source) -> dict[str, str | None]:
    """Return name -> model of the teachers that verl uses."""
    names = dict.fromkeys(key.split(".")[2] for key in s.values if key.startswith(f"{TEACHERS}.")) or {DEFAULT_TEACHER: None}
    if len(names) > 1 and DEFAULT_TEACHER in names:
        del names[DEFAULT_TEACHER]
        key = f"{TEACHERS}.{DEFAULT_TEACHER}.model_path"
        s.notes[key] = f"verl leaves out {DEFAULT_TEACHER} beside other teachers; give it another name to use it"
    return {name: s.text(f"{TEACHERS}.{name}.model_path", "") or None for name in names}


def _in_loss(s: Source, teachers: Mapping[str, str | None], estimator: str, *, coef: Any, is_alone: bool) -> None:
    """Set the model, loaded by the trainer, whose log-probabilities give a term of the loss."""
    name, model = next(iter(teachers.items()))
    if len(teachers) > 1:
        why = f"the loss has one teacher, and these are {', '.join(teachers)}; set it to True, with loss_mode=k1"
        s.refuse(GRADIENT, why)
    if estimator == "k1":
        s.refuse(MODE, "its gradient does not depend on the teacher; set use_policy_gradient=True, or loss_mode=k2")
    if s.get(CLAMP) is not None:
        s.refuse(CLAMP, "this loss has no bound; set it to null, or use_policy_gradient=True with loss_mode=k1")
    if is_alone:
        s.put("algorithm.loss.name", "none", by=USES_REWARDS)
    s.put_model("algorithm.loss.distill.teacher", str(model), by=f"{TEACHERS}.{name}.model_path")
    s.put("algorithm.loss.distill.coef", coef, by=COEF)
    s.put("algorithm.loss.distill.estimator", estimator, by=MODE)


def _in_advantages(s: Source, teachers: Mapping[str, str | None], estimator: str, *, coef: Any, is_alone: bool) -> None:
    """Set the weights of the advantages from teachers, whose servers the config must name."""
    if estimator != "k1":
        s.refuse(MODE, "an advantage is the log-ratio of teacher and policy; set k1, or use_policy_gradient=False")
    column = s.text("distillation.teacher_key", "data_source")
    if len(teachers) > 1 and column != "data_source":
        s.refuse("distillation.teacher_key", f"the teacher of a row follows from its data_source; rename {column}")
    if not s.polyturn(SERVERS):
        keys = [f", data_sources: ['{s.get(f'{TEACHERS}.{name}.key')}']" if len(teachers) > 1 else "" for name in teachers]
        servers = ", ".join(f"{{url: 'http://HOST:{8000 + i}'{key}}}" for i, key in enumerate(keys))
        s.refuse(
            ENABLED,
            f"a run does not start teachers: serve {', '.join(map(str, teachers.values()))} with vLLM or SGLang, and add "
            f'"+polyturn.{SERVERS}=[{servers}]"',
        )
    for name, part in itertools.product(teachers, ("model_path", "key")):
        s.notes[f"{TEACHERS}.{name}.{part}"] = f"the teachers are the servers of polyturn.{SERVERS}"
    if not is_alone:
        _require_one_loss(s)
    s.put("algorithm.served_teachers.coef", coef, by=COEF)
    s.put("algorithm.served_teachers.advantage_coef", 0.0 if is_alone else 1.0, by=USES_REWARDS)
    s.put("algorithm.served_teachers.clip", s.get(CLAMP), by=CLAMP)


def _require_one_loss(s: Source) -> None:
    """Refuse an actor's loss that differs from the distillation loss, because the advantages of both are summed."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    if s.text(key, "vanilla") != "vanilla":
        s.refuse(key, f"rewards and teachers share one loss here; set it to vanilla, or {USES_REWARDS}=False")
    for side in ("low", "high"):
        (key, bound), (other, bound_of_teachers) = (ratio_bound(s, section, side) for section in (ACTOR, DISTILLATION))
        if bound != bound_of_teachers:
            s.refuse(key, f"rewards and teachers share one loss here, and {other} is {bound_of_teachers}; set both alike")
