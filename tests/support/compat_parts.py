"""Schedulers of ms-swift and agent loops of verl, made of plain functions, for the tests of their adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from polyturn.compat.swift.adapter import SwiftScheduler
from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.compat.verl.agent_loop import AgentLoopBase, AgentLoopOutput
from polyturn.compat.verl.agent_scheduler import AgentLoopScheduler
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task


def again(request: Any, choice: Any, turn: int) -> dict[str, Any]:
    """Ask the model again: a step of ms-swift."""
    request.messages.append({"role": "user", "content": f"Again {turn}."})
    return {"infer_request": request}


def stepping(step: Callable[[Any, Any, int], Any] = again) -> type[MultiTurnScheduler]:
    """Return a scheduler of ms-swift with this step."""

    class Steps(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            return step(infer_request, response_choice, current_turn)

    return Steps


def running(run: Callable[[Any, Any, Any], Awaitable[Any]]) -> type[RolloutScheduler]:
    """Return a scheduler of ms-swift with a `run` of its own, which gets the engine, the request and its config."""

    class Runs(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            return await run(self.infer_engine, infer_request, request_config)

    return Runs


async def play_swift(
    scheduler: Any,
    says: Any,
    *,
    max_turns: int | None = 3,
    limits: Limits | None = None,
    row: Any = None,
    options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Trajectory:
    """Play an episode with a scheduler of ms-swift, or with the registered one of a name; fields are those of the task."""
    driver = SwiftScheduler(scheduler, max_turns=max_turns, **(options or {}))
    context = scripted_context(says, scheduler=driver, rewards={"openai/gsm8k": lambda trajectory: 1.0}, limits=limits)
    return await run_episode(context, row or task(**fields), id="g0/0")


def sampled(trajectory: Trajectory) -> list[tuple[list[int], list[float]]]:
    """Return the sampled ids of each turn with their weights."""
    spans = [[s for s in map(trajectory.span, t.spans) if s.source is SpanSource.SAMPLED] for t in trajectory.turns]
    return [
        ([i for s in of_turn for i in s.ids.tolist()], [w for s in of_turn for w in s.loss_weights.tolist()])
        for of_turn in spans
    ]


def looping(run: Callable[..., Awaitable[Any]]) -> type[AgentLoopBase]:
    """Return an agent loop of verl with this `run`, which gets the loop and the sampling parameters."""

    class Loops(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            return await run(self, sampling_params, **kwargs)

    return Loops


async def prompt_of(loop: AgentLoopBase, kwargs: dict[str, Any]) -> list[int]:
    """Return the ids of a row's prompt, as loops render it."""
    return await loop.apply_chat_template(list(kwargs["raw_prompt"]))


async def say(loop: AgentLoopBase, ids: list[int], sampling_params: dict[str, Any]) -> Any:
    """Ask the model for a turn."""
    return await loop.server_manager.generate(request_id="r", prompt_ids=ids, sampling_params=sampling_params)


def output(prompt: list[int], *parts: tuple[list[int], int], **fields: Any) -> AgentLoopOutput:
    """Return an output of parts, each with 1 where it was sampled and 0 elsewhere."""
    ids = [i for part, _ in parts for i in part]
    mask = [is_sampled for part, is_sampled in parts for _ in part]
    return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask, **fields)


async def play_loop(
    loop: Any, says: Any, *, row: Any = None, config: Any = None, limits: Limits | None = None, **parts: Any
) -> Trajectory:
    """Play an episode with an agent loop of verl."""
    scheduler = loop if isinstance(loop, AgentLoopScheduler) else AgentLoopScheduler(loop, config=config)
    context = scripted_context(
        says, scheduler=scheduler, rewards={"openai/gsm8k": lambda trajectory: 1.0}, limits=limits, **parts
    )
    return await run_episode(context, row or task(), id="e")
