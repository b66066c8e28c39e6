import json

import httpx

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


async def agent(base_url, api_key, task):
    history = [{"role": "user", "content": task.prompt[0].text}]
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=300, trust_env=False) as client:

        async def ask(messages, **more):
            answer = await client.post(f"{base_url}/chat/completions", json={"model": "any", "messages": messages, **more})
            answer.raise_for_status()
            return answer.json()["choices"][0]["message"]

        first = await ask(history, tools=TOOLS, max_tokens=100)
        history.append(first)
        for call in first.get("tool_calls") or ():
            values = json.loads(call["function"]["arguments"])
            history.append({"role": "tool", "tool_call_id": call["id"], "content": str(values["a"] + values["b"])})
        second = await ask(history, tools=TOOLS)
        other = await ask([*history, {"role": "user", "content": "Are you right?"}], tools=TOOLS)
        checked = await ask([{"role": "system", "content": "You look."}, {"role": "user", "content": second["content"]}])
    return {"reward": float(task.ground_truth in second["content"]), "said": [other["content"], checked["content"]]}
