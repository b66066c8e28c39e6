"""Requests to an engine and its completions: token ids in, token ids and logprobs out.

    GenerateRequest(prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=8))
      ->  Completion(token_ids=[9, 2], logprobs=[-0.1, -0.7], finish_reason=STOP, policy_versions=((0, 4),))

Logprobs mean one thing everywhere: log_softmax(logits / temperature) over the full vocabulary, before top-k and top-p. With
`keep_support` they are normalised over the tokens that top-k and top-p keep, in the engine and in training. Greedy decoding
(temperature 0) reports them at temperature 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import Any

import numpy as np

from polyturn.core.arrays import Floats, Ids, Record, Support, float_array, ids_array, joined_support, support_array
from polyturn.core.errors import AlignmentError, ConfigError, EngineError
from polyturn.core.media import Media
from polyturn.core.routing import Routes, routes_array

MAX_SUPPORT = 64
"""The most tokens that sampling with `keep_support` keeps, so that a run can record them for every sampled token."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
"""Bounds within which logits / temperature stays finite in float32; one row that is not finite ends its whole batch."""


def _is_whole(value: object) -> bool:
    return type(value) is int or isinstance(value, Integral)  # a fast test first: each request calls this twice


class FinishReason(Enum):
    """Why a completion stopped."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling of completions."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample among the likeliest tokens, as few as together have at least this probability."""
    top_k: int = -1
    """Sample among this many of the likeliest tokens; -1 or 0 means no limit."""
    keep_support: bool = False
    """Record the tokens that top_p and top_k keep, at most 64, and normalise log-probabilities over them, in the engine and
    in training. Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1, keep sampling mask."""

    @property
    def is_cut(self) -> bool:
        """Whether top_p or top_k removes tokens from the distribution that is sampled."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(
                f"temperature is {self.temperature}; use 0 for greedy decoding or a number from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; set a number above 0 and at most 1")
        if not (_is_whole(self.top_k) and -1 <= self.top_k < 2**31):
            raise ConfigError(f"top_k is {self.top_k}; set a whole number of tokens, or -1 or 0 for no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Sampling):
    """The sampling of one completion."""

    max_tokens: int = 256
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a turn; the sampled one stays in the completion and is trained."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids that are never sampled, such as image placeholders. Like top-k, the ban does not change the logprobs."""

    def __post_init__(self) -> None:
        if not (_is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise ConfigError(f"max_tokens is {self.max_tokens}; a completion needs a whole number of tokens, at least 1")
        Sampling.__post_init__(self)  # by name: in a dataclass with slots, `super()` finds another class

    @classmethod
    def of(cls, sampling: Sampling, *, max_tokens: int = 256) -> SamplingParams:
        """Return the sampling parameters of a completion of at most `max_tokens`."""
        return cls(max_tokens=max_tokens, **{f.name: getattr(sampling, f.name) for f in dataclasses.fields(Sampling)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest(Record):
    """One request to an engine. `session_id` names the episode, so that an engine can keep its KV cache between turns."""

    request_id: str
    session_id: str
    prompt_ids: Ids
    sampling: SamplingParams = SamplingParams()
    media: tuple[Media, ...] = ()
    """The media of the prompt, in order; their placeholders in `prompt_ids` are already expanded."""
    deadline: float | None = None
    """`loop.time()` after which the caller no longer waits; None means no deadline."""
    routed_from: int = 0
    """Index of the first token whose experts the completion must report; the caller already has those of earlier tokens."""

    def __post_init__(self) -> None:
        self._freeze(prompt_ids=ids_array)

    def check_heeded(self, completion: Completion) -> None:
        """Check that the completion has no banned id.

        Raises:
            EngineError: the engine sampled a banned id.
        """
        banned = self.sampling.banned_token_ids
        if banned and np.isin(completion.token_ids, banned).any():
            raise EngineError(
                f"the engine sampled a banned token (one of {banned}, which stand for media); use an engine that applies "
                "SamplingParams.banned_token_ids"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(Record):
    """A sampled completion: the unchanged ids of the engine, including the stop token."""

    token_ids: Ids
    logprobs: Floats | None = None
    """[len(token_ids)] log-probability of each token; None from an engine without them, which cannot be trained with."""
    support: Support | None = None
    """[len(token_ids), K] the tokens that each one was drawn from; None unless the request has `keep_support`."""
    finish_reason: FinishReason
    policy_versions: tuple[tuple[int, int], ...] = ((0, 0),)
    """Pairs (index of the first token, policy version), the first at index 0: ((0, 4), (17, 5)) means that version 4 sampled
    tokens 0 to 16, and version 5 the rest."""
    routed_experts: Routes | None = None
    """[R, L, K] the experts of the tokens of prompt and completion, from index `GenerateRequest.routed_from` to the
    second-to-last token (`core/routing.py`); None if the model has no experts or the engine does not report them."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Engine figures of this request, for instance {"prefilled_tokens": 12}."""

    def __post_init__(self) -> None:
        self._freeze(token_ids=ids_array, finish_reason=FinishReason, logprobs=float_array, routed_experts=routes_array)
        self._freeze(support=support_array)
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise AlignmentError(
                f"a completion of {len(self.token_ids)} tokens came with {len(self.logprobs)} logprobs; "
                "an engine must return one per token, the stop token included"
            )
        if self.support is not None and len(self.support) != len(self.token_ids):
            raise AlignmentError(f"a completion of {len(self.token_ids)} tokens came with {len(self.support)} supports")
        starts = [start for start, _ in self.policy_versions]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise AlignmentError(f"policy_versions must be rising runs that start at token 0, not {self.policy_versions}")

    def head(self, count: int, finish_reason: FinishReason) -> Completion:
        """Return a completion of the first `count` tokens, with their logprobs, support, versions and experts."""
        cut = len(self.token_ids) - count
        routes = self.routed_experts
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=None if self.logprobs is None else self.logprobs[:count],
            support=None if self.support is None else self.support[:count],
            finish_reason=finish_reason,
            policy_versions=tuple(run for run in self.policy_versions if run[0] < max(count, 1)),
            routed_experts=None if routes is None else routes[: max(0, len(routes) - cut)],
        )


def support_of(parts: Sequence[Completion]) -> Support | None:
    """Concatenate the supports of the parts of a completion; None if no part has one."""
    return joined_support([(len(part.token_ids), part.support) for part in parts])


def joined_routes(parts: Sequence[Completion]) -> Any | None:
    """Concatenate the routes of the parts of a completion, in order; None if a non-empty part has none."""
    routes = [part.routed_experts for part in parts if part.routed_experts is not None]
    is_whole = all(part.routed_experts is not None for part in parts if len(part.token_ids))
    return np.concatenate(routes) if routes and is_whole else None
