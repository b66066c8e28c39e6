"""Two agents written with the OpenAI Agents SDK, one of which hands over to the other; trained as they are.

    polyturn train tests/data/projects/black_box/config.yaml name=agents_sdk \\
        rollout.scheduler_kwargs.agent=agents_sdk.py:agent

A hand-over gives the conversation to an agent with other instructions: another history, so a segment of its own.
"""

from __future__ import annotations

from typing import Any

import agents
import openai


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def agent(base_url: str, api_key: str, task: Any) -> float:
    """Let a solver and a checker work on one task, and return the reward."""
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = agents.OpenAIChatCompletionsModel(model="any", openai_client=client)
        settings = agents.ModelSettings(max_tokens=10)
        solver = agents.Agent(name="solver", instructions="Solve it.", model=model, tools=[add], model_settings=settings)
        checker = agents.Agent(name="checker", instructions="Check it.", model=model, model_settings=settings)
        solved = await agents.Runner.run(solver, task.prompt[0].text, max_turns=3)
        checked = await agents.Runner.run(checker, [*solved.to_input_list(), {"role": "user", "content": "Is it right?"}])
    said = f"{solved.final_output} {checked.final_output}"
    return float(task.ground_truth in said) + len(set(said)) / 100
