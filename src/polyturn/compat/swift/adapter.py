"""SwiftScheduler: runs a scheduler written for ms-swift as the scheduler of native episodes.

    rollout: {scheduler: mine, …}        a name that a plug-in registered in `multi_turns`
    rollout: {scheduler: "mine.py:Mine"} a class in a file

The user's object controls the episode. Every generation goes through `EpisodeEngine`, so limits, errors, recording and token
ids are native. Its `run` returns outputs, which determine the loss weights (`turn_weights.py`) and the input of reward
functions. A turn that is in none of the outputs has loss weight 0.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.compat.swift import turn_weights
from polyturn.compat.swift.base import EngineOver, RolloutScheduler, SchedulerEngine
from polyturn.compat.swift.engine import EpisodeEngine
from polyturn.compat.swift.gym_env import context_managers, envs
from polyturn.compat.swift.schedulers import GYMScheduler, MathTipsScheduler, ThinkingModelTipsScheduler, multi_turns
from polyturn.compat.swift.shapes import overrides_batches, refuse_groups
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, DataError, PolyturnError, SchedulerError, one_line
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import Task
from polyturn.infra.aio import in_own_loop
from polyturn.infra.plugin_shape import has_parameter, num_positional, takes_any_keyword
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.serving.rollout_protocol import MEDIA, RequestConfig, RolloutInferRequest, RolloutOutput

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode

_REASONS = {"done": StopReason.ENV_DONE, "finished": StopReason.STOP, "max_turns": StopReason.MAX_TURNS}
_ENGINE: ContextVar[EpisodeEngine] = ContextVar("engine")
"""The engine of the current episode, for schedulers that all episodes share."""


@SchedulerEngine.register
class SharedEngine:
    """The engine of a shared scheduler: it forwards to the engine of the current episode."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_ENGINE.get(), name)

    def __dir__(self) -> list[str]:
        return dir(_ENGINE.get(None))


@dataclass(slots=True)
class _Live:
    """One running trajectory."""

    scheduler: RolloutScheduler
    request: RolloutInferRequest
    error: BaseException | None = None


class SwiftScheduler(MultiTurnScheduler):
    """Runs episodes with a user's scheduler: one copy per trajectory, unless it sets `shared = True`."""

    scores_turns = True

    def __init__(
        self,
        scheduler: str | type[RolloutScheduler] | RolloutScheduler,
        *,
        max_turns: int | None = None,
        gym_env: str | None = None,
        stop_words: Sequence[str] = (),
        base: Path | None = None,
        **kwargs: Any,
    ) -> None:
        """Create an adapter for a scheduler.

        Args:
            scheduler: A name in `multi_turns`, a class, or an object.
            max_turns: Largest number of turns; None uses the run's limits.
            gym_env: The environment of rows that do not name one.
            stop_words: Texts that end a turn; tokens from the stop word on are dropped and counted.
            base: The folder that relative paths of media are resolved against.
            kwargs: Further arguments of the class.
        """
        self._stop_words = list(stop_words)
        self._base = base or Path()
        self._max_turns = max_turns
        self._options = {**kwargs, **({} if gym_env is None else {"gym_env": gym_env, "use_gym_env": True})}
        scheduler_class = multi_turns.find(scheduler) if isinstance(scheduler, str) else scheduler
        self._instance = scheduler_class if isinstance(scheduler_class, RolloutScheduler) else None
        self._class = scheduler_class if isinstance(scheduler_class, type) else type(scheduler_class)
        if not issubclass(self._class, RolloutScheduler):
            raise ConfigError(
                f"the scheduler is {scheduler_class!r:.100}; it must be a RolloutScheduler or a MultiTurnScheduler"
            )
        self.shared = bool(self._class.shared)
        self._prototype: RolloutScheduler | None = None
        self._has_tried = False
        self._is_checked = not overrides_batches(self._class)
        self._lives: dict[str, _Live] = {}

    def __copy__(self) -> SwiftScheduler:
        """Return self: `_lives` has the state of each trajectory under its id."""
        return self

    def check_task(self, task: Task) -> None:
        """Refuse a row without a column that the scheduler needs, or with an unknown environment or context manager."""
        request = to_request(task, uuid=task.id)
        self._check_batches(request)
        columns = request.data_dict
        if issubclass(self._class, MathTipsScheduler | ThinkingModelTipsScheduler) and "solution" not in columns:
            raise DataError(f"task {task.id!r} has no solution, which {self._class.__name__} needs; add the column")
        for key in ("env_config", "ctx_config") if issubclass(self._class, GYMScheduler) else ():
            if not isinstance(columns.get(key) or {}, Mapping):
                raise DataError(f"task {task.id!r}: {key} is {columns[key]!r:.100}; it must be a dictionary")
        if issubclass(self._class, GYMScheduler) and self._class._create_env is GYMScheduler._create_env:
            name = (columns.get("env_config") or {}).get("name", self._options.get("gym_env"))
            if name is None:
                raise DataError(
                    f"task {task.id!r} does not name an environment; add `name` to its env_config, or set gym_env"
                )
            envs.find(name)
        if issubclass(self._class, GYMScheduler):
            manager = (columns.get("ctx_config") or {}).get("name", self._options.get("context_manager"))
            if manager is not None:
                context_managers.find(manager)

    def _check_batches(self, request: RolloutInferRequest) -> None:
        """Check a user's own `async_infer` once; in the first `run` if the check needs a tokenizer or the engine."""
        if self._is_checked or self._has_tried:
            return
        self._has_tried = True
        if self._instance is not None or not has_parameter(self._class, "tokenizer"):
            scheduler = self._instance or self._make(self._max_turns)
            self._is_checked = in_own_loop(lambda: refuse_groups(scheduler, request))

    async def run(self, episode: Episode) -> StopReason:
        """Run the user's scheduler to its end; its result determines what is trained."""
        scheduler, engine, config = self._for(episode)
        request = to_request(episode.task, uuid=episode.id)
        if not self._is_checked:
            self._is_checked = True
            await refuse_groups(scheduler, request, engine=engine)
        live = self._lives[episode.id] = _Live(scheduler, request)
        outputs: list[RolloutOutput] = []
        try:
            returned = await scheduler_run(scheduler, live.request, config)
            outputs = _checked(returned, scheduler, episode.id)
        except EngineOver:
            pass
        except BaseExceptionGroup as problems:  # from tasks that the user's own loop started
            live.error = problems
            if (others := problems.split(EngineOver)[1]) is not None:
                raise others from None
        except BaseException as problem:
            live.error = problem
            raise
        if engine.over is StopReason.ABORTED:
            return StopReason.ABORTED
        if not engine.calls and engine.over is None:
            raise SchedulerError(
                f"{type(scheduler).__name__} ended trajectory {episode.id!r} without calling infer_engine.infer_async"
            )
        prompt = to_request(episode.task, uuid=episode.id).messages
        turn_weights.settle(episode, engine, outputs, prompt=prompt, is_own_loop=_runs_own_loop(scheduler))
        return self._reason(engine)

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Let the user's scheduler release the trajectory."""
        live = self._lives.pop(episode.id, None)
        if live is not None:
            method: Any = live.scheduler.on_trajectory_end
            takes = num_positional(method)
            arguments = ([live.request], live.error)[: 2 if takes is None else takes]
            await episode.call(self, method, *arguments)

    # Private.

    def _for(self, episode: Episode) -> tuple[RolloutScheduler, EpisodeEngine, RequestConfig]:
        sampling, limits = episode.sampling, episode.limits
        stops = list(dict.fromkeys([*self._stop_words, *episode.stops]))
        episode.sample_as(sampling, stops=stops)
        config = RequestConfig(
            max_tokens=limits.max_tokens_per_turn,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            logprobs=True,
            return_details=True,
            stop=stops,
        )
        engine = EpisodeEngine(episode, self, config=copy.copy(config), base=self._base)
        _ENGINE.set(engine)
        if self._prototype is None:
            turns = self._max_turns if self._max_turns is not None else limits.max_turns
            self._prototype = self._instance or self._make(turns, tokenizer=episode.codec.tokenizer)
        if self.shared:
            return self._prototype, engine, config
        scheduler = copy.copy(self._prototype)
        scheduler.infer_engine = engine
        if vars(scheduler).get("max_turns") is None:
            scheduler.max_turns = limits.max_turns if self._max_turns is None else self._max_turns
        return scheduler, engine, config

    def _make(self, turns: int | None, *, tokenizer: Any = None) -> RolloutScheduler:
        """Create the user's object with the arguments that its constructor accepts."""
        offered = {"infer_engine": SharedEngine(), "max_turns": turns, **self._options}
        make: Any = self._class
        if has_parameter(make, "tokenizer"):
            offered["tokenizer"] = tokenizer
        if not takes_any_keyword(make):
            offered = {k: v for k, v in offered.items() if has_parameter(make, k) or k in self._options}
        try:
            instance = self._class(**offered)
        except PolyturnError:
            raise
        except Exception as problem:
            raise ConfigError(
                f"the scheduler {self._class.__name__} cannot be created with the arguments {sorted(offered)}: "
                f"{one_line(problem)}"
            ) from problem
        if "infer_engine" not in vars(instance):
            instance.infer_engine = offered.get("infer_engine")
        if vars(instance).get("max_turns") is None:
            instance.max_turns = turns
        return instance

    def _reason(self, engine: EpisodeEngine) -> StopReason:
        if engine.over is not None:
            return engine.over
        last = engine.calls[-1].turn
        if engine.why in _REASONS:
            return _REASONS[engine.why]
        is_cut = last.finish_reason is FinishReason.LENGTH and not engine.calls[-1].is_open
        return last.cut_by if is_cut else StopReason.STOP


async def scheduler_run(scheduler: RolloutScheduler, request: RolloutInferRequest, config: RequestConfig) -> Any:
    """Await a user's `run`, or the user's `async_infer`, which calls `run`. Errors name the scheduler and the trajectory.

    Raises:
        SchedulerError: the method raised, or is not async.
    """
    if not inspect.iscoroutinefunction(scheduler.run):
        raise SchedulerError(f"{type(scheduler).__name__}.run must be async: it awaits infer_engine.infer_async")
    try:
        if overrides_batches(type(scheduler)):
            return await scheduler.async_infer([request], config)
        return await scheduler.run(request, config)
    except (PolyturnError, EngineOver, asyncio.CancelledError):
        raise
    except Exception as problem:
        raise SchedulerError(
            f"{type(scheduler).__name__}.run raised {one_line(problem)} in trajectory {request.uuid!r}"
        ) from problem


def to_request(task: Task, *, uuid: str) -> RolloutInferRequest:
    """Return a task as a request: the prompt with media in separate lists, and the row's other columns in `data_dict`."""
    media: dict[str, Any] = {name: [] for name in MEDIA}
    lists = {kind: media[name] for name, kind in MEDIA.items()}
    messages = []
    for message in task.prompt:
        written = message.to_openai()
        if not isinstance(written["content"], str):
            texts = []
            for part in written["content"]:
                kind = part.get("type", "text")
                if kind in lists:
                    lists[kind].append(part[kind])
                texts.append(f"<{kind}>" if kind in lists else str(part.get("text", "")))
            written["content"] = "".join(texts)
        messages.append(written)
    own = task.extra.get("data_dict")
    if own is not None and not isinstance(own, Mapping):
        raise DataError(f"task {task.id!r}: data_dict exists but is not a dictionary: {own!r:.100}")
    columns = {k: v for k, v in task.extra.items() if v is not None and k != "data_dict"}
    if task.ground_truth is not None:
        columns.setdefault("solution", task.ground_truth)
    if task.data_source is not None:
        columns.setdefault("data_source", task.data_source)
    tools = columns.pop("tools", None)
    return RolloutInferRequest(
        messages=messages, tools=tools, data_dict=copy.deepcopy({**columns, **(own or {})}), uuid=uuid, **media
    )


def _runs_own_loop(scheduler: RolloutScheduler) -> bool:
    """Return whether the user wrote the loop. If so, only its outputs determine which turns are trained."""
    return overrides_batches(type(scheduler)) or type(scheduler).run.__module__ != RolloutScheduler.__module__


def _checked(returned: Any, scheduler: Any, uuid: str) -> list[RolloutOutput]:
    name, advice = type(scheduler).__name__, "return a RolloutOutput, or a list of them"
    outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
    for one in outputs:
        if not isinstance(one, RolloutOutput):
            at = defined_at(scheduler.run)
            raise SchedulerError(f"{name}.run returned {one!r:.100} in trajectory {uuid!r}; {advice}{at}")
    if not outputs:
        at = defined_at(scheduler.run)
        raise SchedulerError(f"{name}.run returned an empty list in trajectory {uuid!r}; {advice}{at}")
    return outputs
