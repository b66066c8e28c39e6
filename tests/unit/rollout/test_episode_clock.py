"""The time limit of an episode: on by default; it counts all waiting except for people, and earlier processes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.lifecycle import StopReason
from polyturn.rollout.limits import Limits
from polyturn.rollout.resources import Resources
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from support.parts import Says, virtual


def resources() -> Resources:
    return Resources(scripted_context([]), task(), id="e")


class Person(Says):
    """Takes its time."""

    def __init__(self, *, is_person: bool) -> None:
        super().__init__("And then?")
        self.asks_person = is_person

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(40)
        return self.answer


def test_run_has_a_time_limit_that_slow_calls_do_not_reach() -> None:
    config = load_config(RunConfig, None, ["model.path=tiny", "engine.kind=vllm"]).config
    limits, engine, rollout = config.rollout.limits, config.engine, config.rollout
    assert limits.timeout_s is not None
    assert limits.max_turns is not None
    assert not limits.counts_people
    slow_turn_s = engine.timeout_s + rollout.tools.timeout_s + rollout.interaction_timeout_s
    assert limits.max_turns * slow_turn_s < limits.timeout_s
    endless = load_config(RunConfig, None, ["model.path=tiny", "rollout.limits.timeout_s=null"]).config
    assert endless.rollout.limits.timeout_s is None


def test_server_for_agents_has_no_default_limit() -> None:
    pytest.importorskip("aiohttp")
    from polyturn.cli.serve_openai import UNTIMED

    wanted = ["model.path=tiny", "rollout.limits.timeout_s=7200"]
    assert load_config(RunConfig, None, wanted[:1], defaults=UNTIMED).config.rollout.limits.timeout_s is None
    assert load_config(RunConfig, None, wanted, defaults=UNTIMED).config.rollout.limits.timeout_s == 7200


@pytest.mark.parametrize(
    ("is_person", "counts_people", "reason"),
    [(True, False, StopReason.MAX_TURNS), (False, False, StopReason.TIMEOUT), (True, True, StopReason.TIMEOUT)],
)
@virtual
async def test_waiting_for_a_person_counts_only_if_configured(
    is_person: bool, counts_people: bool, reason: StopReason
) -> None:
    limits = Limits(timeout_s=30, max_turns=2, counts_people=counts_people)
    context = scripted_context(["one", "two"], interactions={"user": Person(is_person=is_person)}, limits=limits)
    trajectory = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert trajectory.stop_reason is reason


@virtual
async def test_paused_limit_goes_on_where_it_stood() -> None:
    clock, expired = resources(), []

    async def work(timeout: asyncio.Timeout) -> None:
        with clock.paused(), clock.paused():
            await asyncio.sleep(60)
        await asyncio.sleep(40)
        expired.append(timeout.expired())
        await asyncio.sleep(11)
        expired.append(True)

    with pytest.raises(TimeoutError):
        async with clock.within(50) as timeout:
            await work(timeout)
    assert expired == [False]


@virtual
async def test_seconds_of_an_earlier_process_count() -> None:
    clock = resources()
    clock.spent(elapsed_s=99.0, duration_s=99.0)
    assert clock.elapsed_s == clock.duration_s == 99.0
    with pytest.raises(TimeoutError):
        async with clock.within(100):
            await asyncio.sleep(2)


async def test_plain_run_that_never_returns_ends_with_the_limit() -> None:
    """A plain `run` spans the episode, so it has no deadline but the episode's."""
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
