"""Environments of other packages, as they are: the meaning of `env: textarena:GuessTheNumber-v0` in a configuration.

    prefix:id   ->  Adapter (once a run)  ->  tasks: a seed each        ->  the `env` scheduler makes, resets, steps, closes
                                          ->  make(): an environment, once an episode

One adapter a file, thin: it makes environments of one package and words what they show. Packages are imported when an
adapter is made, never before, and a missing one is a sentence with the line that installs it.
"""

from polyturn.environments.base import Adapter, SeedTasks, require
from polyturn.environments.registry import adapters, find_adapter

__all__ = ["Adapter", "SeedTasks", "adapters", "find_adapter", "require"]
