"""The shipped schedulers, one idea a file. A config names them: `rollout.scheduler: math_tips`.

Each is a short subclass of `MultiTurnScheduler` and an example of what one can do with it.
"""

from polyturn.rollout.schedulers.compaction import Compaction
from polyturn.rollout.schedulers.environment import Gym
from polyturn.rollout.schedulers.image_tools import ImageTools
from polyturn.rollout.schedulers.lookahead import Lookahead
from polyturn.rollout.schedulers.math_tips import MathTips
from polyturn.rollout.schedulers.react import React
from polyturn.rollout.schedulers.registry import schedulers
from polyturn.rollout.schedulers.single_turn import SingleTurn
from polyturn.rollout.schedulers.thinking_tips import ThinkingTips
from polyturn.rollout.schedulers.tree import Tree

__all__ = [
    "Compaction", "Gym", "ImageTools", "Lookahead", "MathTips", "React", "SingleTurn", "ThinkingTips", "Tree", "schedulers",
]  # fmt: skip
