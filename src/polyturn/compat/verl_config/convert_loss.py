"""Converters for verl's loss: the KL term, off-policy correction and adapter, and questions that several converters ask.

These keys changed most between verl's releases: the correction has three forms.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import did_you_mean

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Rejection levels of earlier releases -> current names."""
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Layers of Megatron -> the layers that each combines."""
_NOTHING = (None, False, "none", "null", "")
DISTILLATION = "distillation.distillation_loss"
USES_REWARDS = f"{DISTILLATION}.use_task_rewards"
NO_REWARDS = f"{USES_REWARDS} is false, so distillation is the whole loss"


def trains_on_rewards(s: Source) -> bool:
    """Return whether the loss has the actor's terms: policy loss, KL loss and entropy bonus."""
    return not s.switch("distillation.enabled") or s.switch(USES_REWARDS, default=True)


def is_taught_by_advantages(s: Source) -> bool:
    """Return whether a teacher gives advantages, instead of a term of the loss."""
    return s.switch("distillation.enabled") and s.switch(f"{DISTILLATION}.use_policy_gradient")


def ratio_bound(s: Source, section: str, side: str) -> tuple[str, Any]:
    """Return the key that sets the bound of the ratio on a side, and the bound.

    A written `clip_ratio` sets each side whose own key is not written.
    """
    both = f"{section}.clip_ratio"
    own = f"{both}_{side}"
    key = own if own in s.written or both not in s.written else both
    return key, s.number(key, s.number(both, 0.2))


def kl(s: Source) -> None:
    """Set the weight and the estimator of the KL term."""
    key = f"{ACTOR}.kl_loss_type"
    estimators = KL_ESTIMATORS | {f"{name}+": f"{native}+" for name, native in KL_ESTIMATORS.items() if native != "k2"}
    uses = s.switch(f"{ACTOR}.use_kl_loss")
    if uses and not trains_on_rewards(s):
        uses, s.notes[f"{ACTOR}.use_kl_loss"] = False, NO_REWARDS
    if not uses and s.get("algorithm.use_kl_in_reward"):
        return  # `kl_in_reward` sets the section
    s.put("algorithm.kl.coef", s.number(f"{ACTOR}.kl_loss_coef", 0.001) if uses else 0.0, by=f"{ACTOR}.use_kl_loss")
    name = s.get(key, "low_var_kl")
    if name in estimators and uses:
        s.put("algorithm.kl.estimator", estimators[name], by=key)
    elif name not in estimators:
        s.refuse(key, f"there is no such estimator of the KL.{did_you_mean(str(name), estimators)}")


def lora(s: Source) -> None:
    """Set the adapter, from FSDP's keys or Megatron's."""
    rank, fused = (s.whole(f"{MODEL}.{name}", 0, least=0) for name in ("lora_rank", "lora.rank"))
    adapter = s.text(f"{MODEL}.lora_adapter_path", "")
    if fused:
        _lora_of_megatron(s, fused)
    elif rank:
        s.put("model.lora.rank", rank, by=f"{MODEL}.lora_rank")
        s.put("model.lora.alpha", s.number(f"{MODEL}.lora_alpha", 16), by=f"{MODEL}.lora_alpha")
        for name in ("target_modules", "exclude_modules"):
            if (value := s.get(f"{MODEL}.{name}")) is not None:
                s.put(f"model.lora.{name}", value if isinstance(value, str) else list(value), by=f"{MODEL}.{name}")
    elif adapter:
        s.refuse(f"{MODEL}.lora_adapter_path", "lora_rank is 0; set it to the rank of this adapter")
    if adapter and (fused or rank):
        s.put_path("model.lora.adapter", str(Path(os.path.expanduser(adapter))), by=f"{MODEL}.lora_adapter_path")


def _lora_of_megatron(s: Source, rank: int) -> None:
    """Set the adapter of Megatron's layers."""
    if s.get(f"{ACTOR}.strategy") != "megatron" or s.get(f"{MODEL}.lora_rank"):
        why = "it needs actor.strategy megatron and lora_rank 0; otherwise set lora_rank and lora_alpha instead"
        s.refuse(f"{MODEL}.lora.rank", why)
    names = s.get(f"{MODEL}.lora.target_modules", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
    for name in (name for name in names if name not in _LAYERS):
        s.refuse(f"{MODEL}.lora.target_modules", f"there is no layer {name!r}.{did_you_mean(str(name), _LAYERS)}")
    settings = {
        "rank": rank,
        "alpha": s.number(f"{MODEL}.lora.alpha", 32),
        "dropout": s.number(f"{MODEL}.lora.dropout", 0.0),
        "target_modules": [layer for name in names for layer in _LAYERS.get(name, ())],
    }
    for name, value in settings.items():
        s.put(f"model.lora.{name}", value, by=f"{MODEL}.lora.{name}")


def correction(s: Source) -> None:
    """Set the off-policy correction from any of its three forms."""
    weight, reject = s.get(f"{CORRECTION}.rollout_is"), s.get(f"{CORRECTION}.rollout_rs")
    veto = s.get(f"{CORRECTION}.rollout_token_veto_threshold")
    settings: dict[str, Any] = {}
    if weight not in _NOTHING:
        settings |= _weight(s, f"{CORRECTION}.rollout_is", str(weight), s.get(f"{CORRECTION}.rollout_is_threshold", 2.0))
        settings["normalize"] = s.switch(f"{CORRECTION}.rollout_is_batch_normalize")
        if s.switch("distillation.enabled") and not is_taught_by_advantages(s):
            s.notes[f"{CORRECTION}.rollout_is"] = "it weighs the distillation loss too, which it does not in verl"
    if reject not in _NOTHING:
        settings["reject"] = _rejections(s, str(reject))
    if veto not in _NOTHING:
        settings["veto"] = veto
    if settings:
        settings.setdefault("weight", "none")
        if s.get(f"{CORRECTION}.bypass_mode"):
            s.refuse(
                f"{CORRECTION}.bypass_mode",
                "with bypass_mode the loss's ratio is already relative to the engine's logprobs, so nothing is left to "
                "correct; remove rollout_is and rollout_rs, or bypass_mode",
            )
            return
        by = "rollout_is" if "cap" in settings else "rollout_rs"
        s.put("algorithm.loss.correction", settings, by=f"{CORRECTION}.{by}")
    elif (cap := s.get(f"{ACTOR}.tis_imp_ratio_cap", -1)) not in _NOTHING and float(cap) > 0:
        s.put("algorithm.loss.correction", {"weight": "token", "cap": float(cap)}, by=f"{ACTOR}.tis_imp_ratio_cap")
    elif s.get("algorithm.rollout_is") and s.get("algorithm.rollout_is_threshold") is not None:
        s.put("algorithm.loss.correction", _of_first_release(s), by="algorithm.rollout_is")
    elif s.get("algorithm.rollout_is"):
        s.notes["algorithm.rollout_is"] = "without algorithm.rollout_is_threshold nothing is corrected"


def _weight(s: Source, key: str, name: str, threshold: Any) -> dict[str, Any]:
    if name not in ("token", "sequence"):
        s.refuse(key, f"{name!r} is not a level of importance weights; use token or sequence")
    if isinstance(threshold, str) and "_" in threshold:
        s.refuse(f"{key}_threshold", "weights have only an upper bound; use rollout_rs to bound ratios on both sides")
        return {}
    return {"weight": name, "cap": float(threshold)}


def _rejections(s: Source, names: str) -> dict[str, Any]:
    """Return the bounds of each name in a list such as "token_k1,seq_mean_k3"."""
    key = f"{CORRECTION}.rollout_rs_threshold"
    chosen = [_LEVELS.get(n, n) for n in (part.strip() for part in names.split(","))]
    written = s.get(key)
    if written is None:
        written = s.get(f"{CORRECTION}.rollout_is_threshold", 2.0)
    bounds = [part.strip() for part in str(written).split(",")]
    lower = s.get(f"{CORRECTION}.rollout_rs_threshold_lower")
    if len(bounds) == 1:
        bounds *= len(chosen)
    if len(bounds) != len(chosen):
        s.refuse(key, f"there are {len(bounds)} thresholds for {len(chosen)} rejections; give one for each, or one for all")
        return {}
    settings: dict[str, Any] = {}
    for name, bound in zip(chosen, bounds, strict=True):
        low, _, high = bound.rpartition("_")
        try:
            ends = [float(e) for e in (low, high) if e]
        except ValueError:
            s.refuse(key, f"{bound!r} is not a bound; write 2.0 or 0.5_2.0")
            return {}
        if name.endswith("k1") and lower is not None:
            ends = [float(lower), ends[-1]]
        settings[name] = ends if len(ends) == 2 else ends[0]
    return settings


def _of_first_release(s: Source) -> dict[str, Any]:
    """Return the correction from the keys of the first release, `algorithm.rollout_is…`."""
    upper = float(s.number("algorithm.rollout_is_threshold", 2.0))
    level = s.text("algorithm.rollout_is_level", "token")
    veto = s.get("algorithm.rollout_is_veto_threshold")
    settings: dict[str, Any] = {"weight": level, "cap": upper}
    if s.get("algorithm.rollout_is_mode", "truncate") == "mask":
        lower = s.get("algorithm.rollout_is_threshold_lower")
        settings = {"weight": level, "cap": upper, "beyond": "drop"}
        settings["reject"] = {_LEVELS.get(level, "token_k1"): [1 / upper if lower is None else float(lower), upper]}
    return settings if veto in _NOTHING else {**settings, "veto": veto}
