"""swift.rewards.rm_plugin: the base classes of reward-model plug-ins. Files that define one load; no run uses it yet."""

from __future__ import annotations

from typing import Any

from polyturn.compat.swift.registry import PluginDict
from polyturn.core.errors import ConfigError


class DefaultRMPlugin:
    """A reward model that scores a whole conversation with one number."""

    def __init__(self, model: Any, template: Any, **kwargs: Any) -> None:
        self.model = model
        self.template = template

    def __call__(self, inputs: list[dict[str, Any]], **kwargs: Any) -> list[float]:
        """Refuse: there is no reward model in a run."""
        raise ConfigError(
            f"{type(self).__name__} needs a reward model, and a run has none yet; call the model from a reward function (an "
            "ORM or AsyncORM that asks a server)"
        )


class GenRMPlugin(DefaultRMPlugin):
    """A reward model that writes its verdict."""


rm_plugins = PluginDict("rm_plugins", {"default": DefaultRMPlugin, "genrm": GenRMPlugin})
