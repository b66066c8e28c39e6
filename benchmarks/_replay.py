"""Replays a rollout with fixed lengths and waits on real servers, with the real pool, episodes and clock.

workload = Workload(tasks=8, group=4, slots=32)
workload.plans()["g3/1"]                              EpisodePlan(lengths=(180, 240, 95), waits=(58.1, 66.0))
await replay(workload, [VllmEngine(url, …)])          the seconds of the rollout

Lengths are drawn with Python's generator, whose sequence is the same in all Python versions.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.messages import Message
from polyturn.core.protocols import Engine
from polyturn.core.task import Task
from polyturn.engines.base import EngineWrapper
from polyturn.engines.pool import EnginePool
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import tiny_codec
from polyturn.tokens.parsers import HermesParser
from polyturn.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode: tokens of each turn, and seconds between them."""

    lengths: tuple[int, ...]
    waits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The lengths (tokens) and waits (seconds) of a rollout."""

    tasks: int
    group: int
    slots: int
    prompt_tokens: int = 100
    turns: int = 4
    """The mean number of turns; an episode has from 1 to twice as many."""
    turn_tokens: float = 300.0
    """The median length of a turn, in tokens."""
    task_sigma: float = 0.5
    """Standard deviation of the logarithm of lengths between tasks."""
    turn_sigma: float = 0.5
    """Standard deviation of the logarithm of lengths between the turns of one task."""
    tool_s: float = 0.5
    """The median wait between two turns, in seconds."""
    tool_sigma: float = 0.5
    observation_tokens: int = 20
    max_turn_tokens: int = 8192
    seed: int = 0

    def plans(self) -> dict[str, EpisodePlan]:
        """Return the plan of every episode, by its id."""
        rng, out = random.Random(self.seed), {}
        for task in range(self.tasks):
            median = self.turn_tokens * math.exp(rng.gauss(0, self.task_sigma))
            for member in range(self.group):
                turns = rng.randint(1, max(2 * self.turns - 1, 1))
                drawn = [round(median * math.exp(rng.gauss(0, self.turn_sigma))) for _ in range(turns)]
                lengths = [max(2, min(length, self.max_turn_tokens)) for length in drawn]
                waits = [self.tool_s * math.exp(rng.gauss(0, self.tool_sigma)) for _ in range(turns - 1)]
                out[f"g{task}/{member}"] = EpisodePlan(tuple(lengths), tuple(waits))
        return out


class _Planned(EngineWrapper):
    """A server that samples exactly as many tokens as the plan has."""

    def __init__(self, engine: Engine, plans: Mapping[str, EpisodePlan]) -> None:
        super().__init__(engine)
        self._plans = plans

    async def generate(self, request: GenerateRequest) -> Completion:
        length = self._plans[request.session_id].lengths[int(request.request_id.rpartition("/")[2])]
        sampling = replace(request.sampling, max_tokens=length, stop_token_ids=())
        completion = await self.engine.generate(replace(request, sampling=sampling))
        return replace(completion, finish_reason=FinishReason.STOP)


@keeps_deadlines
class _Waits(MultiTurnScheduler):
    """The environment of a workload, which waits and then answers with a fixed text."""

    shared = True

    def __init__(self, plans: Mapping[str, EpisodePlan], text: str) -> None:
        self._plans, self._text = plans, text

    async def step(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Answer a turn after its wait."""
        number, waits = len(episode.turns) - 1, self._plans[episode.id].waits
        if number >= len(waits):
            return Reply(is_done=True)
        await asyncio.sleep(waits[number])
        return Reply(messages=(Message(role="user", content=self._text),))


async def replay(workload: Workload, engines: Sequence[Engine]) -> float:
    """Run `workload` on `engines` and return the seconds from its start to its last answer."""
    plans = workload.plans()
    context = RolloutContext(
        engine=EnginePool([_Planned(engine, plans) for engine in engines], slots=workload.slots),
        codec=tiny_codec(),
        parser=HermesParser(),
        tools=Toolbox([]),
        interactions={},
        rewarder=RewardRouter({}),
        scheduler=_Waits(plans, "7" * workload.observation_tokens),
        limits=Limits(max_turns=None, max_tokens_per_turn=None),
        sampling=SamplingParams(max_tokens=1_000_000),
        sanity_every=0,
    )
    prompt = (Message(role="user", content="7" * workload.prompt_tokens),)
    specs = [
        GroupSpec(id=f"g{i}", task=Task(id=f"task{i}", prompt=prompt), size=workload.group) for i in range(workload.tasks)
    ]
    began = time.perf_counter()
    await RolloutPool(context, max_concurrent=len(plans), max_failed_share=0.0).run(specs)
    return time.perf_counter() - began
