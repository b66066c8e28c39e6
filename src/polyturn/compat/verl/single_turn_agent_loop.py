"""verl.experimental.agent_loop.single_turn_agent_loop: `SingleTurnAgentLoop`, a base class for users' own loops.

Rows with `single_turn_agent` are run by the native loop.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from polyturn.compat.verl.agent_loop import AgentLoopBase, AgentLoopOutput
from polyturn.compat.verl.profiler import simple_timer

__all__ = ["SingleTurnAgentLoop"]


class SingleTurnAgentLoop(AgentLoopBase):
    """Runs one turn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length, self.response_length = self.rollout_config.prompt_length, self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory."""
        messages = list(kwargs["raw_prompt"])
        media = await self.process_multi_modal_info(messages)
        prompt_ids = await self.ct_build_initial_tokens(messages, images=media.get("images"), videos=media.get("videos"))
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        metrics.setdefault("num_preempted", -1 if output.num_preempted is None else output.num_preempted)
        kept, end = slice(self.response_length), len(prompt_ids) + self.response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[kept],
            response_mask=[1] * len(output.token_ids[kept]),
            response_logprobs=output.log_probs[kept] if output.log_probs else None,
            routed_experts=None if output.routed_experts is None else output.routed_experts[:end],
            multi_modal_data=media,
            num_turns=2,
            metrics=metrics,
            extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
