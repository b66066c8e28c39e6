"""verl.workers.reward_manager: the registry of managers and their base class, for files with a manager and a function.

A run calls reward functions itself; a configuration that names a manager of one's own is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean

__all__ = ["REWARD_MANAGER_REGISTRY", "AbstractRewardManager", "get_reward_manager_cls", "register"]

REWARD_MANAGER_REGISTRY: dict[str, type[Any]] = {}
_Class = TypeVar("_Class", bound=type[Any])


class AbstractRewardManager(ABC):
    """Turns a batch into rewards [B, R]."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Return the rewards of a `DataProto`."""


def register(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a class.

    Raises:
        ConfigError: the name is taken by another class.
    """

    def add(cls: _Class) -> _Class:
        if REWARD_MANAGER_REGISTRY.setdefault(name, cls) is not cls:
            raise ConfigError(f"Reward manager {name} has already been registered: {REWARD_MANAGER_REGISTRY[name]} vs {cls}")
        return cls

    return add


def get_reward_manager_cls(name: str) -> type[Any]:
    """Return a registered class.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in REWARD_MANAGER_REGISTRY:
        raise UnknownNameError(f"Unknown reward manager: {name}.{did_you_mean(name, REWARD_MANAGER_REGISTRY)}")
    return REWARD_MANAGER_REGISTRY[name]
