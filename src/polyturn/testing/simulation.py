"""Simulation: a workload from a file, run by the real rollout pool, episodes and engine pool on simulated servers.

    workload = Workload.load("swe_like")                 a name of a shipped file, or the path of a YAML file
    result = simulate(workload, policy="longest_first")  seconds of wall clock; the same on every machine
    result.makespan_s, result.efficiency                 lower bound / makespan

Only lengths, waits and the clock are made up. Lengths are drawn from the file's seed with Python's own generator, whose
sequence is fixed by the language.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.engines.order import LongestFirst, OrderPolicy, make_policy
from polyturn.engines.pool import EnginePool
from polyturn.engines.predictor import WorkPredictor
from polyturn.engines.simulated import SimulatedEngine, Speed
from polyturn.engines.virtual_time import run_virtual
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.group import GroupSpec
from polyturn.rollout.limits import Limits
from polyturn.rollout.live_turn import LiveTurn
from polyturn.rollout.pool import RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import tiny_codec
from polyturn.tokens.parsers import HermesParser
from polyturn.tools.executor import ToolBox

ORACLE = "oracle"
"""The order that knows all lengths; not a policy of the pool, for none can know them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a workload file says; every length is a number of tokens and every wait a number of seconds."""

    name: str
    tasks: int
    group: int
    replicas: int
    slots: int
    kv_tokens: int = 1_000_000
    step_s: float = 0.008
    per_sequence_s: float = 0.00012
    prefill_token_s: float = 0.00002
    prompt_tokens: int = 100
    turns: int = 4
    """The mean number of turns; an episode has from one to twice as many."""
    turn_tokens: float = 300.0
    """The median length of a turn."""
    task_sigma: float = 0.5
    """Spread (of the logarithm) of lengths between tasks."""
    turn_sigma: float = 0.5
    """Spread (of the logarithm) of lengths between the turns of one task."""
    tool_s: float = 0.5
    """The median wait between two turns."""
    tool_sigma: float = 0.5
    observation_tokens: int = 20
    max_turn_tokens: int = 8192
    giant: tuple[int, int] | None = None
    """(turns, tokens of each) of the very last episode, which dwarfs the others."""
    seed: int = 0

    @classmethod
    def load(cls, name: str | Path) -> Workload:
        """Read a shipped workload by name, or a YAML file.

        Raises:
            ConfigError: there is no such workload, or it has keys that no workload has.
        """
        path = Path(name)
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise ConfigError(f"there is no workload file {path}")
            text = path.read_text()
        else:
            if str(name) not in shipped():
                raise UnknownNameError(f"there is no workload {str(name)!r}.{did_you_mean(str(name), shipped())}")
            text = files("polyturn.testing").joinpath("workloads", f"{name}.yaml").read_text()
        values: dict[str, Any] = yaml.safe_load(text)
        known = [one.name for one in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"workload {name}: there is no {key!r}.{did_you_mean(key, known)}")
        if values.get("giant") is not None:
            values["giant"] = tuple(values["giant"])
        return cls(**{"name": path.stem, **values})

    @property
    def speed(self) -> Speed:
        """One of its servers."""
        return Speed(
            step_s=self.step_s,
            per_sequence_s=self.per_sequence_s,
            prefill_token_s=self.prefill_token_s,
            slots=self.slots,
            kv_tokens=self.kv_tokens,
        )

    def plans(self) -> dict[str, Plan]:
        """Return the plan of every episode, by its id."""
        rng, out = random.Random(self.seed), {}
        for task in range(self.tasks):
            factor = math.exp(rng.gauss(0, self.task_sigma))
            for member in range(self.group):
                turns = rng.randint(1, max(2 * self.turns - 1, 1))
                lengths = [
                    max(
                        2,
                        min(
                            round(self.turn_tokens * factor * math.exp(rng.gauss(0, self.turn_sigma))), self.max_turn_tokens
                        ),
                    )
                    for _ in range(turns)
                ]
                waits = [self.tool_s * math.exp(rng.gauss(0, self.tool_sigma)) for _ in range(turns - 1)]
                out[f"g{task}/{member}"] = Plan(tuple(lengths), tuple(waits))
        if self.giant is not None:
            turns, tokens = self.giant
            out[f"g{self.tasks - 1}/{self.group - 1}"] = Plan((tokens,) * turns, (self.tool_s,) * (turns - 1))
        return out

    def lower_bound_s(self, *, replicas: int) -> float:
        """Return max(the longest episode alone, all tokens at the best rate): nothing can be faster.

        Alone, an episode costs tau(1) a token and its waits. The best rate is min over b of tau(b) / b, b capped by
        episodes, slots and KV, on each of `replicas` servers.
        """
        plans, speed = self.plans(), self.speed
        alone = max(speed.tau(1) * sum(plan.lengths) + sum(plan.waits) for plan in plans.values())
        batch = min(len(plans), self.slots, self.kv_tokens // (self.prompt_tokens + 1))
        total = sum(sum(plan.lengths) for plan in plans.values())
        return max(alone, total * speed.best_token_s(batch) / replicas)


@dataclass(frozen=True, slots=True)
class Plan:
    """One episode."""

    lengths: tuple[int, ...]
    waits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One turn on the timeline."""

    session: str
    replica: str
    asked_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Simulated:
    """What a simulated rollout took."""

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
    spans: list[Span] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        """Return lower bound / makespan."""
        return self.lower_bound_s / self.makespan_s


class _Waits(MultiTurnScheduler):
    """The environment of a workload: waits, then says as much as the file says."""

    shared = True

    def __init__(self, plans: dict[str, Plan], text: str) -> None:
        self._plans, self._text = plans, text

    async def step(self, episode: Episode, turn: LiveTurn) -> Reply:
        """Answer one turn after its wait."""
        number, waits = len(episode.turns) - 1, self._plans[episode.id].waits
        if number >= len(waits):
            return Reply(is_done=True)
        await asyncio.sleep(waits[number])
        return Reply(messages=(Message(role="user", content=self._text),))


class _Oracle(WorkPredictor):
    """Knows."""

    def __init__(self, plans: dict[str, Plan], token_s: float) -> None:
        super().__init__()
        self._plans, self._token_s = plans, token_s

    def remaining_s(self, request: GenerateRequest) -> float:
        turn, plan = int(request.request_id.rpartition("/")[2]), self._plans[request.session_id]
        return sum(plan.lengths[turn:]) * self._token_s + sum(plan.waits[turn:])


class _Watched(SimulatedEngine):
    """Writes the timeline."""

    spans: list[Span]
    context_had: dict[str, int]
    recomputed = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        loop = asyncio.get_running_loop()
        began = loop.time()
        completion = await super().generate(request)
        self.spans.append(Span(session=request.session_id, replica=self.name, asked_s=began, end_s=loop.time()))
        had = self.context_had.get(request.session_id, 0)
        new = len(request.prompt_ids) - had
        self.recomputed += max(completion.info["prefilled_tokens"] - new - 1, 0) if had else 0
        self.context_had[request.session_id] = len(request.prompt_ids) + len(completion.token_ids)
        return completion


class _Timed(EnginePool):
    """Measures each turn from its request to its answer, its time in the queue included."""

    latencies: list[float]

    async def generate(self, request: GenerateRequest) -> Completion:
        began = asyncio.get_running_loop().time()
        completion = await super().generate(request)
        self.latencies.append(asyncio.get_running_loop().time() - began)
        return completion


def shipped() -> list[str]:
    """Return the names of the workloads that come with the package."""
    folder = files("polyturn.testing").joinpath("workloads")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def simulate(workload: Workload, *, policy: str = "longest_first", replicas: int | None = None) -> Simulated:
    """Run `workload` and return what it took.

    Raises:
        ConfigError: there is no such policy.
    """
    return run_virtual(_run(workload, policy=policy, replicas=replicas or workload.replicas))


async def _run(workload: Workload, *, policy: str, replicas: int) -> Simulated:
    plans, speed, codec = workload.plans(), workload.speed, tiny_codec()
    order: OrderPolicy = LongestFirst() if policy == ORACLE else make_policy(policy)
    if policy == ORACLE:
        order.predictor = _Oracle(plans, speed.tau(speed.slots))

    def length(request: GenerateRequest) -> int:
        return plans[request.session_id].lengths[int(request.request_id.rpartition("/")[2])]

    letter = int(codec.encode("a")[0])
    engines = [_Watched(speed, plan=length, token_id=letter, name=f"server {i}") for i in range(replicas)]
    result = Simulated(workload=workload.name, policy=policy, replicas=replicas, episodes=len(plans))
    had: dict[str, int] = {}
    for engine in engines:
        engine.spans, engine.context_had = result.spans, had
    pool = _Timed(engines, policy=order, slots=workload.slots)
    pool.latencies = []
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
    await RolloutPool(context, max_concurrent=len(plans), max_failed_share=0.0).run(specs)
    result.makespan_s = max(span.end_s for span in result.spans)
    result.lower_bound_s = workload.lower_bound_s(replicas=replicas)
    result.idle_share = 1 - sum(engine.busy_s for engine in engines) / (result.makespan_s * replicas)
    result.recomputed_tokens = sum(engine.recomputed for engine in engines)
    result.turns, result.num_lost = len(pool.latencies), pool.num_lost
    result.latency_p50_s, result.latency_p99_s = quantile(pool.latencies, 0.5), quantile(pool.latencies, 0.99)
    return result


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
