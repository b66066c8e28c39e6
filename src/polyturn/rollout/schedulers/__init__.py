"""The schedulers that ship, one a file. A config names them: `rollout.scheduler: compaction`; further ones are examples."""

from polyturn.rollout.schedulers.compaction import Compaction
from polyturn.rollout.schedulers.environment import Gym
from polyturn.rollout.schedulers.registry import schedulers
from polyturn.rollout.schedulers.single_turn import SingleTurn

__all__ = ["Compaction", "Gym", "SingleTurn", "schedulers"]
