"""A training loop on a simulated engine and a virtual clock: real slots, groups and updates; made-up lengths and times.

    result = run_simulated(LoopSettings(train=TrainOptions(steps=20, groups_per_step=4, max_staleness=1)), seed=3)
    result.staleness        {0: 51310, 1: 40922}      tokens by how stale they were when they were trained on

For the bound on staleness under any order of events, and for what over-sampling drops: thousands of steps take seconds, the
same on every machine.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyturn.algorithms.advantages import grpo
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.metrics import Mean
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.engines.update_gate import UpdateGate, UpdateMode
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import RolloutPool
from polyturn.testing.episodes import scripted_context, task
from polyturn.training.checkpoint import Checkpoints
from polyturn.training.loop import Trainer
from polyturn.training.observer_base import Observer
from polyturn.training.state import Data, EngineLink, LoopSettings, Saving
from polyturn.training.update import Update, UpdateSettings
from support.states import EmptyPolicy
from support.timed_engine import TimedEngine
from support.virtual_time import run_virtual

MAX_TOKENS = 400


@dataclass(slots=True, kw_only=True)
class SimulatedRun:
    """What a simulated run left."""

    staleness: Counter[int] = field(default_factory=Counter)
    """Tokens by their staleness when they were trained on."""
    mixed: int = 0
    """Completions whose tokens are of several versions."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    tasks: list[list[str]] = field(default_factory=list)
    """The tasks of each step, in order."""
    lengths: list[int] = field(default_factory=list)
    """The length of every trajectory that was trained on."""
    duration_s: float = 0.0
    """Virtual seconds."""


class CountingPolicy(EmptyPolicy):
    """Notes the versions of what it is trained on."""

    train_seconds = 0.0

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self.step = 0

    def forward_backward(self, samples: Sequence[TrainSample]) -> PassResult:
        for sample in samples:
            assert sample.versions is not None
            sampled = sample.versions[sample.versions >= 0]
            self._run.staleness.update((self.step - sampled).tolist())
            self._run.mixed += len(set(sampled.tolist())) > 1
        return PassResult({"loss/total": Mean(0.0)})


class _Observer(Observer):
    def __init__(self, run: SimulatedRun) -> None:
        self._run = run

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Any] | None = None,
    ) -> None:
        self._run.metrics.append(dict(metrics))
        self._run.tasks.append([g.task.id for g in groups])
        self._run.lengths += [t.num_sampled_tokens for g in groups for t in g.trajectories]


class _Channel:
    """New weights come after a random time, in which the trainer would have trained."""

    def __init__(self, gate: UpdateGate, policy: CountingPolicy, *, train_s: Callable[[], float]) -> None:
        self._gate = gate
        self._policy = policy
        self._train_s = train_s

    async def start(self, version: int) -> None:
        await self._gate.update_weights(version)

    async def publish(self, version: int) -> None:
        await asyncio.sleep(self._train_s())
        await self._gate.update_weights(version)
        self._policy.step = version


def run_simulated(
    settings: LoopSettings,
    *,
    seed: int = 0,
    num_tasks: int = 64,
    train_s: float = 2.0,
    update: UpdateMode = "in_flight",
    flat_share: float = 0.0,
    folder: Path | None = None,
    resume: bool = False,
) -> SimulatedRun:
    """Run the loop with completions of random lengths (long-tailed), and random training times.

    Args:
        settings: The loop's.
        seed: Of every random number.
        num_tasks: How many tasks there are.
        train_s: The mean time between the end of a step's rollout and its new weights.
        update: What new weights do to completions.
        flat_share: The share of tasks whose rewards are all equal.
        folder: Where checkpoints go; None keeps none.
        resume: Go on from the latest checkpoint there.
    """
    rng = random.Random(seed)
    run = SimulatedRun()

    prompts: dict[str, int] = {}

    def plan(request: GenerateRequest) -> int:
        own = random.Random(f"{seed}/{request.session_id}")
        there = len(request.prompt_ids) - prompts.setdefault(request.session_id, len(request.prompt_ids))
        return max(1, min(MAX_TOKENS, round(60 * own.lognormvariate(0.0, 0.8))) - there)

    async def reward(trajectory: Trajectory) -> float:
        is_flat = int(trajectory.task.id[1:]) < flat_share * num_tasks
        return 0.0 if is_flat else float(trajectory.id.endswith(("/0", "/2")))

    engine = TimedEngine(token_s=0.018, plan=plan)
    context = scripted_context(
        ["never asked"],
        rewards={"simulated": reward},
        limits=Limits(max_turns=1),
        sanity_every=0,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
    )
    gate = UpdateGate(engine, mode=update)
    context.engine = gate
    policy = CountingPolicy(run)

    async def main(path: Path) -> None:
        trainer = Trainer(
            settings,
            update=Update(policy, estimator=grpo, settings=UpdateSettings(train=settings.train)),
            engine=EngineLink(
                channel=_Channel(gate, policy, train_s=lambda: rng.expovariate(1 / train_s)), busy_s=lambda: engine.busy_s
            ),
            pool=RolloutPool(context, max_concurrent=1 << 16),
            data=Data([task(f"What is {i}?", id=f"t{i}", data_source="simulated") for i in range(num_tasks)]),
            saving=Saving(checkpoints=Checkpoints(path), export=lambda to: to.mkdir()),
            observer=_Observer(run),
        )
        if resume:
            latest = trainer.checkpoints.latest()
            assert latest is not None
            trainer.resume(latest)
            policy.step = trainer.state.step
        await trainer.run()
        run.duration_s = asyncio.get_running_loop().time()

    with tempfile.TemporaryDirectory() as temporary:
        run_virtual(main(folder or Path(temporary)))
    return run
