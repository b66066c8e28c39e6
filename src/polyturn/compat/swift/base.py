"""The base classes of schedulers in ms-swift's form, and their common loop.

    class Mine(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({"role": "user", "content": "Once more."})
            return {"infer_request": infer_request}
    multi_turns["mine"] = Mine

`run` only controls the conversation: every `infer_engine.infer_async` is a turn of a native episode (`adapter.py`), which
keeps the ids. So the loop is the same in a trainer's process and in a rollout server. `current_turn` counts from 1.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from polyturn.compat.swift.turns import Turns, as_list, as_request, extract_logprobs_from_choice, ids_of
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import SchedulerError, did_you_mean
from polyturn.core.reward import as_flag, as_score
from polyturn.infra.plugin_shape import num_positional
from polyturn.serving.rollout_protocol import (
    MEDIA,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    as_handed_over,
    as_sources,
)

logger = logging.getLogger(__name__)

_OF_STEP = ("infer_request", "response_token_ids", "response_loss_mask", "rollout_logprobs", "rollout_infos")
_OF_TURN_END = ("done", "rollout_infos", "score")
"""The keys of the result of `on_turn_end`."""


class EngineOver(BaseException):
    """A limit of the trajectory is reached, so the engine refuses further requests.

    It is not an `Exception`: otherwise a scheduler that catches every error and retries would loop forever.
    """


class MaskError(SchedulerError, AssertionError):
    """A loss mask does not match its ids."""


class SchedulerEngine(ABC):
    """The engine of a scheduler in this process; any object with `infer_async` can be used instead."""

    @abstractmethod
    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> ChatCompletionResponse:
        """Return a completion of the model.

        Raises:
            EngineOver: a limit of the trajectory is reached.
        """

    @abstractmethod
    async def call_author(self, method: Any, *args: Any) -> Any:
        """Call a user's method, sync or async, without blocking other trajectories."""

    @abstractmethod
    def take(self, ids: Sequence[int] | None, mask: Sequence[int] | None) -> None:
        """Receive the ids and mask that a step returned for the turn that it answers."""

    @abstractmethod
    def score(self, value: float) -> None:
        """Receive the score of the last turn."""

    @abstractmethod
    def ended(self, why: str) -> None:
        """Receive the reason why the loop ends: done, finished, length or max_turns."""


class RolloutScheduler(ABC):  # noqa: B024
    """A scheduler with one turn per trajectory; the base of all schedulers.

    The constructor accepts `(infer_engine, max_turns, …)` and, as in earlier releases, `(max_turns, …)`.
    """

    shared = False
    """Whether all trajectories share one object, whose sync methods are called one at a time; if not, each gets a copy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        is_early = bool(args) and isinstance(args[0], int)
        names = ("max_turns",) if is_early else ("infer_engine", "max_turns")
        values = dict(zip(names, args, strict=False))
        self.infer_engine = kwargs.get("infer_engine", values.get("infer_engine"))
        self.max_turns: int | None = kwargs.get("max_turns", values.get("max_turns"))
        self._tokenizer = kwargs.get("tokenizer")
        self._template = kwargs.get("template")

    def __getattr__(self, key: str) -> Any:
        """Return an attribute of the engine."""
        at = None if key.startswith("__") else self.__dict__.get("infer_engine")
        for _ in range(2):  # the engine's attributes, then those of the engine that it wraps
            if at is None:
                break
            if key in dir(at):
                return getattr(at, key)
            at = vars(at).get("engine")
        raise AttributeError(f"{type(self).__name__} object has no attribute {key}")

    @property
    def engine(self) -> Any:
        """The engine that generates."""
        return self.infer_engine

    @property
    def tokenizer(self) -> Any:
        """The tokenizer passed to the constructor, else the engine's, else None."""
        if self._tokenizer is not None or self.infer_engine is None:
            return self._tokenizer
        return self.infer_engine.tokenizer

    # Helpers with which a user's own `run` keeps the ids of its turns; the episode keeps them in any case.

    def get_response_token_data(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        is_continuation: bool = False,
        response_token_ids: list[int] | None = None,
        response_loss_mask: list[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a reply and their mask: the arguments if given, else the sampled ids."""
        ids = list(response_choice.token_ids or [] if response_token_ids is None else response_token_ids)
        mask = [1] * len(ids) if response_loss_mask is None else list(response_loss_mask)
        if len(mask) != len(ids):
            raise MaskError(
                f"response_loss_mask must have the same length as response_token_ids ({len(mask)} and {len(ids)} in "
                f"trajectory {infer_request.uuid!r})"
            )
        return ids, mask

    def prepare_response_continuation(
        self, response_choice: ChatCompletionResponseChoice
    ) -> tuple[list[int], list[int], list[float]]:
        """Return the ids, mask and logprobs of a reply that the scheduler continues."""
        ids = list(response_choice.token_ids or [])
        return ids, [1] * len(ids), extract_logprobs_from_choice(response_choice)

    def set_assistant_message_token_ids(self, infer_request: RolloutInferRequest, token_ids: list[int]) -> None:
        """Replace the text of the last reply by ids."""
        message = next((m for m in reversed(infer_request.messages) if m["role"] == "assistant"), None)
        if message is not None:
            message["content"] = list(token_ids)

    def snapshot_and_materialize_assistant_messages(self, infer_request: RolloutInferRequest) -> list[tuple[Any, Any]]:
        """Replace ids by text in all replies; return the argument of `restore_assistant_message_snapshots`."""
        pairs = [(m, ids) for m in infer_request.messages if (ids := ids_of(m.get("content"))) is not None]
        for message, ids in pairs:
            message["content"] = self.tokenizer.decode(ids, skip_special_tokens=False)
        return pairs

    @staticmethod
    def restore_assistant_message_snapshots(snapshots: list[tuple[Any, Any]]) -> None:
        """Put the ids back in place of the texts."""
        for message, ids in snapshots:
            message["content"] = ids

    def append_assistant_completion(self, infer_request: RolloutInferRequest, completion: str) -> bool:
        """Append a completion; return whether it continued the last message."""
        last = infer_request.messages[-1] if infer_request.messages else {}
        if last.get("role") != "assistant":
            infer_request.messages.append({"role": "assistant", "content": completion})
            return False
        ids = ids_of(last.get("content"))
        text = last["content"] if ids is None else self.tokenizer.decode(ids, skip_special_tokens=False)
        last["content"] = text + completion
        return True

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:  # noqa: B027
        """Prepare each request before its first turn, in place. May be sync or async."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Handle a completion; return {"done": …, "rollout_infos": {…}, "score": …}, all optional. May be sync or async."""
        return {}

    async def on_trajectory_end(self, requests: list[RolloutInferRequest], error: BaseException | None = None) -> Any:  # noqa: B027
        """Release the state of the trajectories. Called exactly once on every exit. May be sync or async."""

    async def async_infer(
        self,
        infer_requests: list[Any],
        request_config: RequestConfig,
        *,
        use_tqdm: bool | None = None,
        **kwargs: Any,
    ) -> list[RolloutOutput]:
        """Run all requests and return their outputs in order."""
        assert request_config.n == 1, f"request_config.n is {request_config.n}; a scheduler runs one reply per request"
        requests = [as_request(one) for one in infer_requests]
        if use_tqdm is None:
            use_tqdm = len(requests) > 1
        tasks = [self.run(request, request_config, **kwargs) for request in requests]
        assert self.infer_engine is not None
        outputs = await self.infer_engine._batch_infer_stream(tasks, request_config.stream, use_tqdm, None)
        return [one for out in outputs for one in (out if isinstance(out, list) else [out])]

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """Run one turn."""
        assert self.infer_engine is not None
        async with self._trajectory(infer_request):
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        choice = response.choices[0]
        turns = Turns()
        turns.add(choice, ids=None, mask=None, logprobs=None, goes_on=False)
        message = {"role": "assistant", "content": choice.message.content}
        return turns.output(response, messages=[*infer_request.messages, message], infos={"num_turns": 1})

    @asynccontextmanager
    async def _trajectory(self, request: RolloutInferRequest) -> AsyncIterator[None]:
        """Call the hooks around a trajectory; inside an episode, the episode calls `on_trajectory_end`."""
        error: BaseException | None = None
        try:
            await self._ask(self.on_trajectory_start, [request])
            yield
        except BaseException as problem:
            error = problem
            raise
        finally:
            if not isinstance(self.infer_engine, SchedulerEngine):
                arguments = ([request], error)[: num_positional(self.on_trajectory_end)]
                await self._ask(self.on_trajectory_end, *arguments)

    async def _ask(self, method: Any, *args: Any) -> Any:
        """Call a method that may be overridden by the user."""
        if isinstance(self.infer_engine, SchedulerEngine) and method.__module__ != __name__:
            return await self.infer_engine.call_author(method, *args)
        answer = method(*args)
        return await answer if inspect.isawaitable(answer) else answer


class SwiftMultiTurnScheduler(RolloutScheduler, ABC):
    """A scheduler with several turns: `step` makes the next request, `check_finished` ends the trajectory.

    Both methods may be sync or async.
    """

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Return {"infer_request": …}, optionally with response_token_ids, response_loss_mask, rollout_logprobs and
        rollout_infos."""
        raise NotImplementedError(
            "Please implement the `step` method in your MultiTurnScheduler subclass, or override the `run` method."
        )

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Return whether the trajectory ends with this turn, because it was cut or is the last one allowed."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        return extract_logprobs_from_choice(response_choice)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """Run a trajectory to its end."""
        async with self._trajectory(infer_request):
            return await self._drive(infer_request, request_config, **kwargs)

    async def _drive(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput:
        engine, request, turns = self.infer_engine, as_request(infer_request), Turns()
        assert engine is not None
        infos: dict[str, Any] = {}
        response: ChatCompletionResponse | None = None
        current = 0
        while True:
            if current == 0 and request.messages and request.messages[-1]["role"] == "assistant":
                request.messages.pop()  # the row's own answer
            try:
                following = await engine.infer_async(request, request_config, **kwargs)
            except EngineOver:
                if response is None:
                    raise
                break
            response, current = following, current + 1
            choice = response.choices[0]
            if request.messages and request.messages[-1]["role"] == "assistant" and not request.messages[-1]["content"]:
                request.messages.pop()  # a placeholder for the engine, which the history does not keep
            reply: Any = choice.message.content
            goes_on = self.append_assistant_completion(request, reply)
            why, extra = await self._finished(request, choice, current)
            _merge(infos, extra, request)
            if why is not None:
                turns.add(choice, ids=None, mask=None, logprobs=None, goes_on=goes_on)
                if isinstance(engine, SchedulerEngine):
                    engine.ended(why)
                break
            result = await self._ask(self.step, request, choice, current)
            ids, mask = self._checked(result, request)
            turns.add(choice, ids=ids, mask=mask, logprobs=result.get("rollout_logprobs"), goes_on=goes_on)
            request = as_request(result["infer_request"])
            _merge(infos, result.get("rollout_infos"), request)
            if isinstance(engine, SchedulerEngine):
                engine.take(ids, mask)
        messages = list(request.messages)
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()  # a last message without a reply
        return turns.output(response, messages=messages, infos={**infos, "num_turns": current})

    async def _finished(
        self, request: RolloutInferRequest, choice: ChatCompletionResponseChoice, current: int
    ) -> tuple[str | None, Any]:
        """Return why the trajectory ends with this turn (None if it does not), and the infos of the hook."""
        reply = await self._ask(self.on_turn_end, request, choice, current)
        reply = {} if reply is None else reply
        if not isinstance(reply, Mapping):
            raise SchedulerError(
                f"{type(self).__name__}.on_turn_end returned {reply!r:.100} in trajectory {request.uuid!r}; return None, or "
                f"a dict with done, rollout_infos or score{defined_at(self.on_turn_end)}"
            )
        _refuse_misspelt(reply, _OF_TURN_END, f"{type(self).__name__}.on_turn_end", f"in trajectory {request.uuid!r}")
        if isinstance(self.infer_engine, SchedulerEngine) and (value := _turn_score(reply, current)) is not None:
            self.infer_engine.score(value)
        is_cut = choice.finish_reason == "length"
        stops = bool(await self._ask(self.check_finished, request, choice, current))
        why = ("length" if is_cut else "finished") if stops else None
        if reply.get("done") is not None:
            # The environment decides whether the trajectory ends, except after a turn that a limit cut.
            if (is_done := as_flag(reply["done"])) is None:
                raise SchedulerError(
                    f"{type(self).__name__}.on_turn_end returned done as {reply['done']!r:.40} in trajectory "
                    f"{request.uuid!r}; use True or False{defined_at(self.on_turn_end)}"
                )
            why = "done" if is_done else ("length" if is_cut and stops else None)
        if why != "done" and self.max_turns and current >= self.max_turns:
            why = why if why == "length" else "max_turns"
        return why, reply.get("rollout_infos")

    def _checked(self, result: Any, request: RolloutInferRequest) -> tuple[list[int] | None, list[int] | None]:
        where = f"in trajectory {request.uuid!r}"
        if not isinstance(result, Mapping) or result.get("infer_request") is None:
            raise SchedulerError(
                f"{type(self).__name__}.step returned {result!r:.100} {where}; return a dict with 'infer_request', the "
                f"request of the next turn{defined_at(self.step)}"
            )
        ids, mask = (as_list(result.get(n), name=n, where=where) for n in ("response_token_ids", "response_loss_mask"))
        if mask and not ids:
            raise MaskError(f"You must return response_token_ids if you want to return response_loss_mask ({where})")
        if mask and len(mask) != len(ids):
            raise MaskError(
                f"response_loss_mask must have the same length as response_token_ids ({len(mask)} and {len(ids)} {where})"
            )
        if odd := [m for m in mask if m not in (0, 1)]:
            raise MaskError(f"response_loss_mask holds {odd[0]!r:.40} {where}; 1 trains an id, 0 does not")
        logprobs = result.get("rollout_logprobs") or []
        num_trained = sum(mask) if mask else len(ids)
        if ids and logprobs and len(logprobs) not in (len(ids), num_trained):
            raise MaskError(
                f"rollout_logprobs has {len(logprobs)} entries {where}, for {len(ids)} response_token_ids of which "
                f"{num_trained} are trained; return one for each id, or for each trained id"
            )
        _refuse_misspelt(result, _OF_STEP, f"{type(self).__name__}.step", where)
        return ids or None, ([int(m) for m in mask] or None)


MultiTurnScheduler = SwiftMultiTurnScheduler  # the name in users' imports


def _refuse_misspelt(answer: Mapping[str, Any], known: Sequence[str], who: str, where: str) -> None:
    """Refuse a key that is similar to a known one, because it is probably misspelt; log other unknown keys."""
    for key in answer:
        if key not in known:
            if difflib.get_close_matches(str(key), known, n=1, cutoff=0.8):
                raise SchedulerError(f"{who} returned the unknown key {key!r} {where}.{did_you_mean(str(key), known)}")
            _log_unread(who, str(key), ", ".join(known))


@functools.cache
def _log_unread(who: str, key: str, known: str) -> None:
    """Log a key without effect, once per process."""
    logger.warning("%s returned the key %r, which has no effect; the keys are %s", who, key, known)


def _merge(infos: dict[str, Any], extra: Any, request: RolloutInferRequest) -> None:
    """Add infos; media in them are shown in the next turn."""
    if not extra:
        return
    if not isinstance(extra, Mapping):
        raise SchedulerError(f"rollout_infos is {extra!r:.100} in trajectory {request.uuid!r}; return a dict")
    media = {k: as_sources(MEDIA[k], v) for k, v in extra.items() if k in MEDIA and v}
    extra = {k: as_handed_over(MEDIA[k], v) if k in media else v for k, v in extra.items()}
    try:
        json.dumps({k: v for k, v in extra.items() if k not in MEDIA})
    except (TypeError, ValueError) as problem:
        raise SchedulerError(
            f"rollout_infos of trajectory {request.uuid!r} cannot be written as JSON: {problem}"
        ) from problem
    infos.update(extra)
    for name, sources in media.items():
        setattr(request, name, sources)


def _turn_score(answer: Mapping[str, Any], current: int) -> float | None:
    """Return the score of the turn: `score`, else the last of the infos' `step_rewards`.

    Raises:
        SchedulerError: it is not a finite number.
    """
    value, infos = answer.get("score"), answer.get("rollout_infos")
    if value is None:
        steps = infos.get("step_rewards") if isinstance(infos, Mapping) else None
        value = steps[-1] if isinstance(steps, list) and len(steps) == current else None
    if value is None:
        return None
    if (score := as_score(value)) is None:
        raise SchedulerError(f"the score of turn {current} is {value!r:.40}; return a finite number")
    return score
