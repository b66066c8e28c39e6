"""verl.base_config, verl.utils.config, and the configs of verl.trainer and verl.workers for losses and estimators.

    ActorConfig(clip_ratio=0.2, policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=0.1)).get("clip_ratio_c", 20.0)

Files create such a config to call a function; runs do not read them. Fields that no function reads are stored too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, ClassVar

from omegaconf import Container, OmegaConf

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)
from polyturn.core.errors import ConfigError


class BaseConfig(Mapping[str, Any]):
    """Options that can be read as attributes and as a mapping."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Name -> default value of an option."""

    def __init__(self, **values: Any) -> None:
        """Set the options."""
        vars(self).update({**copy.deepcopy(dict(self.defaults)), **values})

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


def omega_conf_to_dataclass(config: Any, dataclass_type: type[Any] | None = None) -> Any:
    """Return a config as an object of a dataclass; the default class is its `_target_`.

    Raises:
        ConfigError: there is no `_target_`, or the type is not a dataclass.
    """
    if not config:
        return None if dataclass_type is None else dataclass_type()
    if not isinstance(config, Mapping | Container):
        return config
    if dataclass_type is None:
        if "_target_" not in config:
            raise ConfigError(f"the config {config!r:.200} has no _target_; pass its dataclass as dataclass_type")
        from hydra.utils import instantiate

        return instantiate(config, _convert_="partial")
    if not is_dataclass(dataclass_type):
        raise ConfigError(f"{dataclass_type!r} must be a dataclass")
    value: Any = config
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(dataclass_type), OmegaConf.create(value)))


class AlgoConfig(BaseConfig):
    """The settings of an estimator."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "gamma": 1.0,
        "lam": 1.0,
        "adv_estimator": "gae",
        "norm_adv_by_std_in_grpo": True,
        "use_kl_in_reward": False,
        "kl_penalty": "kl",
    }


class PolicyLossConfig(BaseConfig):
    """The policy loss and its options."""

    defaults: ClassVar[Mapping[str, Any]] = {"loss_mode": "vanilla", "dro_beta": None}


class ActorConfig(BaseConfig):
    """The settings of a policy loss."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "global_batch_info": {},
        "policy_loss": PolicyLossConfig(),
    }
