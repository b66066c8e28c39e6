"""verl.experimental.agent_loop.tool_agent_loop: the states of a loop, which itself is native."""

from polyturn.compat.verl.agent_loop import AgentData, AgentState

__all__ = ["AgentData", "AgentState"]
