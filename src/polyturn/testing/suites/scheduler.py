"""The contract of a scheduler.

async def test_my_scheduler():
    await check_scheduler(MyScheduler(), says=["I guess 5.", "#### 4"], ground_truth="4")
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyturn.core.errors import EngineError
from polyturn.core.messages import to_openai
from polyturn.core.protocols import Interaction, Tool
from polyturn.core.task import Task
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.suites.common import Findings

MAX_TURNS = 4


async def check_scheduler(
    scheduler: MultiTurnScheduler,
    *,
    says: Sequence[str] = ("One.", "Two.", "Three.", "Four."),
    tools: Sequence[Tool] = (),
    interactions: Mapping[str, Interaction] | None = None,
    is_deterministic: bool = True,
    **fields: Any,
) -> None:
    """Check that a scheduler keeps its contract with the framework, and report all problems.

    The suite runs whole episodes. It checks that they end, even at a limit of one turn, after a cut completion and after an
    engine failure; that only sampled tokens are trained; that concurrent episodes do not affect each other; that their state
    is freed; and that the event loop is not blocked.

    Args:
        scheduler: The scheduler to check.
        says: The model's turns; the last one is repeated.
        tools: The tools of the run.
        interactions: Name -> interaction of the run.
        is_deterministic: Whether equal episodes give equal results.
        fields: Further arguments of `polyturn.testing.episodes.task`: prompt, ground_truth, interaction, ….

    Raises:
        ContractError: the scheduler breaks its contract; the message lists the problems.
    """
    row = task(**{"data_source": "check", **fields})
    common: dict[str, Any] = {
        "tools": tools,
        "interactions": interactions,
        "scheduler": scheduler,
        "rewards": {"check": lambda trajectory: 0.0},
    }
    async with Findings(f"scheduler {type(scheduler).__name__}") as findings:
        context = scripted_context(list(says), limits=Limits(max_turns=MAX_TURNS), **common)
        alone = await _play(findings, context, row, id="alone")
        await _play(
            findings, scripted_context(list(says), limits=Limits(max_turns=1), **common), row, id="short", max_turns=1,
            where=" of one turn",
        )  # fmt: skip
        cut = Limits(max_turns=MAX_TURNS, max_tokens_per_turn=1)
        await _play(
            findings, scripted_context(list(says), limits=cut, **common), row, id="cut", where=" with cut completions"
        )
        broken = scripted_context([*says[:1], EngineError("the engine is gone")], **common)
        await _play(findings, broken, row, id="broken", where=" whose engine fails", may_fail=True)
        if alone is None:
            findings.stop()
        assert alone is not None
        async with findings.calling("episodes side by side"):
            beside = await asyncio.gather(*(run_episode(context, row, id=f"side-{i}") for i in range(4)))
            if is_deterministic:
                _check_same(findings, alone, beside)
        findings.expect(
            context.num_live_interactions == 0 and not context.tools.live_ids,
            "tools or interactions of ended episodes are still alive; let `run` return instead of waiting forever",
        )


async def _play(
    findings: Findings,
    context: RolloutContext,
    row: Task,
    *,
    id: str,
    where: str = "",
    max_turns: int = MAX_TURNS,
    may_fail: bool = False,
) -> Trajectory | None:
    """Run one episode and check its trajectory."""
    trajectory: Trajectory | None = None
    async with findings.calling(f"an episode{where}"):
        trajectory = await run_episode(context, dataclasses.replace(row, id=id), id=id)
    if trajectory is None:
        return None
    findings.expect(may_fail or not trajectory.is_failed, f"an episode{where} failed: {trajectory.error}")
    findings.expect(
        len(trajectory.turns) <= max_turns,
        f"an episode{where} took {len(trajectory.turns)} turns, but {max_turns} are allowed; await episode.prepare() "
        "before each turn and end when it returns a reason",
    )
    for segment in trajectory.segments:
        findings.expect(
            not np.any(segment.loss_weights[~segment.sampled_mask]),
            f"an episode{where} has loss weights on tokens that the model did not sample",
        )
        sampled = [s for s in segment.spans if s.source is SpanSource.SAMPLED]
        findings.expect(
            all(s.turn >= 0 for s in sampled), f"an episode{where} has sampled tokens that do not belong to a turn"
        )
    return trajectory


def _check_same(findings: Findings, alone: Trajectory, beside: Sequence[Trajectory]) -> None:
    wanted = to_openai(alone.messages)
    different = next((to_openai(t.messages) for t in beside if to_openai(t.messages) != wanted), None)
    findings.expect(
        different is None,
        f"a concurrent episode differs: {different!r:.200} instead of {wanted!r:.200}; a scheduler is copied for each "
        "trajectory, but the values of its attributes are shared: keep state in attributes that `run` sets, or in turn.info",
    )
