"""Geo3kTool: lets the model check answers to a geometry problem before its final answer.

An answer that scores better than the previous one is free; any other answer costs 0.05, as in `Gsm8kTool`.
"""

from __future__ import annotations

from typing import Any

from polyturn.infra.threads import DaemonThreads
from polyturn.rewards import geo3k
from polyturn.tools.gsm8k import NO_PROGRESS_REWARD, Gsm8kTool
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse


class Geo3kTool(Gsm8kTool):
    """Scores an answer to a geometry problem. State per episode: the last answer, its score, the right answer."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._threads = DaemonThreads(name="geo3k")  # comparing two expressions may take long

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the default schema, for a tool file without one."""
        answer = {"type": "string", "description": "Your answer to the problem, a number or a mathematical expression."}
        return OpenAIFunctionToolSchema.of(
            "calc_geo3k_reward",
            "Check an answer to the problem: 1.0 if it is right, 0.0 if it is wrong.",
            {"answer": answer},
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Score `answer`; the step reward is 0.0 for progress and `NO_PROGRESS_REWARD` otherwise."""
        answer = parameters.get("answer", "")
        state = self._instance_dict[instance_id]
        state["response"] = answer if isinstance(answer, str) else str(answer)
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["reward"] else NO_PROGRESS_REWARD
        state["reward"] = reward
        return ToolResponse(text=f"Current parsed answer={state['response']!r} reward={reward}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer."""
        state = self._instance_dict[instance_id]
        score: float = await self._threads.run(
            geo3k.compute_score, state["response"], state["ground_truth"], use_boxed=False, format_score=0.0
        )
        return score
