"""The built-in schedulers, one per file. A config selects one: `rollout.scheduler: compaction`. See also the examples."""

from polyturn.rollout.schedulers.compaction import Compaction
from polyturn.rollout.schedulers.environment import Gym
from polyturn.rollout.schedulers.registry import schedulers
from polyturn.rollout.schedulers.single_turn import SingleTurn

__all__ = ["Compaction", "Gym", "SingleTurn", "schedulers"]
