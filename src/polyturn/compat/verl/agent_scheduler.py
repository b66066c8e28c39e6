"""AgentLoopScheduler: runs a user's `AgentLoopBase` as the scheduler of a native episode.

    scheduler = AgentLoopScheduler(Mine)
    scheduler = AgentLoopScheduler(loops={"mine": {"_target_": "project.loops.Mine"}})     selected by the row's `agent_name`

`run` gives the loop a server whose `generate` is one turn of the episode: the prompt is used unchanged, the engine samples,
and the record keeps ids, logprobs and versions. When the loop returns, its masks become loss weights:

    output   [ prompt_ids | response_ids, mask 1 1 1 0 0 1 1 ]
    turns      ~~~~~~~~~~   [ turn 0  ]     [turn 1]          the same ids at the same positions: weight = mask
    other sampled tokens get weight 0; other tokens with mask 1 were not sampled and cannot be trained
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf
from pydantic import BaseModel

from polyturn.compat.verl.agent_loop import (
    AGENT_LOOP,
    AgentLoopBase,
    AgentLoopOutput,
    AsyncLLMServerManager,
    DictConfigWrap,
    TokenList,
    TokenOutput,
    ToolListWrap,
    get_agent_loop_class,
)
from polyturn.compat.verl.tool_agent_loop import tools_of
from polyturn.core.arrays import Ids, ids_array
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, DataError, PolyturnError, SchedulerError, UnknownNameError, one_line
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import NATIVE_AGENTS, Task
from polyturn.infra.plugin_shape import check_class, has_parameter
from polyturn.infra.plugins import import_attr
from polyturn.rollout.open_turn import GivenReward
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.tools.result_shape import finite

if TYPE_CHECKING:
    from polyturn.core.generation import SamplingParams
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.limits import Limits
    from polyturn.rollout.open_turn import OpenTurn

logger = logging.getLogger(__name__)


class EpisodeOver(BaseException):
    """A limit of the episode is reached. It is not an `Exception`, so that loops that catch every error do not catch it."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode is over: {reason.value}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Claim:
    """A turn, and the index of its first token in its context."""

    turn: OpenTurn
    start: int


_OF_A_TURN = ("max_tokens", "max_new_tokens", "stop", "stop_token_ids")
"""The sampling parameters that a loop may set for each turn."""
_WITHOUT_EFFECT = ("logprobs", "include_stop_str_in_output")
"""Sampling parameters without effect: logprobs and stop strings are always in the output."""


class EpisodeServer(AsyncLLMServerManager):
    """Lets an agent loop generate turns of an episode, one at a time."""

    def __init__(self, episode: Episode, *, as_list: bool = False, reported: set[str] | None = None) -> None:
        self.codec = episode.codec
        self.params = {
            "temperature": episode.sampling.temperature,
            "top_p": episode.sampling.top_p,
            "top_k": episode.sampling.top_k,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }
        """The run's sampling parameters, in the form that loops pass to `generate`."""
        self._episode = episode
        self._sampling = episode.sampling
        self._as_list = as_list
        self._reported = set() if reported is None else reported
        self._lock = asyncio.Lock()
        self.claims: list[_Claim] = []
        self.over: StopReason | None = None

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int] | Mapping[str, Any],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Continue `prompt_ids` by one turn of the episode; return a `TokenOutput` or a `TokenList`.

        Of `sampling_params`, the token limit, stop strings and stop tokens apply to this turn. All others are the run's,
        because the trainer's logprobs depend on them.

        Raises:
            EpisodeOver: a limit is reached.
        """
        if image_data or video_data:
            raise SchedulerError("agent loops with media are not supported; use the native scheduler for such tasks")
        ids = ids_array(prompt_ids["input_ids"] if isinstance(prompt_ids, Mapping) else prompt_ids)
        async with self._lock:
            self._episode.show_ids(ids)
            if (reason := await self._episode.prepare()) is not None:
                self.over = reason
                raise EpisodeOver(reason)
            self._sample_as(sampling_params)
            turn = await self._episode.generate()
            self.claims.append(_Claim(turn, len(ids)))
            self._episode.record(turn, Reply(goes_on=True))
        completion = turn.completion
        if turn.finish_reason is FinishReason.ABORT:
            self.over = StopReason.ABORTED
            raise EpisodeOver(StopReason.ABORTED)
        output = TokenOutput(
            token_ids=completion.token_ids.tolist(),
            log_probs=None if completion.logprobs is None else completion.logprobs.tolist(),
            stop_reason="completed",
        )
        return TokenList(output) if self._as_list else output

    def _sample_as(self, params: Mapping[str, Any]) -> None:
        """Set the sampling of the next turn; warn once in a run of each parameter that is not applied."""
        for name, value in params.items():
            if name in (*_OF_A_TURN, *_WITHOUT_EFFECT, *self._reported) or value in (None, self.params.get(name)):
                continue
            self._reported.add(name)
            logger.warning(
                "%s: the agent loop samples with %s=%r, which is not applied; it may set %s, and the config sets the rest",
                self._episode.id, name, value, ", ".join(_OF_A_TURN),
            )  # fmt: skip
        limits = [int(params[name]) for name in ("max_tokens", "max_new_tokens") if params.get(name) is not None]
        ends, stops = params.get("stop_token_ids") or (), params.get("stop") or ()
        sampling = dataclasses.replace(
            self._sampling,
            max_tokens=min([self._sampling.max_tokens, *limits]),
            stop_token_ids=(*self.codec.stop_token_ids, *ends) if ends else self._sampling.stop_token_ids,
        )
        self._episode.sample_as(sampling, stops=[stops] if isinstance(stops, str) else stops)


@dataclass(frozen=True, slots=True)
class _Loop:
    """The class of an agent loop and its arguments."""

    cls: type[AgentLoopBase]
    kwargs: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, item: Mapping[str, Any]) -> _Loop:
        """Import the class of an entry in agent_loop_config_path."""
        kwargs = dict(item)
        target = str(kwargs.pop("_target_", ""))
        target_object = import_attr(target)
        if not isinstance(target_object, type):
            raise ConfigError(f"the agent loop {name!r} names {target!r}, which is not a class; inherit AgentLoopBase")
        check_class(target_object, AGENT_LOOP, where=f"the agent loop {name!r}")
        return _Loop(target_object, kwargs)


class AgentLoopScheduler(MultiTurnScheduler):
    """Runs episodes with an agent loop."""

    shared = True
    gives_reward = True

    def __init__(
        self,
        loop: type[AgentLoopBase] | str | None = None,
        *,
        loops: Mapping[str, Mapping[str, Any]] | None = None,
        default: str = NATIVE_AGENTS[0],
        config: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a scheduler.

        Args:
            loop: The class, its registered name, or None for the row's `agent_name`.
            loops: Name -> `_target_`, the import path of a class, and its further arguments. A registered class needs no
                entry. An entry may replace the native loop, by its names.
            default: The loop of rows without an `agent_name`.
            config: A config tree in verl's form for the loop. The run's lengths and sampling fill in values that are
                missing or null.
            kwargs: Further arguments of the class `loop`.

        Raises:
            ConfigError: an import path is not an agent loop.
        """
        chosen = get_agent_loop_class(loop) if isinstance(loop, str) else loop
        self._only = None if chosen is None else _Loop(chosen, dict(kwargs or {}))
        read = {name: _Loop.read(name, item) for name, item in (loops or {}).items()}
        self._loops = {name: one for name, one in read.items() if name not in NATIVE_AGENTS or not _is_native(one.cls)}
        self._default = default
        self._config = OmegaConf.create(dict(config or {}))
        self._last: tuple[Limits, SamplingParams, Any] | None = None
        self._reported: set[str] = set()
        """Names of sampling parameters that a warning has named."""
        if default not in NATIVE_AGENTS:
            self._find(default)

    def check_task(self, task: Task) -> None:
        """Refuse a row whose loop is unknown."""
        try:
            self._loop_of(task)
        except UnknownNameError as problem:
            raise DataError(f"task {task.id!r}: {problem}") from problem

    async def run(self, episode: Episode) -> StopReason:
        """Run the loop to its end, then set the loss weights from its masks."""
        if (loop := self._loop_of(episode.task)) is None:
            return await super().run(episode)
        episode.resources.without_partners()  # a loop creates the tools and interactions that it uses itself
        server = EpisodeServer(episode, as_list=has_parameter(loop.cls.run, "messages"), reported=self._reported)
        try:
            output = await self._run_loop(loop, episode, server)
        except EpisodeOver as end:
            return end.reason
        except (PolyturnError, asyncio.CancelledError):
            raise
        except (Exception, BaseExceptionGroup) as problem:
            if server.over is not None:
                return server.over
            raise SchedulerError(f"the agent loop raised {one_line(problem)}") from problem
        outputs = output if isinstance(output, list) else [output]
        for one in outputs or [outputs]:
            if not isinstance(one, AgentLoopOutput):
                raise SchedulerError(
                    f"the agent loop returned {one!r:.200}; return an AgentLoopOutput, or a list of them"
                    f"{defined_at(loop.cls.run)}"
                )
        if not server.claims:
            if server.over is not None:
                return server.over
            raise SchedulerError("the agent loop returned without calling server_manager.generate")
        _weigh(episode, server.claims, outputs)
        _score(episode, server.claims, outputs)
        return server.over or StopReason.STOP

    def _loop_of(self, task: Task) -> _Loop | None:
        """Return the loop of a task; None for the native loop."""
        name = task.extra.get("agent_name")
        if self._only is not None:
            return self._only
        name = self._default if name is None else str(name)
        return None if name in NATIVE_AGENTS and name not in self._loops else self._find(name)

    def _find(self, name: str) -> _Loop:
        return self._loops[name] if name in self._loops else _Loop(get_agent_loop_class(name, also=self._loops), {})

    def _config_of(self, episode: Episode) -> Any:
        """Return the config tree for a loop, recreated only if the episode's limits differ from the last one's."""
        if self._last is None or self._last[:2] != (episode.limits, episode.sampling):
            self._last = (episode.limits, episode.sampling, _config(episode, self._config))
        return self._last[2]

    async def _run_loop(self, chosen: _Loop, episode: Episode, server: EpisodeServer) -> Any:
        cls, config = chosen.cls, self._config_of(episode)
        tokenizer = _list_tokenizer(episode.codec.tokenizer)
        if has_parameter(cls.__init__, "trainer_config") or not has_parameter(cls.__init__, "config"):
            named = _constructor_names(cls)
            arguments: dict[str, Any] = {
                "dataset_config" if "dataset_config" in named else "data_config": DictConfigWrap(config.data)
            }
            if "tools" in named:  # since verl 0.8 loops do not load tools themselves
                arguments["tools"] = ToolListWrap(tools_of(config.actor_rollout_ref.rollout.multi_turn))
            loop = cls(
                trainer_config=DictConfigWrap(config),
                server_manager=server,
                tokenizer=tokenizer,
                processor=None,
                dataset_cls=None,
                **{**arguments, **chosen.kwargs},
            )
        else:
            old: Any = cls
            loop = old(config, server, tokenizer, **chosen.kwargs)
        row, params = row_of(episode.task), dict(server.params)
        run: Any = loop.run
        answer = run(row["raw_prompt"], params) if has_parameter(run, "messages") else run(params, **row)
        return await answer if inspect.isawaitable(answer) else answer


def _is_native(cls: type) -> bool:
    """Return whether a class is one that stands for the native loop, not a subclass of it."""
    return cls.__module__.partition(".")[0] == "polyturn"


def _constructor_names(cls: type) -> set[str]:
    """Return the parameter names of the constructors of a loop's class and its bases, without AgentLoopBase's own."""
    own = (vars(c).get("__init__") for c in itertools.takewhile(lambda c: c is not AgentLoopBase, cls.__mro__))
    return {name for init in own if inspect.isfunction(init) for name in inspect.signature(init).parameters}


def row_of(task: Task) -> dict[str, Any]:
    """Return a task as a row with verl's field names."""
    tools_kwargs = {
        name: {
            key: dict(value)
            for key, value in (
                ("create_kwargs", of.create_kwargs),
                ("execute_kwargs", of.execute_kwargs),
                ("calc_reward_kwargs", of.calc_reward_kwargs),
                ("release_kwargs", of.release_kwargs),
            )
            if value
        }
        for name, of in task.tools_kwargs.items()
    }
    interaction_kwargs = {} if task.interaction is None else dict(task.interaction.kwargs)
    extra = dict(task.extra)
    return {
        **extra,
        "raw_prompt": [m.to_openai() for m in task.prompt],
        "data_source": task.data_source,
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "tools_kwargs": tools_kwargs,
        "interaction_kwargs": interaction_kwargs,
        "extra_info": {**extra, "tools_kwargs": tools_kwargs, "interaction_kwargs": interaction_kwargs},
        "index": extra.get("index", task.id),
        "uid": task.id,
    }


def _weigh(episode: Episode, claims: Sequence[_Claim], outputs: Sequence[AgentLoopOutput]) -> None:
    """Set the weight of every sampled token from the outputs' masks; count unsampled tokens with mask 1."""
    unsampled = 0
    weights_by_turn: dict[int, Any] = {c.turn.index: np.zeros(c.turn.num_tokens, np.float32) for c in claims}
    for output in outputs:
        ids = np.array([*output.prompt_ids, *output.response_ids], np.int32)
        mask = np.zeros(len(ids), np.float32)
        marks = np.asarray(output.response_mask, np.float32)
        if len(marks) != len(output.response_ids):
            raise SchedulerError(
                f"the agent loop returned {len(output.response_ids)} response_ids but a response_mask of {len(marks)}; the "
                "lengths must be equal"
            )
        mask[len(output.prompt_ids) :] = marks
        left = mask.copy()
        for claim in claims:
            here = _overlap(ids, claim)
            if here:
                part = slice(claim.start, claim.start + here)
                weights = weights_by_turn[claim.turn.index]
                weights[:here] = np.maximum(weights[:here], mask[part])
                left[part] = 0
        unsampled += int(np.count_nonzero(left))
    for claim in claims:
        episode.weigh(claim.turn, weights_by_turn[claim.turn.index])
    last = claims[-1].turn
    last.info["unsampled_masked_tokens"] = unsampled
    if unsampled:
        logger.warning(
            "%s: the agent loop's mask is 1 on %d tokens that the engine did not sample there; they are not trained",
            episode.id,
            unsampled,
        )


def _overlap(ids: Ids, claim: _Claim) -> int:
    """Return the number of a turn's tokens at their sampled position in `ids`; an output may end within a turn."""
    sampled = claim.turn.completion.token_ids[: claim.turn.num_tokens]
    here = ids[claim.start : claim.start + len(sampled)]
    is_same = bool(np.array_equal(here, sampled[: len(here)]))
    return len(here) if is_same else 0


def _score(episode: Episode, claims: Sequence[_Claim], outputs: Sequence[AgentLoopOutput]) -> None:
    """Record the loop's `turn_scores` on its turns. Its `reward_score` is the episode's reward: as in verl, no reward
    function is then called."""
    last = outputs[-1]
    scores = last.extra_fields.get("turn_scores") or []
    if len(scores) > len(claims):
        logger.warning(
            "%s: the agent loop returned %d turn_scores for %d turns; the last %d are dropped",
            episode.id, len(scores), len(claims), len(scores) - len(claims),
        )  # fmt: skip
    for claim, score in zip(claims, scores, strict=False):
        if score is not None:
            claim.turn.scores["interaction"] = float(score)
    if last.reward_score is not None:
        info = last.extra_fields.get("reward_extra_info") or {}
        episode.given_reward = GivenReward(score=finite(last.reward_score, what="agent loop's"), info=info)
    claims[-1].turn.info.update({k: _plain(v) for k, v in last.extra_fields.items() if k != "turn_scores"})


def _plain(value: Any) -> Any:
    """Return a value from a loop's messages as plain data for the record."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _config(episode: Episode, config: Any) -> Any:
    """Return the config tree for a loop: `config`, with defaults and the episode's settings for missing and null values."""
    limits = episode.limits
    response = limits.max_tokens or limits.max_context or limits.max_tokens_per_turn or 1 << 20
    own = {
        "actor_rollout_ref": {
            "rollout": {
                "name": "polyturn",
                "mode": "async",
                "prompt_length": limits.max_context or 1 << 20,
                "response_length": response,
                "max_model_len": limits.max_context,
                "temperature": episode.sampling.temperature,
                "top_p": episode.sampling.top_p,
                "top_k": episode.sampling.top_k,
                "calculate_log_probs": True,
                "multi_turn": {
                    "enable": True,
                    "format": "hermes",
                    "max_assistant_turns": limits.max_turns,
                    "max_user_turns": limits.max_user_turns,
                    "max_parallel_calls": 1,
                    "max_tool_response_length": 256,
                    "tool_response_truncate_side": "middle",
                    "tool_config_path": None,
                    "interaction_config_path": None,
                },
                "agent": {"num_workers": 1},
            },
            "model": {},
        },
        "data": {"apply_chat_template_kwargs": {}},
        "trainer": {},
    }
    settings = OmegaConf.create(_without_none(OmegaConf.to_container(config, resolve=True)))
    return OmegaConf.merge(config, OmegaConf.create(own), settings)


def _without_none(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _without_none(value) for key, value in values.items() if value is not None}


def _list_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer whose `apply_chat_template` returns a list of ids by default."""
    view = copy.copy(tokenizer)
    view.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    return view
