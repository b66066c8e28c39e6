"""swift.rewards.rm_plugin: the base classes of reward-model plug-ins. Files that define one can be loaded, but not used."""

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
        """Refuse: runs have no reward model."""
        raise ConfigError(
            f"{type(self).__name__} needs a reward model, which runs do not support yet; call the model from a reward "
            "function (an ORM or AsyncORM that calls a server)"
        )


class GenRMPlugin(DefaultRMPlugin):
    """A reward model that generates its verdict as text."""


rm_plugins = PluginDict("rm_plugins", {"default": DefaultRMPlugin, "genrm": GenRMPlugin})
