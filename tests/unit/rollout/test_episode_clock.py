"""The time limit of an episode: on by default; it counts all that is waited for but people, and earlier processes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.lifecycle import StopReason
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.resources import Resources
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task


def resources() -> Resources:
    return Resources(scripted_context([]), task(), id="e")


class Person(BaseInteraction):
    """Takes its time."""

    def __init__(self, *, is_person: bool) -> None:
        super().__init__({})
        self.asks_person = is_person

    async def generate_response(
        self, instance_id: str, messages: Any, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        await asyncio.sleep(1.2)
        return False, "And then?", 0.0, {}


async def stop_of(limits: Limits, *, is_person: bool) -> StopReason:
    context = scripted_context(["one", "two"], interactions={"user": Person(is_person=is_person)}, limits=limits)
    return (await run_episode(context, task(interaction="user", data_source=None), id="e")).stop_reason


def test_a_run_has_a_time_limit_that_slow_calls_do_not_reach_and_people_do_not_count_for():
    config = load_config(RunConfig, None, ["model.path=tiny", "engine.kind=vllm"]).config
    limits, engine, rollout = config.rollout.limits, config.engine, config.rollout
    assert limits.timeout_s is not None and not limits.counts_people and limits.max_turns is not None
    slow_turn_s = engine.timeout_s + rollout.tools.timeout_s + rollout.interaction_timeout_s
    assert limits.max_turns * slow_turn_s < limits.timeout_s
    endless = load_config(RunConfig, None, ["model.path=tiny", "rollout.limits.timeout_s=null"]).config
    assert endless.rollout.limits.timeout_s is None


async def test_a_person_is_left_their_time_and_a_program_is_not():
    short = Limits(timeout_s=1.0, max_turns=2)
    assert await stop_of(short, is_person=True) is StopReason.MAX_TURNS
    assert await stop_of(short, is_person=False) is StopReason.TIMEOUT


async def test_a_person_counts_where_the_run_says_so():
    assert await stop_of(Limits(timeout_s=1.0, max_turns=2, counts_people=True), is_person=True) is StopReason.TIMEOUT


async def test_the_limit_goes_on_where_it_stood_when_the_person_has_answered():
    clock, reached = resources(), []

    async def waits() -> None:
        async with clock.within(0.5) as timeout:
            with clock.paused(), clock.paused():
                await asyncio.sleep(0.6)
            reached.append(not timeout.expired())
            await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        await waits()
    assert reached == [True]


async def test_the_seconds_of_an_earlier_process_count():
    clock = resources()
    clock.spent(elapsed_s=99.0, duration_s=99.0)
    with pytest.raises(TimeoutError):
        async with clock.within(99.05):
            await asyncio.sleep(3600)


async def test_a_plain_run_that_never_returns_ends_with_the_limit():
    """Every other method has a deadline of its own; a plain `run` spans the episode and has the episode's."""
    gate = threading.Event()

    class Hangs(MultiTurnScheduler):
        def run(self, episode: Any) -> Any:
            gate.wait()

    try:
        context = scripted_context(["one"], scheduler=Hangs(), limits=Limits(timeout_s=0.1))
        trajectory = await run_episode(context, task(), id="e")
    finally:
        gate.set()
    assert trajectory.stop_reason is StopReason.TIMEOUT


def test_a_server_for_agents_has_no_limit_that_nobody_asked_for():
    """Who asks it may be a person; silence ends their episode."""
    pytest.importorskip("aiohttp")
    from polyturn.cli.serve_openai import UNTIMED

    asked = ["model.path=tiny", "rollout.limits.timeout_s=7200"]
    assert load_config(RunConfig, None, asked[:1], defaults=UNTIMED).config.rollout.limits.timeout_s is None
    assert load_config(RunConfig, None, asked, defaults=UNTIMED).config.rollout.limits.timeout_s == 7200
