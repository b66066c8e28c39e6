"""verl.experimental.reward_loop.reward_manager.limited: a manager whose function calls a rate-limited server.

    class Judge(RateLimitedRewardManager): ...
    reward: {max_concurrent: 8, max_rpm: 600, max_tpm: 100000, estimated_tokens_per_request: 500, timeout: 60}

The limits belong to the class and are shared by all of its objects; the first object sets them. As in verl, and unlike a
reward function that the run calls itself, a failure or timeout of the function scores 0 and is reported next to the score.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf

from polyturn.compat.verl.reward_loop import RewardManagerBase
from polyturn.compat.verl.reward_manager import RawRewardFn, by_key, register, with_known_rewards
from polyturn.compat.verl.reward_score import default_compute_score

__all__ = ["AsyncTokenBucket", "RateLimitedRewardManager"]

logger = logging.getLogger(__name__)


class AsyncTokenBucket:
    """A token bucket of `rate_limit` tokens per second; at most `max_tokens` (by default `rate_limit`) at once."""

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit = rate_limit
        self.max_tokens = self.tokens = max_tokens or rate_limit
        self.last_update: float | None = None
        self.lock = asyncio.Lock()

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Wait for tokens and take them. A call for more tokens than the bucket holds takes them at once, and then waits."""
        while True:
            async with self.lock:
                self._refill(asyncio.get_running_loop().time())
                wait_s = (num_tokens - self.tokens) / self.rate_limit
                is_owed = num_tokens > self.max_tokens
                if is_owed or wait_s <= 0:
                    self.tokens -= num_tokens
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if is_owed or wait_s <= 0:
                return

    def _refill(self, now: float) -> None:
        elapsed_s = 0.0 if self.last_update is None else now - self.last_update
        self.tokens = min(self.max_tokens, self.tokens + elapsed_s * self.rate_limit)
        self.last_update = now


class TokenBucket(AsyncTokenBucket):
    """A token bucket without waiting, for callers that retry."""

    def acquire(self) -> bool:  # type: ignore[override]
        """Take one token if available; return whether it was."""
        self._refill(time.monotonic())
        is_there = self.tokens >= 1
        self.tokens -= is_there
        return is_there


@register("rate_limited")
class RateLimitedRewardManager(RewardManagerBase):
    """Calls a function per answer within three limits: concurrent calls, calls per minute, and tokens per minute."""

    _semaphore: ClassVar[asyncio.Semaphore | None] = None
    _max_concurrent: ClassVar[int | None] = None
    _rpm_limiter: ClassVar[AsyncTokenBucket | None] = None
    _max_rpm: ClassVar[float | None] = None
    _tpm_limiter: ClassVar[AsyncTokenBucket | None] = None
    _max_tpm: ClassVar[float | None] = None
    _estimated_tokens_per_request: ClassVar[float | None] = None
    _class_initialized = False

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: RawRewardFn | None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        num_examine: int | None = None,
        reward_fn_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a manager from verl's composed config. `num_examine`, `reward_fn_key` and `kwargs` have no effect.

        Raises:
            TypeError: the tokenizer is None.
        """
        if tokenizer is None:
            raise TypeError("RateLimitedRewardManager requires `tokenizer`.")
        config = OmegaConf.create({"reward": {}}) if config is None else config
        super().__init__(config, tokenizer, compute_score or default_compute_score)
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer
        self.timeout = _limits(config).get("timeout", 300.0)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Set the limits of all objects; later objects cannot change them and only log a warning."""
        limits = _limits(config)
        rpm, tpm = limits.get("max_rpm"), limits.get("max_tpm")
        if cls._class_initialized:
            if (rpm, tpm) != (cls._max_rpm, cls._max_tpm):
                logger.warning(
                    "%s already has limits, which all objects share: max_rpm=%s and max_tpm=%s are ignored, and "
                                        "max_rpm=%s and max_tpm=%s stay; create the first object with the intended limits",
                    cls.__name__, rpm, tpm, cls._max_rpm, cls._max_tpm,
                )  # fmt: skip
            return
        super().init_class(config, tokenizer)
        cls._max_concurrent = limits.get("max_concurrent", 1)
        cls._semaphore = asyncio.Semaphore(limits.get("max_concurrent", 1))
        cls._max_rpm, cls._max_tpm = rpm, tpm
        cls._rpm_limiter = None if rpm is None else AsyncTokenBucket(rpm / 60.0)
        cls._tpm_limiter = None if tpm is None else AsyncTokenBucket(tpm / 60.0)
        cls._estimated_tokens_per_request = limits.get("estimated_tokens_per_request", 2000)

    async def _compute_reward(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Any:
        router = {} if self.reward_router_address is None else {
            "reward_router_address": self.reward_router_address,
            "reward_model_tokenizer": self.reward_model_tokenizer,
        }  # fmt: skip
        columns = {"data_source": data_source, "solution_str": solution_str, "ground_truth": ground_truth}
        compute: Any = self.compute_score
        if self.is_async_reward_score:
            return await compute(**columns, extra_info=extra_info, **router)
        return await asyncio.to_thread(compute, **columns, extra_info=extra_info, **router)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the score of a row (the last one of several) and the function's further values."""
        row = data[-1:][0]
        ids, columns = row.batch["responses"], row.non_tensor_batch
        length = int(row.batch["attention_mask"][-ids.shape[-1] :].sum())
        extra_info = {**(columns.get("extra_info") or {}), **(columns.get("tool_extra_fields") or {})}
        text = await asyncio.to_thread(self.tokenizer.decode, ids[:length], skip_special_tokens=True)
        if self._rpm_limiter is not None:
            await self._rpm_limiter.acquire(1.0)
        if self._tpm_limiter is not None:
            await self._tpm_limiter.acquire(self._estimated_tokens_per_request or 0)
        assert self._semaphore is not None
        source, truth = columns["data_source"], columns["reward_model"]["ground_truth"]
        async with self._semaphore:
            try:
                future = self._compute_reward(source, text, truth, extra_info)
                result = await asyncio.wait_for(future, timeout=self.timeout)
            except TimeoutError:
                logger.warning("the reward of an answer of %s took longer than %s s: %.100r", source, self.timeout, text)
                return {"reward_score": 0.0, "reward_extra_info": {"timeout": True, "acc": 0.0}}
            except Exception as problem:
                logger.exception("the reward of an answer of %s failed: %.100r", source, text)
                return {"reward_score": 0.0, "reward_extra_info": {"error": str(problem), "acc": 0.0}}
        info = dict(result) if isinstance(result, Mapping) else {"acc": result}
        return {"reward_score": info["score"] if isinstance(result, Mapping) else result, "reward_extra_info": info}

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Return the rewards [B, R] of a batch, outside an event loop."""
        if "rm_scores" in data.batch:
            return with_known_rewards(data, return_dict)

        async def all_rows() -> list[dict[str, Any]]:
            return await asyncio.gather(*(self.run_single(data[i : i + 1]) for i in range(len(data))))

        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        scores = self.loop.run_until_complete(all_rows())
        for i, score in enumerate(scores):
            length = int(data[i].batch["attention_mask"][-rewards.shape[-1] :].sum())
            if length:
                rewards[i, length - 1] = score["reward_score"]
        info = by_key([score["reward_extra_info"] for score in scores])
        return {"reward_tensor": rewards, "reward_extra_info": info} if return_dict else rewards


def _limits(config: Any) -> Mapping[str, Any]:
    """Return the section with the limits: `reward`, or `reward_model` in older releases."""
    return {**(config.get("reward_model") or {}), **(config.get("reward") or {})}
