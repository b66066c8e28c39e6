"""Simulation: a workload from a file, run by the real rollout pool, episodes and engine pool on simulated servers.

    workload = Workload.load("swe_like")                 a name of a shipped file, or the path of a YAML file
    result = simulate(workload, policy="longest_first")  seconds of wall clock; the same on every machine
    result.makespan_s, result.efficiency                 lower bound / makespan

Only lengths, waits and the clock are made up.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.messages import Message
from polyturn.core.protocols import Engine
from polyturn.core.task import Task
from polyturn.engines.base import EngineWrapper
from polyturn.engines.order import LongestFirst, OrderPolicy, make_policy
from polyturn.engines.pool import EnginePool
from polyturn.engines.predictor import WorkPredictor
from polyturn.engines.simulated import SimulatedEngine
from polyturn.engines.virtual_time import run_virtual
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import tiny_codec
from polyturn.testing.workload import EpisodePlan, Workload
from polyturn.tokens.parsers import HermesParser
from polyturn.tools.executor import ToolBox

ORACLE = "oracle"
"""The order that knows all lengths; not a policy of the pool, for none can know them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineTurn:
    """One turn on the timeline."""

    session: str
    replica: str
    asked_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Simulated:
    """The result of a simulated rollout."""

    workload: str
    policy: str
    replicas: int
    episodes: int = 0
    turns: int = 0
    makespan_s: float = 0.0
    lower_bound_s: float = 0.0
    idle_share: float = 0.0
    recomputed_tokens: int = 0
    """Prompt tokens that were computed although an earlier turn had them, and sequences put back."""
    latency_p50_s: float = 0.0
    latency_p99_s: float = 0.0
    num_lost: int = 0
    spans: list[TimelineTurn] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        """Return lower bound / makespan."""
        return self.lower_bound_s / self.makespan_s


@keeps_deadlines
class _Waits(MultiTurnScheduler):
    """The environment of a workload: waits, then says as much as the file says."""

    shared = True

    def __init__(self, plans: dict[str, EpisodePlan], text: str) -> None:
        self._plans, self._text = plans, text

    async def step(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Answer one turn after its wait."""
        number, waits = len(episode.turns) - 1, self._plans[episode.id].waits
        if number >= len(waits):
            return Reply(is_done=True)
        await asyncio.sleep(waits[number])
        return Reply(messages=(Message(role="user", content=self._text),))


class _Oracle(WorkPredictor):
    """Knows."""

    def __init__(self, plans: dict[str, EpisodePlan], token_s: float) -> None:
        super().__init__()
        self._plans, self._token_s = plans, token_s

    def remaining_s(self, request: GenerateRequest) -> float:
        turn, plan = int(request.request_id.rpartition("/")[2]), self._plans[request.session_id]
        return sum(plan.lengths[turn:]) * self._token_s + sum(plan.waits[turn:])


class _Watched(EngineWrapper):
    """A server that writes the timeline."""

    def __init__(self, engine: Engine, *, name: str, had: dict[str, int]) -> None:
        super().__init__(engine)
        self.began = 0.0
        """When the round began that is written."""
        self.spans: list[TimelineTurn] = []
        self.recomputed = 0
        self._name = name
        self._had = had
        """Tokens that each session had after its last turn, wherever that ran; shared by all servers."""

    async def generate(self, request: GenerateRequest) -> Completion:
        loop, session = asyncio.get_running_loop(), request.session_id
        asked = loop.time()
        completion = await self.engine.generate(request)
        span = TimelineTurn(session=session, replica=self._name, asked_s=asked - self.began, end_s=loop.time() - self.began)
        self.spans.append(span)
        had = self._had.get(session, 0)
        new = len(request.prompt_ids) - had
        self.recomputed += max(completion.info["prefilled_tokens"] - new - 1, 0) if had else 0
        self._had[session] = len(request.prompt_ids) + len(completion.token_ids)
        return completion

    async def end_session(self, session_id: str) -> None:
        self._had.pop(session_id, None)
        await self.engine.end_session(session_id)


class _Timed(EnginePool):
    """Measures each turn from its request to its answer, its time in the queue included."""

    latencies: list[float]

    async def generate(self, request: GenerateRequest) -> Completion:
        began = asyncio.get_running_loop().time()
        completion = await super().generate(request)
        self.latencies.append(asyncio.get_running_loop().time() - began)
        return completion


def simulate(
    workload: Workload,
    *,
    policy: str = "longest_first",
    replicas: int | None = None,
    rounds: int = 1,
    on_round: Callable[[int], None] | None = None,
) -> Simulated:
    """Run `workload` and return what it took.

    Args:
        workload: What is run.
        policy: A policy of the pool, or `ORACLE`.
        replicas: Number of servers; the workload's own by default.
        rounds: How often all of it is run, by the same pool; what is returned is of the last round.
        on_round: Called after each round with its number.

    Raises:
        ConfigError: there is no such policy.
    """
    replicas = replicas or workload.replicas
    letter = int(tiny_codec().encode("a")[0])

    async def run() -> Simulated:
        plans = workload.plans()
        servers = [
            SimulatedEngine(
                workload.speed,
                plan=functools.partial(length_of, plans),
                token_id=letter,
                says_stop=False,
                name=f"server {i}",
            )
            for i in range(replicas)
        ]
        result = await run_on(workload, plans, servers, policy=policy, rounds=rounds, on_round=on_round)
        result.idle_share = 1 - sum(server.busy_s for server in servers) / (asyncio.get_running_loop().time() * replicas)
        return result

    return run_virtual(run())


async def run_on(
    workload: Workload,
    plans: dict[str, EpisodePlan],
    engines: Sequence[Engine],
    *,
    policy: str,
    rounds: int,
    on_round: Callable[[int], None] | None = None,
) -> Simulated:
    """Run `workload` on engines that keep to its `plans`, on the clock of the running loop; see `simulate`."""
    speed, codec = workload.speed, tiny_codec()
    order: OrderPolicy = LongestFirst() if policy == ORACLE else make_policy(policy)
    if policy == ORACLE:
        order.predictor = _Oracle(plans, speed.tau(speed.slots))
    had: dict[str, int] = {}
    watched = [_Watched(engine, name=f"server {i}", had=had) for i, engine in enumerate(engines)]
    result = Simulated(workload=workload.name, policy=policy, replicas=len(watched), episodes=len(plans))
    pool = _Timed(watched, policy=order, slots=workload.slots)
    context = RolloutContext(
        engine=pool,
        codec=codec,
        parser=HermesParser(),
        tools=ToolBox([]),
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
    rollouts, loop = RolloutPool(context, max_concurrent=len(plans), max_failed_share=0.0), asyncio.get_running_loop()
    for number in range(rounds):
        pool.latencies = []
        for one in watched:
            one.began, one.spans, one.recomputed = loop.time(), [], 0
        await rollouts.run(specs)
        if on_round is not None:
            on_round(number)
    result.spans = sorted((span for one in watched for span in one.spans), key=lambda span: span.end_s)
    result.makespan_s = result.spans[-1].end_s
    result.lower_bound_s = workload.lower_bound_s(replicas=len(watched))
    result.recomputed_tokens = sum(one.recomputed for one in watched)
    result.turns, result.num_lost = len(pool.latencies), pool.num_lost
    result.latency_p50_s, result.latency_p99_s = quantile(pool.latencies, 0.5), quantile(pool.latencies, 0.99)
    return result


def length_of(plans: Mapping[str, EpisodePlan], request: GenerateRequest) -> int:
    """Return how many tokens the plans have for a request's turn."""
    return plans[request.session_id].lengths[int(request.request_id.rpartition("/")[2])]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]


def draw(result: Simulated, path: Path) -> None:
    """Draw how many turns each server works on over time, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 1.3 * result.replicas), layout="constrained")
    names = sorted({span.replica for span in result.spans}, key=lambda name: int(name.split()[-1]))
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for name, axis in zip(names, axes, strict=True):
        mine = [span for span in result.spans if span.replica == name]
        events = sorted([(span.asked_s, 1) for span in mine] + [(span.end_s, -1) for span in mine])
        times, loads, load = [0.0], [0], 0
        for at, change in events:
            load += change
            times.append(at)
            loads.append(load)
        axis.fill_between(times, loads, step="post", alpha=0.7, linewidth=0)
        axis.set_ylabel(name)
        axis.axvline(result.lower_bound_s, color="black", linestyle=":", linewidth=1)
    axes[0].set_title(
        f"{result.workload}, {result.policy}: {result.makespan_s:.1f} s, efficiency {result.efficiency:.3f} "
        "(dotted: lower bound; height: turns at work)"
    )
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=110)
