"""Runs environments of packages directly, in their own interpreter, for their rewards for the same seed and actions.

    python _environment_direct.py verifiers '[{"where": MODULE, "arguments": {…}, "row": 0, "actions": ["…"]}, …]'
    python _environment_direct.py openenv '[{"where": FOLDER, "class": "server.app:GuessEnvironment", …}, …]'

Prints a JSON list with the reward of each. It does not import polyturn; a scripted model of the package's API plays instead.
"""

import asyncio
import importlib
import json
import os
import sys

ANSWER = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


async def verifiers(case):
    """Run one rollout of an environment with a client that returns the actions."""
    import verifiers as vf
    from openai.types.chat import ChatCompletion
    from verifiers.clients import OpenAIChatCompletionsClient

    sys.path.insert(0, os.path.dirname(case["where"]))
    env = vf.load_environment(os.path.basename(case["where"]).removesuffix(".py"), **case["arguments"])
    row = env.get_dataset().to_list()[case["row"]]
    actions = iter([right_answer(env, row) if a == "RIGHT" else a for a in case["actions"]])
    texts = []

    class Scripted(OpenAIChatCompletionsClient):
        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            texts.append(next(actions))
            message = {"role": "assistant", "content": texts[-1]}
            if texts[-1].startswith("<tool_call>"):
                call = json.loads(texts[-1].removeprefix("<tool_call>").removesuffix("</tool_call>"))
                function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                message = {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": f"call_{len(texts)}", "type": "function", "function": function}],
                }
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return ChatCompletion.model_validate(
                {"id": "x", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
            )

    rollout = await env.run_rollout(row, Scripted(None), "m", {})
    return {"reward": rollout["reward"], "actions": texts}


def right_answer(env, row):
    """Return the answer that verifiers' Reasoning Gym environment scores as right."""
    return f"<answer>{env.rg_dataset[int(row['answer'])]['answer']}</answer>"


async def openenv(case):
    """Step an environment's class without a server."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("server", "models")]:
        del sys.modules[name]  # it belongs to the previous folder
    sys.path.insert(0, case["where"])
    module, name = case["class"].split(":")
    env = getattr(importlib.import_module(module), name)()
    kind, field = case["action"].split("(")[0].split(":"), case["field"]
    action = getattr(importlib.import_module(kind[0]), kind[1])
    env.reset(**case["reset"])
    rewards, texts = [], []
    for value in case["actions"]:
        answer = env.step(action(**{field: value}))
        texts.append(str(value))
        rewards.append(answer.reward or 0.0)
        if answer.done:
            break
    return {"reward": sum(rewards), "actions": texts}


async def main():
    """Run one case after another."""
    drive = {"verifiers": verifiers, "openenv": openenv}[sys.argv[1]]
    results = [await drive(case) for case in json.loads(sys.argv[2])]
    ANSWER.write(json.dumps(results) + "\n")
    ANSWER.flush()


if __name__ == "__main__":
    asyncio.run(main())
