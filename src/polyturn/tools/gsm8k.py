"""Gsm8kTool: lets the model check answers before its final answer.

An answer that scores better than the previous one is free; any other answer costs 0.05. An instance lives for the whole
episode, so it remembers the previous answer.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from polyturn.rewards import gsm8k
from polyturn.tools.base import BaseTool
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

NO_PROGRESS_REWARD = -0.05
"""Step reward of an answer that does not score better than the previous one."""


class Gsm8kTool(BaseTool):
    """Scores an answer to a GSM8K problem. State per episode: the last answer, its score, the right answer."""

    checks_own_arguments = True

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the default schema, for a tool file without one."""
        answer = {"type": "string", "description": "Your answer to the problem, as a number."}
        return OpenAIFunctionToolSchema.of(
            "calc_gsm8k_reward",
            "Check an answer to the problem: 1.0 if it is right, 0.0 if it is wrong.",
            {"answer": answer},
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Start an instance for one episode; the right answer is `ground_truth`, or `create_kwargs["ground_truth"]`."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Score `answer`; the step reward is 0.0 for progress and `NO_PROGRESS_REWARD` otherwise."""
        answer = parameters.get("answer", "")
        answer = answer if isinstance(answer, str) else str(answer)
        state = self._instance_dict[instance_id]
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["reward"] else NO_PROGRESS_REWARD
        state["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer."""
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["ground_truth"], method="flexible", format_score=0.0, score=1.0)

    async def snapshot(self, instance_id: str) -> dict[str, Any]:
        """Return the state of the episode."""
        return self._instance_dict[instance_id]

    async def restore(self, instance_id: str, state: dict[str, Any]) -> None:
        """Restore the state of an episode, which has been created again."""
        self._instance_dict[instance_id] = state

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the episode's state; raise KeyError for an id that was never created."""
        del self._instance_dict[instance_id]
