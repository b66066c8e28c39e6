"""verl.workers.reward_manager: managers that turn a `DataProto` into rewards [B, R], their registry and base class.

    manager = NaiveRewardManager(tokenizer, num_examine=0, compute_score=score)
    manager(data)                       the reward of each row on the last token of its response, 0 elsewhere
    manager(data, return_dict=True)     {"reward_tensor": …, "reward_extra_info": {"pred": [B values], …}}

They are for scripts and tests that call a manager, and for subclasses. A run calls reward functions itself, and a project's
own managers through `managed_reward`. A function that raises is an error, never 0.0; only one that takes longer than a
manager's `compute_score_timeout` scores 0.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)
from polyturn.compat.verl.import_utils import load_extern_object
from polyturn.compat.verl.reward_score import default_compute_score
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, RewardError, UnknownNameError, did_you_mean
from polyturn.infra.plugins import are_of_loop, is_same_source

logger = logging.getLogger(__name__)

RawRewardFn = Callable[..., Any]
REWARD_MANAGER_REGISTRY: dict[str, type[Any]] = {}
_Class = TypeVar("_Class", bound=type[Any])


class AbstractRewardManager(ABC):
    """Turns a batch into rewards [B, R]."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Return the rewards [B, R] of a `DataProto`."""


def register(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a class; a class from a file that is imported again replaces its old version.

    Raises:
        ConfigError: another class is registered under the name.
    """

    def add(cls: _Class) -> _Class:
        registered = REWARD_MANAGER_REGISTRY.get(name, cls)
        is_of_name = (registered.__module__, registered.__qualname__) == (cls.__module__, cls.__qualname__)
        is_former = is_of_name and not are_of_loop(registered, cls)
        if not is_former and not is_same_source(registered, cls):
            raise ConfigError(f"Reward manager {name} has already been registered: {registered} vs {cls}")
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return add


def get_reward_manager_cls(name: str) -> type[Any]:
    """Return a registered class.

    Raises:
        UnknownNameError: the name is not registered.
    """
    if name not in REWARD_MANAGER_REGISTRY:
        raise UnknownNameError(f"Unknown reward manager: {name}.{did_you_mean(name, REWARD_MANAGER_REGISTRY)}")
    return REWARD_MANAGER_REGISTRY[name]


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Calls a function per row."""

    compute_score_timeout: float | None = None

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        compute_score_timeout: float | None = None,
    ) -> None:
        """Create a manager that logs `num_examine` answers per source; the default function is verl's own.

        A call that takes longer than `compute_score_timeout` seconds scores 0.0; outside the main thread it is not
        interrupted, only no longer waited for. None does not limit calls.
        """
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.compute_score_timeout = compute_score_timeout

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Return the rewards [B, R]: the batch's `rm_scores` if it has them, else the function's scores."""
        if "rm_scores" in data.batch:
            return with_known_rewards(data, return_dict)
        rewards: list[float] = []
        infos: list[dict[str, Any]] = []
        num_shown: Counter[Any] = Counter()
        for i, (length, text, score) in enumerate(
            zip(_lengths(data), texts(data, self.tokenizer), self.verify(data), strict=True)
        ):
            infos.append(dict(score) if isinstance(score, Mapping) else {})
            rewards.append(self._reward(_value(score), length, infos[-1]))
            source = data.non_tensor_batch[self.reward_fn_key][i]
            if num_shown[source] < self.num_examine:
                num_shown[source] += 1
                logger.info("%s: response %r, score %s", source, text, score)
        reward_tensor = on_last_tokens(data, rewards)
        return {"reward_tensor": reward_tensor, "reward_extra_info": by_key(infos)} if return_dict else reward_tensor

    def verify(self, data: Any) -> list[Any]:
        """Return the function's score of each row."""
        return [
            self._score(
                data_source=row.non_tensor_batch[self.reward_fn_key],
                solution_str=text,
                ground_truth=row.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=_extra_info(row),
            )
            for row, text in zip((data[i] for i in range(len(data))), texts(data, self.tokenizer), strict=True)
        ]

    def _score(self, **row: Any) -> Any:
        limit_s = self.compute_score_timeout
        if not limit_s:
            return self.compute_score(**row)
        try:
            return _within(limit_s, functools.partial(self.compute_score, **row))
        except TimeoutError:
            logger.warning("the reward of an answer of %s took longer than %s s: 0.0", row["data_source"], limit_s)
            return 0.0

    def _reward(self, score: float, length: int, info: dict[str, Any]) -> float:
        """Return the reward of a row from its score and number of tokens; add further values to `info`."""
        return score


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Calls a function per row, and stores the scores as the batch's `acc`."""

    def verify(self, data: Any) -> list[Any]:
        return _kept(data, super().verify(data))


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls a function once for all answers, and stores the scores as the batch's `acc`."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def verify(self, data: Any) -> list[Any]:
        rows = [data[i] for i in range(len(data))]
        scores = self.compute_score(
            data_sources=data.non_tensor_batch[self.reward_fn_key],
            solution_strs=texts(data, self.tokenizer),
            ground_truths=[row.non_tensor_batch["reward_model"].get("ground_truth") for row in rows],
            extra_infos=[_extra_info(row) for row in rows],
            **self.reward_kwargs,
        )
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(scores, Sequence) or len(scores) != len(rows):
            raise RewardError(
                f"the reward function returned {scores!r:.200} for {len(rows)} answers; return one for each"
                f"{defined_at(self.compute_score)}"
            )
        return _kept(data, scores)


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Calls a function per row, and subtracts a penalty for long responses (arXiv:2503.14476, 3.4)."""

    def __init__(self, *args: Any, max_resp_len: int | None = None, overlong_buffer_cfg: Any = None, **named: Any) -> None:
        """Create a manager; over the last `len` tokens before `max_resp_len` the penalty rises to `penalty_factor`."""
        super().__init__(*args, **named)
        self.max_resp_len, self.overlong_buffer_cfg = max_resp_len, overlong_buffer_cfg
        if overlong_buffer_cfg is None:
            return
        if max_resp_len is None:
            raise AssertionError(f"max_resp_len must be provided if {overlong_buffer_cfg=}, but got None")
        if max_resp_len < overlong_buffer_cfg.len:
            raise AssertionError("max_resp_len must be larger than overlong_buffer.len")

    def verify(self, data: Any) -> list[Any]:
        return [s if isinstance(s, Mapping) else {"score": s, "acc": s} for s in super().verify(data)]

    def _reward(self, score: float, length: int, info: dict[str, Any]) -> float:
        buffer = self.overlong_buffer_cfg
        if buffer is None or not buffer.enable:
            return score
        beyond = length - ((self.max_resp_len or 0) - buffer.len)
        penalty = min(-beyond / buffer.len * buffer.penalty_factor, 0)
        if buffer.log:
            info |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return score + float(penalty)


def get_custom_reward_fn(config: Mapping[str, Any]) -> RawRewardFn | None:
    """Return the function of `custom_reward_function` in a config tree, with its `reward_kwargs`, or None."""
    of = (config.get("reward") or config).get("custom_reward_function") or {}
    if not of.get("path"):
        return None
    return functools.partial(load_extern_object(of["path"], of["name"]), **(of.get("reward_kwargs") or {}))


async def parallel_compute_score_async(
    evaluation_func: RawRewardFn,
    completions: Sequence[str],
    references: Sequence[Any],
    tasks: Sequence[str],
    extra_info: Sequence[Any] | None = None,
    num_processes: int = 64,
) -> list[float]:
    """Return the score of each answer, computed in processes.

    Raises:
        Exception: the function's error on the first answer that failed.
    """
    loop = asyncio.get_running_loop()
    rows = list(zip(tasks, completions, references, extra_info or [None] * len(tasks), strict=True))
    with ProcessPoolExecutor(max(1, min(num_processes, len(rows))), get_context("spawn")) as processes:
        scores = await asyncio.gather(*(loop.run_in_executor(processes, evaluation_func, *row) for row in rows))
    return [float(score[0] if isinstance(score, Sequence) else _value(score)) for score in scores]


def run_reward_scoring(evaluation_func: RawRewardFn, *args: Any, **kwargs: Any) -> list[float]:
    """Run `parallel_compute_score_async` from synchronous code."""
    return asyncio.run(parallel_compute_score_async(evaluation_func, *args, **kwargs))


def with_known_rewards(data: Any, return_dict: bool) -> Any:
    """Return the rewards that a batch already has."""
    known = {key: data.non_tensor_batch[key] for key in data.meta_info.get("reward_extra_keys", [])}
    return {"reward_tensor": data.batch["rm_scores"], "reward_extra_info": known} if return_dict else data.batch["rm_scores"]


def on_last_tokens(data: Any, rewards: Sequence[float]) -> torch.Tensor:
    """Return [B, R] the reward of each row on the last token of its response, 0 elsewhere."""
    out = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
    for i, (length, reward) in enumerate(zip(_lengths(data), rewards, strict=True)):
        if length:
            out[i, length - 1] = reward
    return out


def _within(limit_s: float, call: Callable[[], Any]) -> Any:
    """Return the result of a call.

    Raises:
        TimeoutError: the call takes longer than `limit_s` seconds. Only the main thread can interrupt it.
    """
    if threading.current_thread() is threading.main_thread():
        with _alarm(limit_s):
            return call()
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as problem:
            result.set_exception(problem)

    threading.Thread(target=work, name="polyturn-score", daemon=True).start()
    return result.result(limit_s)


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    """Raise a TimeoutError in the body after `limit_s` seconds; for the main thread."""

    def is_late(signum: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, is_late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def by_key(infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key -> the value of each row; None for a row without the key."""
    keys = dict.fromkeys(key for info in infos for key in info)
    return defaultdict(list, {key: [info.get(key) for info in infos] for key in keys})


def texts(data: Any, tokenizer: Any) -> list[str]:
    """Return the responses of a batch without their padding."""
    rows = zip(data.batch["responses"], _lengths(data), strict=True)
    return [tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in rows]


def _value(score: Any) -> float:
    return float(score["score"] if isinstance(score, Mapping) else score)


def _kept(data: Any, scores: Sequence[Any]) -> list[Any]:
    """Store the scores in the batch and return them."""
    data.batch["acc"] = torch.tensor([_value(score) for score in scores])
    return list(scores)


def _lengths(data: Any) -> list[int]:
    """Return the length of each response in tokens."""
    num_prompt = data.batch["prompts"].shape[-1]
    lengths: list[int] = data.batch["attention_mask"][:, num_prompt:].sum(dim=-1).tolist()
    return lengths


def _extra_info(row: Any) -> dict[str, Any]:
    """Return a row's further fields for the reward function."""
    columns = row.non_tensor_batch
    info = {"num_turns": columns.get("__num_turns__"), "rollout_reward_scores": columns.get("reward_scores", {})}
    return {**(columns.get("extra_info") or {}), **info}
