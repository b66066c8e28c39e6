"""The contract of a reward function.

async def test_my_reward():
    await check_reward(compute_score, {"#### 4": 1.0, "#### 5": 0.0}, ground_truth="4")
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.trajectory import Trajectory, Turn
from polyturn.rewards.options import BatchOptions, CallOptions
from polyturn.rewards.router import RewardRef, RewardRouter
from polyturn.testing.episodes import task
from polyturn.testing.suites.common import DEADLINE_S, Findings
from polyturn.testing.suites.interaction import AWKWARD


async def check_reward(
    function: Callable[..., Any],
    expected: Mapping[str, float] | Sequence[str],
    *,
    ground_truth: Any,
    data_source: str = "check",
    extra_info: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    is_deterministic: bool = True,
) -> None:
    """Check that a reward function keeps its contract with the framework, and report all problems.

    The suite checks the function's form and the expected scores. It also checks that any text of a model, and a trajectory
    without turns, get a finite number; that equal answers get equal scores, even concurrently; that tool results are not
    scored; and that the event loop is not blocked.

    Args:
        function: The function, in any form that a run accepts.
        expected: The model's answer -> its score; or only the answers.
        ground_truth: The right answer, as in the rows.
        data_source: The data source, as in the rows.
        extra_info: The rest of a row.
        kwargs: The function's own arguments, as in the config.
        is_deterministic: Whether equal answers get equal scores; False for a judge that samples.

    Raises:
        ContractError: the function breaks its contract; the message lists the problems.
        ConfigError: the function has no form that a run accepts.
    """
    options = CallOptions(timeout_s=DEADLINE_S, batch=BatchOptions(wait_s=0.001))
    router = RewardRouter(function=RewardRef(target=function, kwargs=kwargs or {}), calls=options)
    row = task(ground_truth=ground_truth, data_source=data_source, extra=dict(extra_info or {}))
    scores = expected if isinstance(expected, Mapping) else dict.fromkeys(expected)
    async with Findings(f"reward {router_name(function)}") as findings:

        async def score(*texts: str, what: str, observed: str = "") -> Reward | None:
            reward: Reward | None = None
            async with findings.calling(f"the score of {what}"):
                reward = await router.score(_trajectory(row, texts, observed=observed))
            return reward

        for text, value in scores.items():
            reward = await score(text, what=f"{text!r:.60}")
            if reward is None or value is None:
                continue
            got = reward.components["outcome"]
            findings.expect(math.isclose(got, value, abs_tol=1e-9), f"{text!r:.60} is scored {got:g}, not {value:g}")
        for kind, text in AWKWARD.items():
            await score(text, what=f"a message that is {kind}")
        await score(what="a trajectory without turns, which a limit may cause")
        await score(*(text for text in scores), what="a conversation of several turns", observed="Try again.")
        if is_deterministic and not findings.problems:
            await _check_same(findings, score, list(scores))


async def _check_same(findings: Findings, score: Callable[..., Any], texts: Sequence[str]) -> None:
    """Score each answer alone, again, concurrently with the others, and after a tool result with all answers."""
    alone = [await score(text, what=f"{text!r:.60}") for text in texts]
    beside = await asyncio.gather(*(score(text, what=f"{text!r:.60}, beside others") for text in texts))
    for text, one, other in zip(texts, alone, beside, strict=True):
        findings.expect(
            one == other, f"{text!r:.60} is scored differently in concurrent calls; do not keep state between calls"
        )
    if findings.problems or len(texts) < 2:
        return
    for text, one in zip(texts, alone, strict=True):
        reward = await score(text, what=f"{text!r:.60}", observed="\n".join(texts))
        findings.expect(
            reward is not None and reward.components["outcome"] == one.components["outcome"],
            f"{text!r:.60} is scored differently after a tool result with the other answers; score only the model's text",
        )


def router_name(function: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    return str(function).split(" at 0x")[0].removeprefix("<function ").removeprefix("<")


def _trajectory(row: Any, texts: Sequence[str], *, observed: str) -> Trajectory:
    heard = (Message(role="tool", content=observed, name="search", tool_call_id="call_0"),) if observed else ()
    turn = Turn(index=0, message=Message(role="assistant"), finish_reason=FinishReason.STOP, observation=heard)
    turns = tuple(
        dataclasses.replace(turn, index=number, message=Message(role="assistant", content=text))
        for number, text in enumerate(texts)
    )
    return Trajectory(id="check/0", task=row, segments=(), turns=turns, stop_reason=StopReason.STOP)
