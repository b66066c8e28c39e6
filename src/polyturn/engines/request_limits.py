"""Checks of requests to engines, of servers' answers, and of models that the embedded engine cannot compute."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polyturn.core.arrays import Floats, Ids, Support, support_array
from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import GenerateRequest
from polyturn.core.protocols import EngineCapabilities

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.core.routing import RouteShape
    from polyturn.tokens.multimodal import MediaProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Facts about a served model, for the checks of its client."""

    vocab_size: int
    """Ids must be below this."""
    max_context: int | None = None
    """Largest length of prompt plus completion, in tokens; None takes the server's limit."""
    media: MediaProcessor | None = None
    """The processor of a model with media; the server needs the same one with its weights."""
    routes: RouteShape | None = None
    """The router sizes, if the server must report the experts of tokens; None does not request them."""
    needs_routes: bool = False
    """Whether a server that does not report experts is an error."""
    adapter: Mapping[str, Any] | None = None
    """peft's settings of the adapter that the server will be sent; None if it is sent none."""
    folder: Path | None = None
    """The folder with the model's config, for a client that writes new weights itself; None if a pool does, or if weights
    never change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of requests to an embedded engine, in this process or in another."""

    vocab_size: int
    max_context: int
    """Largest length of prompt plus completion, in tokens."""
    takes_media: bool
    """Whether it has a processor for media."""
    routes: bool = False
    """Whether it reports the experts of tokens."""

    @classmethod
    def of(
        cls, model: PreTrainedModel, *, max_context: int | None, takes_media: bool, routes: bool = False
    ) -> RequestLimits:
        """Return the limits of an engine of `model`; a `max_context` of None takes the model's limit.

        Raises:
            ConfigError: the model has layers other than full attention.
        """
        config = model.config.get_text_config()
        limit = max_context or int(config.max_position_embeddings)
        check_attention(config.to_dict(), limit)
        return cls(vocab_size=int(config.vocab_size), max_context=limit, takes_media=takes_media, routes=routes)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Seeded, with logprobs as in training."""
        return EngineCapabilities(
            seeded=True,
            logprobs=True,
            media=self.takes_media,
            max_context=self.max_context,
            shares_weights=True,
            routes=self.routes,
            support=True,
        )

    def check(self, request: GenerateRequest, *, live: Container[str], is_closed: bool) -> None:
        """Raise for a request that cannot be served.

        Raises:
            EngineError: the engine is closed, or `check_request` raises.
        """
        if is_closed:
            raise EngineError(f"request {request.request_id!r} came after the embedded engine was closed; make a new engine")
        check_request(
            request, live=live, vocab_size=self.vocab_size, max_context=self.max_context, takes_media=self.takes_media
        )


def check_request(
    request: GenerateRequest, *, live: Container[str], vocab_size: int, max_context: int | None, takes_media: bool
) -> None:
    """Raise for a request that cannot be served.

    Raises:
        EngineError: the prompt is empty, does not fit or contains an id outside the vocabulary, the request's id is live, or
            it has media and the engine supports none.
    """
    name = f"request {request.request_id!r}"
    if request.media and not takes_media:
        raise EngineError(f"{name} has media, and the engine has no processor, so it serves text only")
    if request.request_id in live:
        raise EngineError(f"request id {request.request_id!r} is live already; use a fresh id for every request")
    length = len(request.prompt_ids)
    if length == 0:
        raise EngineError(f"{name} has an empty prompt; give at least one token")
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"{name} has the token id {low if low < 0 else high}, and the model's vocabulary ends at {vocab_size - 1}; "
            "tokenizer and model do not match"
        )
    if max_context is not None and length >= max_context:
        raise EngineError(
            f"{name} has a prompt of {length} tokens, and prompt plus completion may have {max_context}; shorten the "
            "history or raise max_context"
        )


MAX_LOGPROB = 1e-3
"""Largest accepted log-probability of an engine: rounding may put it slightly above 0."""


def read_ids(values: Any, *, vocab_size: int, max_tokens: int) -> Ids:
    """Return [T] the sampled ids of a server's answer.

    Raises:
        ValueError: they are not integers, an id is outside the vocabulary, or there are more than `max_tokens`.
    """
    ids = np.asarray(values if values is not None else [])
    if ids.size == 0:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids {str(values)[:60]}, which are not a list of whole numbers")
    if len(ids) > max_tokens:
        raise ValueError(f"{len(ids)} tokens, more than the {max_tokens} that were requested")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token id {low if low < 0 else high}, and the model's vocabulary ends at {vocab_size - 1}")
    return ids.astype(np.int32)


REMOVED = -9000.0
"""vLLM reports a log-probability below this for tokens that top-k or top-p removed."""


def read_support(content: Sequence[Mapping[str, Any]]) -> Support:
    """Return [T, K] the tokens that a vLLM server kept at each position: those in `top_logprobs` with a probability."""
    kept = [
        [entry["token_id"], *(top["token_id"] for top in entry["top_logprobs"] if top["logprob"] > REMOVED)]
        for entry in content
    ]
    rows = [list(dict.fromkeys(ids)) for ids in kept]  # the sampled token is in both
    support_TK = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int32)
    for row, ids in zip(support_TK, rows, strict=True):
        row[: len(ids)] = ids
    return support_array(support_TK)


def read_logprobs(values: Any) -> Floats:
    """Return [T] the log-probabilities of a server's answer.

    Raises:
        ValueError: a value is null, not a number, or above 0.
    """
    logprobs = np.asarray(values)
    if logprobs.size == 0:
        return np.empty(0, np.float32)
    if logprobs.ndim != 1 or logprobs.dtype.kind not in "fi" or np.isnan(logprobs).any():
        raise ValueError(f"log-probabilities {str(values)[:60]}, of which one is not a number")
    if (highest := float(logprobs.max())) > MAX_LOGPROB:
        raise ValueError(f"log-probability {highest:g}, which is above 0")
    return logprobs.astype(np.float32)


def check_attention(config: Mapping[str, Any], max_context: int) -> None:
    """Raise for a model with layers other than full attention, which need another mask or cache.

    Raises:
        ConfigError: the model has such layers.
    """
    window = config.get("sliding_window")
    layers = config.get("layer_types") or ["full_attention" if window is None else "sliding_attention"]
    kinds = sorted(set(layers))
    is_full = kinds == ["full_attention"]
    if is_full or (window is not None and window >= max_context and set(kinds) <= {"full_attention", "sliding_attention"}):
        return
    raise ConfigError(
        f"the embedded engine computes full attention, and this model has {kinds} layers (window {window}) for a context of "
        f"{max_context} tokens; lower max_context to the window or use a served engine"
    )
