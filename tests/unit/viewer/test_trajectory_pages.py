"""The data of a trajectory's page: never more tokens at once than it has room for, whatever their segments."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.core.trajectory import Segment, SpanSource
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.store.schema import StoredTrajectory, Trained
from polyturn.testing.episodes import scripted_context, task
from polyturn.viewer.tokens import TokenTexts, why
from polyturn.viewer.trajectory_page import trajectory_page


@pytest.mark.parametrize(
    ("segment", "start", "shown"),
    [(0, 0, [(0, 10), (0, 2), (0, 0)]), (1, 4, [(0, 6), (4, 6), (0, 0)]), (2, 0, [(0, 2), (0, 0), (0, 10)]),
     (0, 99, [(9, 1), (0, 10), (0, 1)]), (9, 9, [(0, 10), (0, 2), (0, 0)])],
)  # fmt: skip
def test_segments_share_the_room_of_a_page(tmp_path: Path, segment: int, start: int, shown: list[tuple[int, int]]):
    """Three segments of ten tokens, and room for twelve: the requested one comes first."""
    spec = GroupSpec(id="g", task=task("What is 2+2?", id="t"), size=1)
    (group,) = asyncio.run(RolloutPool(scripted_context(["four"])).run([spec]))
    (one,) = group.trajectories
    first = one.segments[0]
    span = dataclasses.replace(first.spans[0], ids=first.token_ids[:10])
    three = dataclasses.replace(one, turns=(), segments=tuple(dataclasses.replace(first, spans=(span,)) for _ in range(3)))
    record = StoredTrajectory(trajectory=three, group="g", step=1, split="train")
    page = trajectory_page(record, TokenTexts(tmp_path), segment=segment, start=start, page_size=12)
    assert [(part["start"], len(part["ids"])) for part in page["segments"]] == shown
    assert [part["num_tokens"] for part in page["segments"]] == [10, 10, 10]


@pytest.mark.parametrize("name", ["loss_weights", "sampled_mask"])
def test_page_computes_the_arrays_of_a_segment_few_times(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """A page of many segments or tokens takes time in proportion to them."""
    spec = GroupSpec(id="g", task=task("What is 2+2?", id="t"), size=1)
    (group,) = asyncio.run(RolloutPool(scripted_context(["four"])).run([spec]))
    (one,) = group.trajectories
    many = dataclasses.replace(one, turns=(), segments=one.segments * 20)
    array = np.full(many.num_sampled_tokens, 0.5, np.float32)
    record = StoredTrajectory(
        trajectory=many, group="g", step=1, split="train", trained=Trained(weights=array, advantages=array)
    )
    compute, num = getattr(Segment, name).fget, 0

    def counted(segment: Segment):
        nonlocal num
        num += 1
        return compute(segment)

    monkeypatch.setattr(Segment, name, property(counted))
    page = trajectory_page(record, TokenTexts(tmp_path))
    assert num <= 3 * len(many.segments)
    assert all(len(part["notes"]) == many.num_sampled_tokens // 20 for part in page["segments"])


class AsksAgain(MultiTurnScheduler):
    async def step(self, episode: Episode, turn: OpenTurn) -> str | None:
        return "Try again." if turn.index == 0 else None


@pytest.mark.parametrize(
    ("changes", "author"),
    [
        ({}, "the agent's own loop or the scheduler"),
        ({"timings": {"interaction": 0.1}}, "the interaction"),
        ({"scores": {"env": 1.0}}, "the environment"),
        ({"observation": ()}, "the chat template"),
    ],
)
async def test_observation_names_its_author(changes: dict[str, Any], author: str):
    trajectory = await run_episode(scripted_context(["a", "b"], scheduler=AsksAgain()), task(), id="e")
    first = dataclasses.replace(trajectory.turns[0], **changes)
    trajectory = dataclasses.replace(trajectory, turns=(first, *trajectory.turns[1:]))
    (segment,) = trajectory.segments
    span = next(span for span in segment.spans if span.source is SpanSource.OBSERVATION)
    assert f": {author}" in why(trajectory, segment, span, Trained(), split="train")
