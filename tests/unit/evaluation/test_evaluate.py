"""An evaluation is a rollout of small groups, with its own sampling and limits."""

from __future__ import annotations

from typing import Any

from polyturn.core.errors import RolloutError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.evaluation.evaluate import EvalSet, evaluate
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import RolloutPool
from polyturn.testing.episodes import scripted_context, task
from support.refusals import refuses_later

TASKS = [task(id=f"t{i}", interaction="gsm8k") for i in range(20)]


def eval_set(**fields: Any) -> EvalSet:
    return EvalSet(**{"name": "greedy", "tasks": TASKS, "sampling": SamplingParams(temperature=0, max_tokens=99), **fields})


async def test_each_task_runs_once_with_the_sampling_of_the_set():
    asked: list[GenerateRequest] = []

    def says(request: GenerateRequest) -> str:
        asked.append(request)
        return "#### 5"

    context = scripted_context(
        says, interactions={"gsm8k": Gsm8kInteraction({})}, limits=Limits(max_turns=3, max_tokens_per_turn=50)
    )
    found = await evaluate(RolloutPool(context), eval_set(max_turns=2), seed=7)
    assert [g.task.id for g in found.groups] == [t.id for t in TASKS]
    assert [t.id for t in found.groups[0].trajectories] == ["eval-greedy-0/0"]
    assert {(r.sampling.temperature, r.sampling.max_tokens) for r in asked} == {(0, 50)}
    assert found.report.mean_turns == 2 and context.limits.max_turns == 3, "the run's own limits stay as they are"


async def test_limit_takes_the_first_tasks():
    told: list[str] = []
    context = scripted_context(["#### 4"], interactions={"gsm8k": Gsm8kInteraction({})})
    found = await evaluate(RolloutPool(context), eval_set(), limit=3, on_group=lambda g: told.append(g.task.id))
    assert sorted(told) == ["t0", "t1", "t2"] and found.report.num_trajectories == 3 and found.report.success == 1


async def test_samples_of_a_task_have_seeds_of_their_own():
    seeds: list[int | None] = []

    def says(request: GenerateRequest) -> str:
        seeds.append(request.sampling.seed)
        return "#### 4"

    context = scripted_context(says, interactions={"gsm8k": Gsm8kInteraction({})})
    found = await evaluate(RolloutPool(context), eval_set(num_samples=4), limit=2)
    assert [[t.id for t in g.trajectories] for g in found.groups] == [
        [f"eval-greedy-{i}/{member}" for member in range(4)] for i in range(2)
    ]
    assert found.report.num_trajectories == 8 and len(set(seeds)) == 8


async def test_seeds_depend_on_seed_and_task_alone():
    async def seeds(seed: int) -> dict[str, int | None]:
        found: dict[str, int | None] = {}

        def says(request: GenerateRequest) -> str:
            found[request.session_id] = request.sampling.seed
            return "#### 4"

        context = scripted_context(says, interactions={"gsm8k": Gsm8kInteraction({})})
        await evaluate(RolloutPool(context), eval_set(), seed=seed)
        return found

    assert await seeds(1) == await seeds(1) != await seeds(2)


async def test_evaluation_fails_above_the_share_of_failures():
    def says(request: GenerateRequest) -> Any:
        return (
            OSError("gone") if request.session_id in ("eval-greedy-1/0", "eval-greedy-2/0", "eval-greedy-3/0") else "#### 4"
        )

    context = scripted_context(says, interactions={"gsm8k": Gsm8kInteraction({})})
    found = await evaluate(RolloutPool(context, max_failed_share=0.2), eval_set())
    assert found.report.failed == 0.15
    await refuses_later(lambda: evaluate(RolloutPool(context), eval_set()), RolloutError, "3 times: EngineError")
