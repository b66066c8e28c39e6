"""Adapters to environments of other packages, for example `env: textarena:GuessTheNumber-v0` in a configuration.

    prefix:id   ->  Adapter (once a run)  ->  tasks(): one per seed     ->  the `env` scheduler makes, resets, steps, closes
                                          ->  make(): an environment, once an episode

Each adapter makes the environments of one package and turns their observations into text. A package is imported only when
its adapter is made. If the package is missing, the error has the command that installs it.
"""

from polyturn.environments.base import Adapter, SeedTasks, require
from polyturn.environments.registry import adapters, find_adapter

__all__ = ["Adapter", "SeedTasks", "adapters", "find_adapter", "require"]
