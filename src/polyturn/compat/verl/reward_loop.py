"""verl.experimental.reward_loop: the base class of managers that score one trajectory at a time, as coroutines.

    class Mine(RewardManagerBase):
        async def run_single(self, data):           a DataProto of one row
            return {"reward_score": 1.0, "reward_extra_info": {"acc": 1.0}}

A run calls such a manager through `managed_reward`. Names share a registry with `reward_manager`, whose classes turn a whole
batch into a tensor.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)
from polyturn.compat.verl.reward_manager import RawRewardFn, on_last_tokens, register, texts
from polyturn.compat.verl.reward_score import default_compute_score

__all__ = ["NaiveRewardManager", "RewardLoopManagerBase", "RewardManagerBase", "register"]


class RewardManagerBase(ABC):
    """Scores one row; `self.loop` is the event loop in which it is created and called."""

    _class_initialized = False

    def __init__(self, config: Any, tokenizer: Any, compute_score: RawRewardFn | None = None) -> None:
        """Create a manager from verl's composed config and the run's reward function."""
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            self.loop = asyncio.new_event_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Create the state that all instances share."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the "reward_score" of a row, and further values in "reward_extra_info"."""

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[float]) -> Tensor:
        """Return [B, R] the score of each row on the last token of its response, 0 elsewhere."""
        return on_last_tokens(data, scores)


RewardLoopManagerBase = RewardManagerBase


class NaiveRowRewardManager(RewardManagerBase):
    """Calls a function per answer."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score or default_compute_score)
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer

    async def run_single(self, data: Any) -> dict[str, Any]:
        row = data[0].non_tensor_batch
        seen = {"num_turns": row.get("__num_turns__"), "rollout_reward_scores": row.get("reward_scores", {})}
        function_row = {
            "data_source": row["data_source"],
            "solution_str": texts(data, self.tokenizer)[0],
            "ground_truth": row["reward_model"]["ground_truth"],
            "extra_info": {**(row.get("extra_info") or {}), **(row.get("tool_extra_fields") or {}), **seen},
        }
        compute: Any = self.compute_score
        result = (
            await compute(**function_row) if self.is_async_reward_score else await asyncio.to_thread(compute, **function_row)
        )
        info = dict(result) if isinstance(result, Mapping) else {"acc": result}
        return {"reward_score": info["score"] if isinstance(result, Mapping) else result, "reward_extra_info": info}


NaiveRewardManager = NaiveRowRewardManager  # verl uses this name in both modules
