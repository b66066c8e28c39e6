"""Train an agent that has its own loop and only uses OpenAI's API, which polyturn serves. `--tiny` runs on a laptop.

Every token that the server sampled is trained with the reward that the agent returns. A new segment starts when the agent
edits its history. Agent frameworks need only the server's address (docs/guides/openai.md links an example of the OpenAI
Agents SDK).
"""

import sys

import openai

import polyturn


async def agent(base_url, api_key, task):
    """Solve one task and return its reward."""
    history = [{"role": "user", "content": task.prompt[0].text}]
    text = ""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=history)
            text = answer.choices[0].message.content or ""
            if task.ground_truth in text:
                break
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": "Check it, and answer again."}]
    return float(task.ground_truth in text)


TINY = {"steps": 2, "groups_per_step": 2, "group_size": 4, "max_tokens_per_turn": 32}
REAL = {"steps": 100, "groups_per_step": 16}
run = polyturn.train(
    model=polyturn.tiny("Qwen/Qwen3-0.6B") if "--tiny" in sys.argv else "Qwen/Qwen3-0.6B",
    tasks=[{"prompt": f"What is {a} + {b}?", "ground_truth": str(a + b)} for a in range(2, 9) for b in range(2, 9)],
    scheduler="black_box",
    scheduler_kwargs={"agent": agent},
    max_turns=6,
    name="own_loop",
    **(TINY if "--tiny" in sys.argv else REAL),
)
print(run)
