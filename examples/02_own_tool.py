"""Write your own tools: a function, and a function with an argument that comes from the task's row, hidden from the model.

`--tiny` runs on a laptop.
"""

import sys
from typing import Annotated

import polyturn

PRICES = {"lamp": 40, "chair": 75}


@polyturn.tool
async def price(item: str) -> str:
    """Look up what an item costs.

    Args:
        item: The item's name.
    """
    if item not in PRICES:
        raise polyturn.ToolError(f"no item {item!r}; there are {sorted(PRICES)}")  # the model reads this and continues
    return str(PRICES[item])


@polyturn.tool
def can_afford(item: str, purse: Annotated[int, polyturn.FromTask]) -> str:
    """Say whether the user has the money for an item.

    Args:
        item: The item's name.
    """
    return "yes" if PRICES.get(item, purse + 1) <= purse else "no"


def score(trajectory: polyturn.Trajectory) -> float:
    """Return 1 for a right answer, plus a tenth for each successful call before it."""
    answer = trajectory.turns[-1].message.text.lower()
    calls = [result for turn in trajectory.turns for result in turn.tool_results]
    return float(str(trajectory.task.ground_truth) in answer) + 0.1 * sum(result.error is None for result in calls)


def row(item: str, purse: int) -> dict:
    """Return a task: the question, the amount of money in the purse, and the right answer."""
    kwargs = {"price": {}, "can_afford": {"create_kwargs": {"purse": purse}}}
    answer = "yes" if PRICES[item] <= purse else "no"
    return {"prompt": f"Can I afford the {item}? Say yes or no.", "ground_truth": answer, "tools_kwargs": kwargs}


TINY = {"steps": 2, "groups_per_step": 2, "group_size": 4, "max_tokens_per_turn": 32}
REAL = {"steps": 100, "groups_per_step": 16}
run = polyturn.train(
    model=polyturn.tiny("Qwen/Qwen3-0.6B") if "--tiny" in sys.argv else "Qwen/Qwen3-0.6B",
    tasks=[row(item, purse) for item in PRICES for purse in (30, 50, 90)],
    tools=[price, can_afford],
    reward=score,
    max_turns=4,
    name="own_tool",
    **(TINY if "--tiny" in sys.argv else REAL),
)
print(run)
