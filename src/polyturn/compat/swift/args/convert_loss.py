"""Converters for ms-swift's loss: its kind, off-policy correction, adapter, reference and teacher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import did_you_mean

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source

_AGGREGATES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
}
TUNER_KEYS = ("train_type", "tuner_type", "sft_type")
"""Names of the argument that chooses between all weights and an adapter."""
_LEVELS = {"token": None, "sequence": "gspo_sequence", "sequence_token": "gspo"}


_ESTIMATE = "polyturn.compat.swift.advantage:estimate"
_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus")
_SCALES: Mapping[Any, str] = {
    "group": "group",
    "batch": "batch",
    "none": "none",
    "gdpo": "gdpo",
    True: "group",
    False: "none",
}
_OWN_SCALE_NAMES = ("group", "batch", "none", "gdpo")
_OWN_SCALE = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}


def advantage(s: Source) -> None:
    """Set the estimator: a native one if it computes the same, else ms-swift's."""
    name, own_scale = str(s.get("advantage_estimator", "grpo")), s.get("scale_rewards")
    if name not in _ESTIMATORS:
        s.refuse("advantage_estimator", f"there is no such estimator.{did_you_mean(name, _ESTIMATORS)}")
        return
    scale = _OWN_SCALE[name] if own_scale is None else _SCALES.get(own_scale)
    by = "scale_rewards" if own_scale is not None else "advantage_estimator"
    if scale is None:
        s.refuse("scale_rewards", f"there is no such scale.{did_you_mean(str(own_scale), _OWN_SCALE_NAMES)}")
    elif scale == "gdpo" and name == "reinforce_plus_plus":
        s.refuse("scale_rewards", "in ms-swift gdpo has no effect with reinforce_plus_plus; use grpo, or another scale")
    elif scale == "gdpo" and has_only_teacher(s):
        s.refuse("scale_rewards", "gdpo normalises each reward function, and there is none; remove scale_rewards")
    elif scale == "gdpo" and s.get("kl_in_reward"):
        s.refuse("scale_rewards", "gdpo normalises each reward function, so kl_in_reward has no effect; remove kl_in_reward")
    elif (name, scale) in (("grpo", "group"), ("grpo", "none"), ("rloo", "none")):
        s.put("algorithm.advantage.name", name, by="advantage_estimator")
        if scale == "none" and name == "grpo":
            s.put("algorithm.advantage.norm_by_std", False, by=by)
        elif name == "grpo":
            s.put("algorithm.advantage.eps", 1e-4, by=by)
    else:
        kwargs: dict[str, Any] = {"estimator": name, "scale_rewards": scale}
        if scale == "gdpo":
            names = [str(n) for n in _as_list(s.get("reward_funcs"))]
            names += ["gym_reward"] if s.get("use_gym_env", s.get("gym_env") is not None) else []
            weights = _as_list(s.get("reward_weights")) or [1.0] * len(names)
            kwargs["reward_weights"] = dict(zip(names, map(float, weights), strict=False))
        s.put("algorithm.advantage.name", _ESTIMATE, by="advantage_estimator")
        for option, value in kwargs.items():
            s.put(f"algorithm.advantage.{option}", value, by=by)


def kl_in_reward(s: Source) -> None:
    """Move the KL term from the loss to the reward; by default for rloo and reinforce_plus_plus, except with gdpo."""
    is_default = s.get("advantage_estimator", "grpo") != "grpo" and s.get("scale_rewards") != "gdpo"
    if has_only_teacher(s):
        if s.get("kl_in_reward"):
            s.refuse("kl_in_reward", "there are no rewards; remove it, and beta is the weight of a term of the loss")
    elif s.get("kl_in_reward", is_default):
        s.put("algorithm.kl.place", "reward", by="kl_in_reward" if s.get("kl_in_reward") else "advantage_estimator")


def resample(s: Source) -> None:
    """Set how many other tasks are tried in place of a task whose group has equal rewards."""
    if s.get("dynamic_sample") and has_only_teacher(s):
        s.refuse("dynamic_sample", "it compares the rewards of a group, and there are none; name reward_funcs, or remove it")
    elif s.get("dynamic_sample"):
        s.put("train.dynamic_sampling", s.whole("max_resample_times", 3, least=0), by="dynamic_sample")
        s.put("algorithm.drop_zero_variance", True, by="dynamic_sample")


def loss_type(s: Source) -> None:
    """Set the policy loss and how it is averaged."""
    name, level = str(s.get("loss_type", "grpo")), str(s.get("importance_sampling_level", "token"))
    if name not in _AGGREGATES:
        s.refuse("loss_type", f"{name!r} is not available; use one of {', '.join(_AGGREGATES)}")
        return
    if level not in _LEVELS:
        s.refuse("importance_sampling_level", f"{level!r} is not one of {', '.join(_LEVELS)}")
        return
    if name == "dr_grpo":
        s.put("algorithm.aggregate.name", _AGGREGATES[name], by="loss_type")
        s.put("algorithm.aggregate.norm_length", s.whole("max_completion_length", 512, least=1), by="max_completion_length")
    else:
        s.put("algorithm.aggregate", _AGGREGATES[name], by="loss_type")
    if has_only_teacher(s):
        for key, own in (("loss_type", name), ("importance_sampling_level", level)):
            if own in ("cispo", "sapo", "sequence", "sequence_token"):
                s.notes[key] = "without reward_funcs the KL to the teacher is the whole loss, so there is no ratio"
        return
    if name in ("cispo", "sapo"):
        if level != "token":
            s.refuse("importance_sampling_level", f"{name} uses ratios of tokens; set it to token")
        s.put("algorithm.loss.name", name, by="loss_type")
    elif (loss := _LEVELS[level]) is not None:
        s.put("algorithm.loss.name", loss, by="importance_sampling_level")
    if name == "cispo":  # for cispo, epsilon_high bounds the weight itself, and there is no lower bound
        high = s.number("epsilon_high", s.number("epsilon", 0.2))
        s.put("algorithm.loss.clip_low", 1.0, by="loss_type")
        s.put("algorithm.loss.clip_high", max(high - 1.0, 0.0), by="loss_type")
    for option in ("tau_pos", "tau_neg") if name == "sapo" else ():
        if s.get(option) is not None:
            s.put(f"algorithm.loss.{option}", s.number(option, 1.0), by="loss_type")


def correction(s: Source) -> None:
    """Set the off-policy correction."""
    mode, delta = s.get("rollout_importance_sampling_mode"), s.get("off_policy_sequence_mask_delta")
    settings: dict[str, Any] = {"weight": "none"}
    if mode is not None:
        level, _, what = str(mode).partition("_")
        if level not in ("token", "sequence") or what not in ("truncate", "mask"):
            s.refuse("rollout_importance_sampling_mode", f"{mode!r} is not token or sequence with _truncate or _mask")
            return
        settings = {
            "weight": "geometric" if level == "sequence" else "token",
            "cap": s.number("rollout_importance_sampling_threshold", 2.0),
            "beyond": "drop" if what == "mask" else "truncate",
        }
    if delta is not None:
        settings["negative_bound"] = s.number("off_policy_sequence_mask_delta", 0.0)
    if len(settings) > 1:
        by = "off_policy_sequence_mask_delta" if mode is None else "rollout_importance_sampling_mode"
        s.put("algorithm.loss.correction", settings, by=by)


def lora(s: Source) -> None:
    """Set the adapter."""
    key = next((k for k in TUNER_KEYS if s.get(k) is not None), "train_type")
    kind, adapters = str(s.get(key, "full")), _as_list(s.get("adapters"))
    if kind not in ("full", "lora"):
        s.refuse(key, f"{kind!r} is not available; train all weights (full) or an adapter (lora)")
        return
    if kind == "full":
        if adapters:
            s.refuse("adapters", "all weights are trained; merge adapters into the model, or train one (train_type lora)")
        return
    modules = s.get("target_modules", s.get("lora_target_modules", "all-linear"))
    names = _as_list(modules)
    chosen = {
        "rank": s.whole("lora_rank", 8, least=1),
        "alpha": s.number("lora_alpha", 32),
        "dropout": s.number("lora_dropout", 0.05),
        "target_modules": names[0] if names == ["all-linear"] else names,
    }
    for name, value in chosen.items():
        s.put(f"model.lora.{name}", value, by=key)
    if len(adapters) > 1:
        s.refuse("adapters", f"{len(adapters)} adapters are named, but only one can be trained")
    elif adapters:
        s.put_path("model.lora.adapter", str(Path(os.path.expanduser(str(adapters[0])))), by="adapters")


def ref_model(s: Source) -> None:
    """Set the reference model, if there is one."""
    if (name := s.get("ref_model")) is not None and s.number("beta", 0.04) > 0:
        _model(s, "model.reference", str(name), by="ref_model")


def teacher(s: Source) -> None:
    """Set the teacher for distillation."""
    if (name := s.get("teacher_model")) is not None:
        _model(s, "algorithm.loss.distill.teacher", str(name), by="teacher_model")
        s.put("algorithm.loss.distill.coef", s.number("teacher_kl_coef", 1.0), by="teacher_model")
        if has_only_teacher(s):
            s.put("algorithm.loss.name", "none", by="teacher_model")


def has_only_teacher(s: Source) -> bool:
    """Return whether a teacher is the whole training signal: there is one, and no reward."""
    return s.get("teacher_model") is not None and not _as_list(s.get("reward_funcs")) and not uses_gym(s)


def uses_gym(s: Source) -> bool:
    """Return whether the reward of an environment counts."""
    value = s.get("use_gym_env")
    return s.get("gym_env") is not None if value is None else bool(value)


def _model(s: Source, native: str, name: str, *, by: str) -> None:
    """Set a key to a folder or to a name on the hub."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        s.put_path(native, str(folder), by=by)
    else:
        s.put(native, name, by=by)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
