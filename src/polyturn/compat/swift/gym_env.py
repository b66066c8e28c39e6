"""swift.rollout.gym_env: environments and context managers that plug-ins register.

class Grid(Env):
    async def reset(self, config): return "You are at S.", {}, "Walk to G."
    async def step(self, action): return "You are at F.", 0.0, False, {}
    async def close(self): ...
envs["grid"] = Grid                       a row chooses it: {"env_config": {"name": "grid", "seed": 3}}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from polyturn.compat.swift.orm import MathAccuracy
from polyturn.compat.swift.registry import PluginDict
from polyturn.infra.plugin_shape import CallShape, Shape
from polyturn.serving.rollout_protocol import Messages, RolloutInferRequest


class SwiftEnv(ABC):
    """The environment of one trajectory. Its methods may be sync or async."""

    def __init__(self, env_config: Any) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Begin and return the first observation, an info, and the system message ("" for none)."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Act on the conversation, whose last message is the model's; return observation, reward, done and info."""

    @abstractmethod
    async def close(self) -> None:
        """Release resources. Called exactly once."""


Env = SwiftEnv  # the name in users' imports


class SimpleMathEnv(Env):
    """Replies that the answer is wrong until it is right."""

    tips_prompt = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
    system_prompt = (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. Think first, in "
        "<think> </think>, then give the answer in <answer> </answer>."
    )

    def __init__(self, env_config: Any) -> None:
        super().__init__(env_config)
        self.acc_func = MathAccuracy()
        self.solution = ""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Return the row's problem."""
        self.solution = config.data_dict["solution"]
        return config.data_dict["problem"], {}, self.system_prompt

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Compare the answer with the solution."""
        reward = float(self.acc_func([action[-1]["content"]], [self.solution])[0] == 1)
        return self.tips_prompt, reward, reward == 1, {"math_reward": reward}

    async def close(self) -> None:
        """Do nothing."""


class ContextManager(ABC):
    """Selects the part of a history that the model sees next."""

    def __init__(self, ctx_config: Any) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """Return the history for the next turn."""


class DummyContextManager(ContextManager):
    """Shows everything."""

    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """Return the history unchanged."""
        return history


ENV = Shape(
    what="an environment of ms-swift",
    needs=(("reset",), ("step",), ("close",)),
    bases=(SwiftEnv,),
    calls={
        "reset": CallShape(num=1, write="async def reset(self, config)"),
        "step": CallShape(num=1, write="async def step(self, action)"),
        "close": CallShape(num=0, write="async def close(self)"),
    },
)
CONTEXT_MANAGER = Shape(
    what="a context manager of ms-swift",
    needs=(("manage_context",),),
    bases=(ContextManager,),
    calls={"manage_context": CallShape(num=2, write="def manage_context(self, history, trajectory_id)")},
)

envs = PluginDict("envs", {"math_env": SimpleMathEnv}, shape=ENV)
context_managers = PluginDict("context_managers", {"dummyContextManager": DummyContextManager}, shape=CONTEXT_MANAGER)
