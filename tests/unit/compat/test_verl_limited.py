"""`RateLimitedRewardManager`: its limits, its failures and its forms of a call, as projects subclass and call it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from polyturn import compat
from polyturn.compat.verl.dataproto import DataProto
from polyturn.compat.verl.limited import RateLimitedRewardManager
from polyturn.compat.verl.reward_manager import get_reward_manager_cls

pytestmark = pytest.mark.timeout(300)  # the first test imports torch's compiler


class Words:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids.tolist()))


def rows() -> DataProto:
    """Two rows; the second response has two tokens."""
    tensors = {
        "responses": torch.tensor([[1, 2, 3], [5, 6, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
    }
    truths = [{"ground_truth": "1 2 3"}, {"ground_truth": "other"}]
    extra = [{"level": 1}, {"level": 2}]
    columns = {"data_source": ["s", "s"], "reward_model": truths, "extra_info": extra, "tool_extra_fields": [{"n": 3}] * 2}
    return DataProto.from_dict(tensors, columns)


@pytest.fixture
def manager() -> type[RateLimitedRewardManager]:
    """Make a new class for each test, because limits belong to the class."""

    class Mine(RateLimitedRewardManager):
        _class_initialized = False

    return Mine


def made(cls: type[RateLimitedRewardManager], function: Any, **limits: Any) -> RateLimitedRewardManager:
    return cls(OmegaConf.create({"reward": limits}), Words(), function)


def test_users_file_subclasses_the_manager() -> None:
    compat.install("verl")
    names: dict[str, Any] = {}
    exec(
        "from verl.experimental.reward_loop.reward_manager.limited import AsyncTokenBucket, RateLimitedRewardManager\n"
        "from verl.experimental.reward_loop.reward_manager import RateLimitedRewardManager as again, register\n"
        "from verl.workers.reward_manager import RateLimitedRewardManager as third\n"
        "@register('judge_in_test')\n"
        "class Judge(RateLimitedRewardManager):\n"
        "    async def run_single(self, data):\n"
        "        return {**await super().run_single(data), 'mine': True}\n",
        names,
    )
    assert names["RateLimitedRewardManager"] is names["again"] is names["third"] is RateLimitedRewardManager
    assert get_reward_manager_cls("judge_in_test") is names["Judge"]
    assert get_reward_manager_cls("rate_limited") is RateLimitedRewardManager


async def test_row_is_scored_with_its_columns(manager: type[RateLimitedRewardManager]) -> None:
    async def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
        return {"score": float(solution_str == ground_truth), "saw": extra_info}

    one = made(manager, judge, max_rpm=6000, max_tpm=600000, estimated_tokens_per_request=10)
    assert await one.run_single(rows()[:1]) == {
        "reward_score": 1.0,
        "reward_extra_info": {"score": 1.0, "saw": {"level": 1, "n": 3}},
    }
    assert (await one.run_single(rows()))["reward_score"] == 0.0, "of several rows, the last one"
    assert (manager._max_rpm, manager._max_tpm, manager._max_concurrent) == (6000, 600000, 1)
    assert manager._tpm_limiter is not None and manager._tpm_limiter.tokens < manager._tpm_limiter.max_tokens


async def test_plain_number_is_also_the_accuracy(manager: type[RateLimitedRewardManager]) -> None:
    found = await made(manager, lambda **columns: 0.5).run_single(rows()[:1])
    assert found == {"reward_score": 0.5, "reward_extra_info": {"acc": 0.5}}


async def test_calls_at_once_are_limited(manager: type[RateLimitedRewardManager]) -> None:
    running, most = 0, 0

    async def judge(**columns: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    one = made(manager, judge, max_concurrent=2)
    await asyncio.gather(*(one.run_single(rows()[:1]) for _ in range(6)))
    assert most == 2


async def test_late_or_failing_function_scores_zero(manager: type[RateLimitedRewardManager]) -> None:
    async def judge(ground_truth: str, **columns: Any) -> float:
        if ground_truth == "other":
            raise ValueError("no answer")
        await asyncio.Event().wait()
        return 1.0

    late = await made(manager, judge, timeout=0.01).run_single(rows()[:1])
    failed = await made(manager, judge, timeout=60).run_single(rows()[1:])
    assert late == {"reward_score": 0.0, "reward_extra_info": {"timeout": True, "acc": 0.0}}
    assert failed == {"reward_score": 0.0, "reward_extra_info": {"error": "no answer", "acc": 0.0}}


def test_limits_of_the_first_object_stay(manager: type[RateLimitedRewardManager], caplog: pytest.LogCaptureFixture) -> None:
    made(manager, None, max_rpm=60)
    made(manager, None, max_rpm=60)
    assert not caplog.records
    made(manager, None, max_rpm=120)
    assert "max_rpm=120" in caplog.text and manager._max_rpm == 60


def test_older_section_holds_the_limits(manager: type[RateLimitedRewardManager]) -> None:
    one = manager(OmegaConf.create({"reward_model": {"max_concurrent": 4, "timeout": 7}}), Words(), None)
    assert (manager._max_concurrent, one.timeout) == (4, 7)


def test_batch_is_scored_in_one_call(manager: type[RateLimitedRewardManager]) -> None:
    one = made(manager, lambda extra_info, **columns: {"score": extra_info["level"]}, max_concurrent=2)
    found = one(rows(), return_dict=True)
    assert found["reward_tensor"].tolist() == [[0, 0, 1], [0, 2, 0]]
    assert dict(found["reward_extra_info"]) == {"score": [1, 2]}

    def failing(extra_info: dict[str, Any], **columns: Any) -> dict[str, Any]:
        return {"score": 1 / (extra_info["level"] - 1)}

    two = made(manager, failing)
    info = two(rows(), return_dict=True)["reward_extra_info"]
    assert dict(info) == {"error": ["division by zero", None], "acc": [0.0, None], "score": [None, 1.0]}
    known = rows()
    known.batch["rm_scores"] = torch.ones(2, 3)
    assert one(known).sum() == 6
    one.loop.close()
    two.loop.close()
