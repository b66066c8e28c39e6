"""An episode in another package's environment earns the rewards of the package for the same seed and actions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.benchmark import load_benchmark
from support.cases import needs

pytestmark = needs("gymnasium", "textarena", "reasoning_gym", extra="environments")

CASES = load_benchmark("_environment_cases").CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_each_player_earns_what_the_package_gives(case: Any) -> None:
    recorded = case.recorded()
    played = await case.played(recorded.actions)
    earned = {"seat 0" if agent == "assistant" else agent: reward for agent, reward in played.earned.items()}
    assert played.trajectory.error is None
    assert len(played.trajectory.turns) == len(recorded.actions)
    assert earned == pytest.approx(recorded.rewards)


def test_cases_are_of_three_packages_and_fifteen_environments() -> None:
    assert {case.package for case in CASES} == {"gymnasium", "textarena", "reasoning_gym"}
    assert len({case.name for case in CASES}) >= 15


async def test_episodes_side_by_side_draw_as_if_alone() -> None:
    games = [c for c in CASES if c.name in ("textarena:KuhnPoker-v0", "textarena:PigDice-v0", "textarena:Nim-v0")]
    recorded = [case.recorded() for case in games]
    played = await asyncio.gather(*(c.played(r.actions) for c, r in zip(games, recorded, strict=True)))
    assert [dict(p.earned) for p in played] == [r.rewards for r in recorded]
