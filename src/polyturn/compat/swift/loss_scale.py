"""swift.loss_scale: users' strategies that select the trained parts of a reply. They become native masks.

    class Last(LossScale):
        def get_loss_scale(self, context, **kwargs): return [context], [1.0 if "####" in context else 0.0]
    loss_scale_map["mine"] = Last                                            --loss_scale mine

In reinforcement learning a strategy only masks: parts with a weight above 0 are trained. A scheduler's mask overrides it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyturn.batching.loss_scale import SampledTurn
from polyturn.batching.loss_scale import loss_scale as native
from polyturn.compat.swift.registry import PluginDict
from polyturn.compat.swift.template import ContextType
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError
from polyturn.infra.plugin_shape import has_parameter, num_positional, takes_any_keyword


class SwiftLossScale:
    """A strategy that splits a reply, without its end token, into pieces and weights each."""

    is_binary: bool | None = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_loss_scale(self, context: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[float]]:
        """Return the pieces of a reply, whose concatenation is the reply, and their weights."""
        return [context], [1.0]


LossScale = SwiftLossScale  # the name in users' imports


class REACTLossScale(LossScale):
    """Leaves out observations that the model itself writes."""

    headings: Sequence[str] = ("Action:", "Action Input:", "Thought:", "Final Answer:", "Observation:")
    left_out = "Observation:"
    """The heading whose text, up to the next heading, is not trained."""

    def get_loss_scale(self, context: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[float]]:
        """Return the pieces with weight 0 for texts under the heading `left_out` and 1 for other text."""
        pieces = re.split(f"({'|'.join(map(re.escape, self.headings))})", context)
        return pieces, [float(before != self.left_out) for before in ["", *pieces[:-1]]]


class AlphaUmiLossScale(REACTLossScale):
    """As REACT, with another heading."""

    headings = (*REACTLossScale.headings, "Next:")


class AgentFlanLossScale(REACTLossScale):
    """As REACT, with more headings, but trains the whole answer to a question about a call."""

    headings = (
        *REACTLossScale.headings,
        *("Name:", "ACTION:", "Tool:", "Command", "Arguments:", "action input", "ACTION_INPUT:"),
    )
    queries = ("What is the tool you want to use", "What are the required parameter names", "What is the value of")
    """Texts of questions whose answer has one weight, 3."""

    def get_loss_scale(
        self, context: str, *args: Any, query: str | None = None, **kwargs: Any
    ) -> tuple[list[str], list[float]]:
        """Return the reply as one piece if `query` contains one of `queries`, else the pieces of REACT."""
        if any(text in (query or "") for text in self.queries):
            return [context], [3.0]
        return super().get_loss_scale(context)


class QwenLossScale(REACTLossScale):
    """Leaves out results that the model itself writes."""

    headings = ("✿FUNCTION✿:", "✿ARGS✿:", "✿RETURN✿:", "✿RESULT✿:")
    left_out = "✿RESULT✿:"


class LossScaleDict(PluginDict):
    """Name -> strategy; each also becomes the native mask of that name."""

    def __setitem__(self, name: str, entry: Any) -> None:
        super().__setitem__(name, entry)
        native.register(name, replace=name in native)(_as_mask(name))


def _as_mask(name: str) -> Any:
    def mask(turns: Sequence[SampledTurn]) -> list[Any]:
        entry = loss_scale_map[name]
        check_strategy(entry, name=name)
        strategy = entry() if isinstance(entry, type) else entry
        return [_weights(strategy, turn, name=name) for turn in turns]

    return mask


def check_strategy(strategy: Any, *, name: str) -> None:
    """Refuse a strategy, or its class, whose weights are not those of its `get_loss_scale`.

    Raises:
        ConfigError: it has a method `__call__`, or a file of weights.
    """
    if "__call__" in dir(strategy if isinstance(strategy, type) else type(strategy)):
        raise ConfigError(
            f"the loss_scale {name!r} has a method __call__, which has no effect; only get_loss_scale of a reply is "
            f"called{defined_at(strategy)}"
        )
    if getattr(strategy, "loss_scale_config", None):
        raise ConfigError(
            f"the loss_scale {name!r} has a loss_scale_config, which is not read; write its weights of 0 as a "
            f"get_loss_scale{defined_at(strategy)}"
        )


def _cut(strategy: Any, turn: SampledTurn) -> tuple[list[str], list[float]]:
    """Call a strategy on a reply; releases before 4 also pass the kind of text and whether it is the last round."""
    method = strategy.get_loss_scale
    round_of = (ContextType.RESPONSE, turn.is_last_round) if (num_positional(method) or 1) >= 3 else ()
    options = {"query": turn.query} if takes_any_keyword(method) or has_parameter(method, "query") else {}
    cut: tuple[list[str], list[float]] = method(turn.reply, *round_of, **options)
    return cut


def _weights(strategy: Any, turn: SampledTurn, *, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    pieces, weights = _cut(strategy, turn)
    if "".join(pieces) != turn.reply or len(pieces) != len(weights):
        raise ConfigError(
            f"the loss_scale {name!r} split a reply into {pieces!r:.100} with {len(weights)} weights; the pieces must add "
            "up to the reply, with a weight for each"
        )
    parts, at, is_trained = [], 0, True
    for piece, weight in zip(pieces, weights, strict=True):
        is_trained = weight > 0 if piece or not turn.reply else is_trained
        parts.append((at, at + len(piece), float(weight > 0)))
        at += len(piece)
    # The end token is trained if the end of the reply is.
    return turn.weights_of([*parts, (at, len(turn.text), float(is_trained))])


loss_scale_map = LossScaleDict("loss_scale_map")
for _name in ("default", "last_round", "all", "ignore_empty_think", "ignore_think_prefix"):
    dict.__setitem__(loss_scale_map, _name, LossScale)
for _name in ("base", "hermes"):  # hermes has only weights above 0
    loss_scale_map[_name] = LossScale
loss_scale_map["react"] = REACTLossScale
loss_scale_map["qwen"] = QwenLossScale
loss_scale_map["agentflan"] = AgentFlanLossScale
loss_scale_map["alpha_umi"] = AlphaUmiLossScale
