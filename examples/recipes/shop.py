"""A shop where a customer wants orders changed: the tasks, the tool that changes orders, and the reward.

goal: send the lamp to Oslo instead                             known to the customer; the model has to ask, then act
orders({"order": "417", "city": "Oslo"})                        changes this episode's own orders
reward 1                                                        if all orders are as the goal requires
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from typing import Any

import polyturn

THINGS, CITIES = ("lamp", "chair", "kettle", "book", "tent"), ("Oslo", "Lima", "Bern", "Riga", "Cork")
SYSTEM = (
    "You serve the customers of a shop. Look orders up before you change them, and change only what the customer asks for."
)
Order = dict[str, Any]


class Orders(polyturn.BaseTool):
    """A tool that lists the orders of one customer, or changes one of them."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._orders: dict[str, dict[str, Order]] = {}
        self._wanted: dict[str, dict[str, Order]] = {}

    def get_openai_tool_schema(self) -> Any:
        fields = {
            "order": {"type": "string", "description": "The order's number; without it, all orders are listed."},
            "status": {"type": "string", "enum": ["open", "cancelled"], "description": "The order's new status."},
            "city": {"type": "string", "description": "The city to send the order to instead."},
        }
        function = {"name": "orders", "description": "List the customer's orders, or change one."}
        return {"type": "function", "function": {**function, "parameters": {"type": "object", "properties": fields}}}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self._orders[instance_id], self._wanted[instance_id] = copy.deepcopy(kwargs["orders"]), kwargs["wanted"]
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        orders, number = self._orders[instance_id], parameters.get("order")
        if number is not None and number not in orders:
            raise polyturn.ToolError(f"no order {number!r}; there are {', '.join(orders)}")
        if number is not None:
            orders[number] |= {key: parameters[key] for key in ("status", "city") if key in parameters}
        return json.dumps(orders if number is None else orders[number])

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self._orders[instance_id] == self._wanted[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._orders[instance_id], self._wanted[instance_id]


def is_done(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return 1.0 if the orders are as the goal says, else 0.0."""
    return float(extra_info["rollout_reward_scores"]["orders"])


def tasks(seed: int, num_tasks: int) -> polyturn.TaskDataset:
    """Return tasks of customers with two to four orders, who want one cancelled or sent elsewhere."""
    rng = random.Random(f"shop-{seed}")
    return polyturn.TaskDataset.of([_row(rng) for _ in range(num_tasks)], split=f"shop-{seed}", name="shop.py")


def _row(rng: random.Random) -> dict[str, Any]:
    things = rng.sample(THINGS, rng.randint(2, 4))
    numbers = map(str, rng.sample(range(100, 1000), len(things)))
    orders = {n: {"thing": t, "city": rng.choice(CITIES), "status": "open"} for n, t in zip(numbers, things, strict=True)}
    chosen = rng.choice(list(orders))
    wanted, thing = copy.deepcopy(orders), orders[chosen]["thing"]
    if rng.random() < 0.5:
        wanted[chosen]["status"], goal = "cancelled", f"Get the order of the {thing} cancelled."
    else:
        wanted[chosen]["city"] = city = rng.choice([c for c in CITIES if c != orders[chosen]["city"]])
        goal = f"Get the {thing} sent to {city} instead. You do not know the number of the order."
    return {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello, it is about my order."}],
        "data_source": "shop",
        "tools_kwargs": {"orders": {"create_kwargs": {"orders": orders, "wanted": wanted}}},
        "interaction": {"name": "customer", "goal": goal},
    }
