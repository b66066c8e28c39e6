"""RolloutService: takes requests and returns the outputs of their episodes, in the same order.

    {"messages": […], "data_dict": {"solution": "4"}, "uuid": "a"}  ->  [{"response": {…}, "response_token_ids": …}]

A failing episode becomes a reply with an `error` and does not fail its batch. When the service stops, running episodes get
some time to finish; the rest are cancelled, and their replies have an `error`. The trainer computes the rewards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from polyturn.core.errors import ConfigError, DataError, PolyturnError, did_you_mean, one_line
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.infra.expected import sentences
from polyturn.rewards.router import RewardRef, RewardRouter
from polyturn.rollout.calls import AsSchedulerError
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.body import Body
from polyturn.serving.outputs import rollout_outputs
from polyturn.serving.requests import task_of
from polyturn.serving.rollout_protocol import RequestConfig

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode

logger = logging.getLogger(__name__)

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")
"""Settings of a request that replace the settings of the run."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"repetition_penalty": (1.0,), "min_p": (0.0,), "top_logprobs": (0, 1)}
"""Unsupported setting -> values that are accepted, like its default, because they change nothing."""
_PROBE_TOKENS = 8


class RequestSettings(Body):
    """The supported settings of a request.

    `logprobs` and `return_details` change nothing, because every reply has ids and logprobs.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    logprobs: bool = False
    return_details: bool = False


class RolloutService:
    """Runs the episodes of requests concurrently."""

    def __init__(self, context: RolloutContext, *, max_concurrent: int = 256, deadline_s: float | None = None) -> None:
        """Create a service for a context's scheduler.

        Args:
            context: The rollout context; its rewarder is replaced by one that returns 0.
            max_concurrent: Largest number of live episodes over all requests.
            deadline_s: Seconds after which an unfinished episode gets a reply with an error.
        """
        context.rewarder = unscored()
        self.context = context
        self.version = 0
        self.is_stopping = False
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._live: set[asyncio.Task[Trajectory]] = set()
        self._numbers = itertools.count()

    @property
    def num_live(self) -> int:
        """Number of episodes that run or wait for a slot."""
        return len(self._live)

    async def infer(
        self, requests: Sequence[Any], config: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Run one episode per request and return the outputs: one per training sample, so a request may have several.

        Raises:
            ConfigError: a setting in `config` is unknown, unsupported or invalid.
        """
        options = self._parse_config(config or {})
        limits = [t for t in (timeout_s, self._deadline_s) if t is not None]
        deadline = min(limits) if limits else None
        replies = [asyncio.create_task(self._reply(request, options, deadline)) for request in requests]
        try:
            return [output for reply in replies for output in await reply]
        finally:
            for reply in replies:
                reply.cancel()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let episodes finish for `grace_s` seconds, and cancel the rest."""
        self.is_stopping = True
        if self._live:
            logger.info("stopping: %d episodes have %g seconds to finish", len(self._live), grace_s)
            await asyncio.wait(set(self._live), timeout=grace_s)
        for task in self._live:
            task.cancel()

    async def update_weights(self, weights: Mapping[str, Any], *, version: int) -> None:
        """Serve these weights as `version`. Names and shapes are checked before any weight changes."""
        await self.context.engine.update_weights(version, weights=weights)
        self.version = version

    async def drop_prefixes(self) -> None:
        """Clear the engine's prefix cache.

        Raises:
            EngineError: the engine is a server, which drops its prefixes only together with its weights.
        """
        await self.context.engine.update_weights(self.version)

    async def probe(self) -> dict[str, Any]:
        """Complete a fixed prompt greedily, with logprobs: two probes differ if the weights do."""
        name = f"probe-{next(self._numbers)}"
        prompt = np.asarray(self.context.codec.encode("polyturn looks at the weights"), np.int32)
        sampling = SamplingParams(max_tokens=_PROBE_TOKENS, temperature=0.0)
        completion = await self.context.engine.generate(
            GenerateRequest(request_id=name, session_id=name, prompt_ids=prompt, sampling=sampling)
        )
        await self.context.engine.end_session(name)
        probs = [] if completion.logprobs is None else completion.logprobs.tolist()
        return {"version": completion.policy_versions[-1][1], "token_ids": completion.token_ids.tolist(), "logprobs": probs}

    def _parse_config(self, config: Mapping[str, Any]) -> _RequestSampling:
        defaults = {f.name: f.default for f in dataclasses.fields(RequestConfig)}
        for name, value in config.items():
            if name not in defaults:
                raise ConfigError(f"request_config has no {name!r}.{did_you_mean(name, defaults)}")
            if name not in RequestSettings.model_fields and value not in (None, [], defaults[name], *_NEUTRAL.get(name, ())):
                raise ConfigError(
                    f"request_config.{name} is {value!r:.100}, which this server does not support; leave it out"
                )
        values = {name: config[name] for name in RequestSettings.model_fields if config.get(name) is not None}
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        try:
            settings = RequestSettings.model_validate(values)
        except ValidationError as problem:
            raise ConfigError(f"request_config.{sentences(problem)[0]}") from None
        return _RequestSampling(
            sampling=dataclasses.replace(self.context.sampling, **{n: values[n] for n in _SAMPLING if n in values}),
            stops=tuple(settings.stop),
            seed=secrets.randbits(48) if settings.seed is None else settings.seed,
        )

    async def _reply(self, request: Any, options: _RequestSampling, deadline_s: float | None) -> list[dict[str, Any]]:
        own_uuid = request.get("uuid") if isinstance(request, Mapping) else None
        name = str(own_uuid or f"chatcmpl-{uuid.uuid4().hex}")
        try:
            task = task_of(request, id=name, max_context=self.context.limits.max_context)
            with AsSchedulerError("the scheduler's check_task"):
                self.context.scheduler.check_task(task)
            running = asyncio.create_task(self._run(task, options))
        except (PolyturnError, TypeError) as problem:
            return [_failure(name, f"the request cannot be run: {one_line(problem)}")]
        self._live.add(running)
        try:
            done, _ = await asyncio.wait({running}, timeout=deadline_s)
            if not done:
                running.cancel()
                return [_failure(name, f"the episode did not finish within {deadline_s:g} seconds")]
            return _outputs(running.result(), name, options.stops)
        except asyncio.CancelledError:
            if self.is_stopping and running.cancelled():
                return [_failure(name, "the server was stopped before the episode finished")]
            raise
        except DataError as problem:  # the request names something that is not registered
            return [_failure(name, f"the request cannot be run: {one_line(problem)}")]
        except Exception as problem:
            logger.exception("the episode %s failed", name)
            return [_failure(name, one_line(problem))]
        finally:
            running.cancel()
            self._live.discard(running)

    async def _run(self, task: Task, options: _RequestSampling) -> Trajectory:
        def begin(episode: Episode) -> None:
            episode.sample_as(options.sampling, stops=options.stops)

        async with self._slots:
            name, seed = f"{task.id}/{next(self._numbers)}", derive_seed(options.seed, task.id, 0)
            return await run_episode(self.context, task, id=name, seed=seed, sampling=options.sampling, on_start=begin)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _RequestSampling:
    """The sampling settings of a request."""

    sampling: SamplingParams
    stops: tuple[str, ...]
    """Texts that end a turn; the reply's text leaves them out, its token ids include them."""
    seed: int


def unscored() -> RewardRouter:
    """Return a router that gives every trajectory a reward of 0, for a server whose client computes the rewards."""
    return RewardRouter({}, function=RewardRef(target=lambda trajectory: 0.0))


def _outputs(trajectory: Trajectory, name: str, stops: Sequence[str]) -> list[dict[str, Any]]:
    if not trajectory.turns:
        return [_failure(name, trajectory.error or f"the episode ended before its first turn: {trajectory.stop_reason}")]
    outputs = []
    for output in rollout_outputs(trajectory):
        output.response.id = name
        message = output.response.choices[0].message
        if ends := [at for stop in stops if isinstance(message.content, str) and (at := message.content.find(stop)) >= 0]:
            message.content = str(message.content)[: min(ends)]
            if output.messages:
                output.messages[-1] = {**output.messages[-1], "content": message.content}
        value = output.model_dump(mode="json")
        value["stop_reason"] = None if trajectory.stop_reason is None else trajectory.stop_reason.value
        value["error"] = trajectory.error
        if trajectory.error is not None:
            value["response_loss_mask"] = [[0] * len(ids) for ids in output.response_token_ids]
            value["rollout_logprobs"] = []
            value["rollout_infos"]["error"] = trajectory.error
        outputs.append(value)
    return outputs


def _failure(name: str, error: str) -> dict[str, Any]:
    """Return the reply for an episode without turns, in the same form as all others."""
    message = {"role": "assistant", "content": "", "tool_calls": None, "reasoning_content": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None, "token_ids": []}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "response": {"model": "polyturn", "choices": [choice], "usage": usage, "id": name, "object": "chat.completion"},
        "messages": None,
        "response_token_ids": [],
        "response_loss_mask": [],
        "rollout_logprobs": [],
        "rollout_infos": {"num_turns": 0, "error": error},
        "prompt_logprobs": None,
        "stop_reason": "error",
        "error": error,
    }
