"""An agent written with the openai client: it asks, calls its tool, checks itself, and knows nothing of polyturn.

    polyturn train tests/data/projects/black_box/config.yaml

The agent owns its loop. Each episode calls `agent` with an address; what the model says there is trained token by token.
"""

from __future__ import annotations

import json
from typing import Any

import openai

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


async def agent(base_url: str, api_key: str, task: Any) -> dict[str, Any]:
    """Solve one task and return its reward."""
    history: list[Any] = [{"role": "user", "content": task.prompt[0].text}]
    said = ""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="gpt-4o-mini", messages=history, tools=TOOLS, max_tokens=12)
            message = answer.choices[0].message
            history.append(message)
            said += message.content or ""
            if message.tool_calls:
                history += [
                    {"role": "tool", "tool_call_id": c.id, "content": add(c.function.arguments)} for c in message.tool_calls
                ]
            elif task.ground_truth in said:
                break
            else:
                history.append({"role": "user", "content": "That is not it. Try again."})
    # A right answer is worth 1; letters are worth a little, so that a model that knows nothing has something to learn.
    return {"reward": float(task.ground_truth in said) + len(set(said)) / 100, "num_messages": len(history)}


def add(arguments: str) -> str:
    """Run the tool."""
    try:
        values = json.loads(arguments)
        return str(values["a"] + values["b"])
    except (ValueError, KeyError, TypeError):
        return "error: add needs two whole numbers, a and b"
