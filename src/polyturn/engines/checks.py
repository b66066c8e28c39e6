"""What engines refuse, in sentences: requests that cannot be served, models that the embedded engine cannot compute."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import GenerateRequest


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
