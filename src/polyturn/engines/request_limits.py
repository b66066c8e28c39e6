"""Checks at the edge of engines: of requests, of the answers of servers, and of models that cannot be computed."""

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
    """Facts about a server's model that its client checks requests against."""

    vocab_size: int
    """Ids from here on are refused."""
    max_context: int | None = None
    """The longest prompt plus completion, in tokens; None is the server's own limit."""
    media: MediaProcessor | None = None
    """Its processor, if it sees; the server needs the same one beside its weights."""
    routes: RouteShape | None = None
    """Its router sizes, where the server is to say which experts tokens went to; None does not ask."""
    needs_routes: bool = False
    """Refuse a server that does not say so."""
    folder: Path | None = None
    """The folder with its config, for a client that writes new weights by itself; None where a pool does, or where they
    never change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of requests to an engine of our own, in this process or in another."""

    vocab_size: int
    max_context: int
    """The longest prompt plus completion."""
    takes_media: bool
    """Whether it has a processor for what prompts show."""
    routes: bool = False
    """Whether it says which experts tokens went to."""

    @classmethod
    def of(
        cls, model: PreTrainedModel, *, max_context: int | None, takes_media: bool, routes: bool = False
    ) -> RequestLimits:
        """Return the limits of an engine of `model`; `max_context` is the model's own limit unless given.

        Raises:
            ConfigError: the model has layers other than full attention.
        """
        config = model.config.get_text_config()
        limit = max_context or int(config.max_position_embeddings)
        check_attention(config.to_dict(), limit)
        return cls(vocab_size=int(config.vocab_size), max_context=limit, takes_media=takes_media, routes=routes)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Seeded, with logprobs in training's meaning."""
        return EngineCapabilities(
            seeded=True,
            logprobs=True,
            media=self.takes_media,
            pause_modes=("keep",),
            max_context=self.max_context,
            shares_weights=True,
            routes=self.routes,
            support=True,
        )

    def check(self, request: GenerateRequest, *, live: Container[str], is_closed: bool) -> None:
        """Refuse a request that cannot be served.

        Raises:
            EngineError: the engine is closed, or as `check_request` says.
        """
        if is_closed:
            raise EngineError(f"request {request.request_id!r} came after the embedded engine was closed; make a new engine")
        check_request(
            request, live=live, vocab_size=self.vocab_size, max_context=self.max_context, takes_media=self.takes_media
        )


def check_request(
    request: GenerateRequest, *, live: Container[str], vocab_size: int, max_context: int | None, takes_media: bool
) -> None:
    """Refuse a request that cannot be served.

    Raises:
        EngineError: the prompt is empty, does not fit or holds an id that the model does not have, the request's id is live,
            or it shows media to an engine that takes none.
    """
    name = f"request {request.request_id!r}"
    if request.media and not takes_media:
        raise EngineError(f"{name} has media, and the engine was given no processor; without one it serves text only")
    if request.request_id in live:
        raise EngineError(f"request id {request.request_id!r} is live already; use a fresh id for every request")
    length = len(request.prompt_ids)
    if length == 0:
        raise EngineError(f"{name} has an empty prompt; give at least one token")
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"{name} holds token id {low if low < 0 else high}, and the model's vocabulary ends at {vocab_size - 1}; "
            "tokenizer and model do not belong together"
        )
    if max_context is not None and length >= max_context:
        raise EngineError(
            f"{name} has a prompt of {length} tokens and the context holds {max_context}, "
            "the completion included; shorten the history or raise max_context"
        )


MAX_LOGPROB = 1e-3
"""A log-probability of a server may be above 0 by rounding, not by more."""


def read_ids(values: Any, *, vocab_size: int, max_tokens: int) -> Ids:
    """The sampled ids of a server's answer, [T].

    Raises:
        ValueError: they are not whole numbers, the model has no such id, or there are more than `max_tokens`.
    """
    ids = np.asarray(values if values is not None else [])
    if ids.size == 0:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids {str(values)[:60]}, which are not a list of whole numbers")
    if len(ids) > max_tokens:
        raise ValueError(f"{len(ids)} tokens, and {max_tokens} were asked for")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token id {low if low < 0 else high}, and the model's vocabulary ends at {vocab_size - 1}")
    return ids.astype(np.int32)


REMOVED = -9000.0
"""vLLM gives tokens that top-k or top-p removed a log-probability below this."""


def read_support(content: Sequence[Mapping[str, Any]]) -> Support:
    """Return [T, K] the tokens that a vLLM server kept at each position: those of `top_logprobs` that have a probability."""
    kept = [
        [entry["token_id"], *(top["token_id"] for top in entry["top_logprobs"] if top["logprob"] > REMOVED)]
        for entry in content
    ]
    rows = [list(dict.fromkeys(ids)) for ids in kept]  # the sampled token stands in both
    support_TK = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int32)
    for row, ids in zip(support_TK, rows, strict=True):
        row[: len(ids)] = ids
    return support_array(support_TK)


def read_logprobs(values: Any) -> Floats:
    """The log-probabilities of a server's answer, [T].

    Raises:
        ValueError: one is null, not a number, or above 0.
    """
    logprobs = np.asarray(values)
    if logprobs.size == 0:
        return np.empty(0, np.float32)
    if logprobs.ndim != 1 or logprobs.dtype.kind not in "fi" or np.isnan(logprobs).any():
        raise ValueError(f"log-probabilities {str(values)[:60]}, of which one is not a number")
    if (highest := float(logprobs.max())) > MAX_LOGPROB:
        raise ValueError(f"log-probability {highest:g}, and none is above 0")
    return logprobs.astype(np.float32)


def check_attention(config: Mapping[str, Any], max_context: int) -> None:
    """Refuse a model whose layers would need another mask or another cache than full attention.

    Raises:
        ConfigError: it has such layers.
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
