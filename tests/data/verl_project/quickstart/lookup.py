"""The quick start's look-up tool and its reward, as a project made for verl has them.

Only the episode's own tool knows the price. It reports it as its reward for the episode, which reaches the reward function
under `extra_info["rollout_reward_scores"]`; the reward of the episode is what that function returns, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.utils.reward_score import gsm8k

from polyturn.infra.plugins import import_attr

TASKS = str(Path(__file__).parents[4] / "examples/quickstart/tasks.py")
PriceLookup: Any = import_attr(f"{TASKS}:PriceLookup")
price: Any = import_attr(f"{TASKS}:price")


class Lookup(PriceLookup):
    """Remembers which item its episode is about, to say afterwards what that costs."""

    def __init__(self, config: dict, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._item: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, item: str = "", **kwargs: Any) -> str:
        assert instance_id is not None
        self._item[instance_id] = item
        return instance_id

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        item = self._item[instance_id]
        return float(price(instance_id, item)) if item else 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._item[instance_id]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """Return 1.0 for the right answer in the form `#### N`."""
    if data_source == "quickstart/lookup":
        assert extra_info is not None
        ground_truth = int(extra_info["rollout_reward_scores"]["lookup"])
    return gsm8k.compute_score(solution_str, str(ground_truth))
