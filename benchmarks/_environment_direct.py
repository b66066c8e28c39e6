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


async def verifiers(told):
    """Run one rollout of an environment with a client that returns the actions."""
    import verifiers as vf
    from openai.types.chat import ChatCompletion
    from verifiers.clients import OpenAIChatCompletionsClient

    sys.path.insert(0, os.path.dirname(told["where"]))
    env = vf.load_environment(os.path.basename(told["where"]).removesuffix(".py"), **told["arguments"])
    row = env.get_dataset().to_list()[told["row"]]
    actions = iter([right_answer(env, row) if a == "RIGHT" else a for a in told["actions"]])
    said = []

    class Scripted(OpenAIChatCompletionsClient):
        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            said.append(next(actions))
            message = {"role": "assistant", "content": said[-1]}
            if said[-1].startswith("<tool_call>"):
                call = json.loads(said[-1].removeprefix("<tool_call>").removesuffix("</tool_call>"))
                function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                message = {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": f"call_{len(said)}", "type": "function", "function": function}],
                }
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return ChatCompletion.model_validate(
                {"id": "x", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
            )

    found = await env.run_rollout(row, Scripted(None), "m", {})
    return {"reward": found["reward"], "actions": said}


def right_answer(env, row):
    """Return the answer that verifiers' Reasoning Gym environment scores as right."""
    return f"<answer>{env.rg_dataset[int(row['answer'])]['answer']}</answer>"


async def openenv(told):
    """Step an environment's class without a server."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("server", "models")]:
        del sys.modules[name]  # it belongs to the previous folder
    sys.path.insert(0, told["where"])
    module, name = told["class"].split(":")
    env = getattr(importlib.import_module(module), name)()
    kind, field = told["action"].split("(")[0].split(":"), told["field"]
    action = getattr(importlib.import_module(kind[0]), kind[1])
    env.reset(**told["reset"])
    rewards, said = [], []
    for value in told["actions"]:
        answer = env.step(action(**{field: value}))
        said.append(str(value))
        rewards.append(answer.reward or 0.0)
        if answer.done:
            break
    return {"reward": sum(rewards), "actions": said}


async def main():
    """Run one case after another."""
    drive = {"verifiers": verifiers, "openenv": openenv}[sys.argv[1]]
    found = [await drive(told) for told in json.loads(sys.argv[2])]
    ANSWER.write(json.dumps(found) + "\n")
    ANSWER.flush()


if __name__ == "__main__":
    asyncio.run(main())
