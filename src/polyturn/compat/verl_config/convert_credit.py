"""Converters for verl's advantage estimators: discounts, the critic, and KL in the reward.

verl uses these settings for some estimators and ignores them for others, so they are moved only if they have an effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyturn.algorithms.advantages import advantages
from polyturn.compat.verl_config.convert_loss import KL_ESTIMATORS
from polyturn.core.errors import did_you_mean
from polyturn.infra.plugins import OWN, distribution_of, offered

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source

CONTROL = "algorithm.kl_ctrl"


def discount(s: Source) -> None:
    """Set the discounts of estimators that use them; for gae, the reward is on the last token.

    A user's own estimator may use both; the default 1.0 is not written, because one with a native signature may lack them.
    """
    name = s.get("algorithm.adv_estimator", "grpo")
    points = offered(advantages.group).get(str(name).removesuffix("_vectorized"), ())
    if all(distribution_of(point) != OWN for point in points):
        for key in ("gamma", "lam"):
            if (value := s.number(f"algorithm.{key}", 1.0)) != 1.0:
                s.put(f"algorithm.advantage.{key}", value, by=f"algorithm.{key}")
    if name in ("gae", "reinforce_plus_plus"):
        s.put("algorithm.advantage.gamma", s.number("algorithm.gamma", 1.0), by="algorithm.gamma")
    if name == "gae":
        s.put("algorithm.advantage.lam", s.number("algorithm.lam", 1.0), by="algorithm.lam")
        s.put("algorithm.advantage.outcome", "end", by="algorithm.adv_estimator")


def critic(s: Source) -> None:
    """Set the critic of gae."""
    if s.get("algorithm.adv_estimator") != "gae":
        if s.whole("trainer.critic_warmup", 0, least=0) > 0:
            s.notes["trainer.critic_warmup"] = (
                "there is no critic to warm up without gae, so the policy learns from step 1 on"
            )
        return
    model = "critic.model.path"
    if model in s.written and s.get(model) != s.get("actor_rollout_ref.model.path"):
        s.refuse(model, "the critic starts from the policy's model; name the same model, or remove the key")
    epochs = s.get("actor_rollout_ref.actor.ppo_epochs", 1)
    if "critic.ppo_epochs" in s.written and s.get("critic.ppo_epochs") not in (None, epochs):
        s.refuse("critic.ppo_epochs", f"the critic passes over a step as often as the policy ({epochs}); remove the key")
    s.put("algorithm.critic.optim.lr", s.number("critic.optim.lr", 1e-5), by="critic.optim.lr")
    s.put("algorithm.critic.clip", s.number("critic.cliprange_value", 0.5) or None, by="critic.cliprange_value")
    s.put("algorithm.critic.optim.max_grad_norm", s.number("critic.grad_clip", 1.0), by="critic.grad_clip")
    s.put("algorithm.critic.warmup", s.whole("trainer.critic_warmup", 0, least=0), by="trainer.critic_warmup")


def kl_in_reward(s: Source) -> None:
    """Set the KL penalty of the rewards, in addition to a KL term of the loss."""
    switch = "algorithm.use_kl_in_reward"
    if not s.switch(switch):
        return
    term = s.native.get("algorithm", {}).pop("kl", None)
    s.put("algorithm.kl.place", "reward", by=switch)
    key = "algorithm.kl_penalty"
    name = s.text(key, "kl").removesuffix("+")
    if name in KL_ESTIMATORS:
        s.put("algorithm.kl.estimator", KL_ESTIMATORS[name], by=key)
    else:
        s.refuse(key, f"there is no such estimator of the KL.{did_you_mean(name, KL_ESTIMATORS)}")
    s.put("algorithm.kl.coef", s.number(f"{CONTROL}.kl_coef", 0.001), by=f"{CONTROL}.kl_coef")
    kind = s.text(f"{CONTROL}.type", "fixed")
    if kind == "adaptive":
        s.put("algorithm.kl.target", s.number(f"{CONTROL}.target_kl", 0.1), by=f"{CONTROL}.target_kl")
        s.put("algorithm.kl.horizon", s.number(f"{CONTROL}.horizon", 10_000), by=f"{CONTROL}.horizon")
    elif kind != "fixed":
        s.refuse(f"{CONTROL}.type", f"there is no such controller.{did_you_mean(kind, ['fixed', 'adaptive'])}")
    if term is not None:
        s.put("algorithm.kl", [term, s.native["algorithm"]["kl"]], by=switch)
