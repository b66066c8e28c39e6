"""A workload on real servers, in real time: what `polyturn simulate` says of it is held to this.

await replay(workload, [VllmEngine(url, …)])         its makespan, as `simulate` returns it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine
from polyturn.engines.base import EngineWrapper
from polyturn.testing.simulation import Simulated, length_of, run_on
from polyturn.testing.workload import EpisodePlan, Workload


class Planned(EngineWrapper):
    """A real server that says as much as the plan does, whatever it is."""

    def __init__(self, engine: Engine, plans: Mapping[str, EpisodePlan]) -> None:
        super().__init__(engine)
        self._plans = plans

    async def generate(self, request: GenerateRequest) -> Completion:
        sampling = replace(request.sampling, max_tokens=length_of(self._plans, request), stop_token_ids=())
        completion = await self.engine.generate(replace(request, sampling=sampling))
        return replace(completion, finish_reason=FinishReason.STOP)


async def replay(
    workload: Workload, engines: Sequence[Engine], *, policy: str = "longest_first", rounds: int = 1
) -> Simulated:
    """Run `workload` on `engines`, which may be real servers, on the clock of the running loop; see `simulate`.

    The servers must sample as many tokens as they are asked for: what they say does not matter, how long it is does.
    """
    plans = workload.plans()
    return await run_on(workload, plans, [Planned(engine, plans) for engine in engines], policy=policy, rounds=rounds)
