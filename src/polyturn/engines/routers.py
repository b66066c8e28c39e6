"""Record or replay the choices of the routers of a mixture-of-experts model.

    router      scores [N, E] of all experts  ->  topk: [N, K] experts and their scores  ->  weights of the chosen
    recorded    [N, L, K] experts             ->  topk returns these experts, with their scores from the router

Only the choice is replaced. The scores of the chosen experts are computed as usual, so gradients reach the router. The model
does everything else in the router itself (softmax before or after, a bias, groups of experts, normalisation).
Source: Ma et al. 2025 (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from polyturn.core.errors import AlignmentError, ConfigError
from polyturn.core.routing import RouteShape

LIVE = -1
"""In place of a recorded expert: the router chooses."""
_TOPK = (torch.topk, Tensor.topk)
_MASKS = (torch.masked_fill, Tensor.masked_fill)


class Routers:
    """The routers of one model, in the order of its layers."""

    def __init__(self, modules: Sequence[nn.Module], shape: RouteShape) -> None:
        self.modules = modules
        self.shape = shape

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the routers of a causal language model, which may be on the meta device; None for a model without experts.

        A router is a sibling of a layer's experts (parameters with three axes, experts first) with a matrix that has a row
        per expert.

        Raises:
            ConfigError: there are experts without a recognisable router.
        """
        router_modules, at, counts = [], [], set()
        for name, layer in model.named_modules():
            count, routers = beside_experts(layer)
            own = list(routers.values())
            if count:
                if any("lora_" in part for part, _ in layer.named_parameters()) and not own:
                    raise ConfigError(
                        f"model.lora adapts the {count} experts of a layer, and routes can be replayed only for "
                        "experts without an adapter; set model.lora.target_modules to layers of attention (q_proj, "
                        "k_proj, v_proj, o_proj), or algorithm.routing.replay to off"
                    )
                if len(own) != 1:
                    raise ConfigError(
                        f"{type(layer).__name__} has {count} experts and {len(own)} modules that could be their router; "
                        "set algorithm.routing.replay to off for this model"
                    )
                router_modules += own
                at.append(int(next(part for part in name.split(".") if part.isdigit())))
                counts.add(count)
        if not router_modules:
            return None
        if len(counts) > 1:
            raise ConfigError(
                f"the layers have {sorted(counts)} experts; routes require the same number in all layers, so set "
                "algorithm.routing.replay to off for this model"
            )
        assert isinstance(model, PreTrainedModel)
        config = model.config.get_text_config()
        return cls(
            router_modules,
            RouteShape(
                num_layers=len(router_modules),
                top_k=int(config.num_experts_per_tok),
                num_experts=counts.pop(),
                layers=tuple(at),
                num_hidden_layers=int(config.num_hidden_layers),
            ),
        )


def beside_experts(layer: nn.Module) -> tuple[int, dict[str, nn.Module]]:
    """Return the number of experts in `layer`, 0 if it has none, and name -> module that could be their router."""
    parts = dict(layer.named_children())
    stack = next((part for part in parts.values() if sum(p.dim() == 3 for p in _own(part)) > 1), None)
    if stack is None:
        return 0, {}
    count = next(p.shape[0] for p in _own(stack) if p.dim() == 3)

    def routes(part: nn.Module) -> bool:
        return part is not stack and any(p.dim() == 2 and p.shape[0] == count for p in _own(part))

    return count, {name: part for name, part in parts.items() if routes(part)}


def require_same_shape(routes: Tensor, shape: RouteShape, *, num_experts: int) -> None:
    """Raise unless routes [N, L, K], to experts below `num_experts`, are of a model of `shape`.

    Raises:
        AlignmentError: they are of another model.
    """
    if routes.shape[1:] != (shape.num_layers, shape.top_k) or num_experts > shape.num_experts:
        raise AlignmentError(
            f"the samples have routes of shape {tuple(routes.shape[1:])} with experts up to {num_experts - 1}, and "
            f"the model has {shape.num_experts} experts in each of {shape.num_layers} layers and uses {shape.top_k}; "
            "train the model that sampled them"
        )


class RoutingPass:
    """The routers' choices in one pass over a batch. The context must also span the backward pass, because recomputed layers
    must choose the same experts."""

    def __init__(self, routers: Routers, *, routes: Tensor | None = None) -> None:
        """Prepare a pass.

        Args:
            routers: The routers of the model.
            routes: [N, L, K] the experts to choose, of this model (`require_same_shape`); `LIVE` leaves a choice to the
                router, and None leaves all choices to the routers.
        """
        shape = routers.shape
        self.shape, self.recorded = shape, routes
        count = shape.num_layers
        self.chosen: list[Tensor | None] = [None] * count
        """For each layer [N, K] the experts of its tokens."""
        self.live: list[Tensor | None] = [None] * count
        """For each layer [N, K] the experts that its router would choose."""
        self.logits: list[Tensor | None] = [None] * count
        """For each layer [N, E] the router's scores, with gradient."""
        self._routers = routers
        self._handles: list[Any] = []

    def __enter__(self) -> RoutingPass:
        for layer, module in enumerate(self._routers.modules):
            choice = _Choice(self, layer)
            self._handles += [
                module.register_forward_pre_hook(choice.begin),
                module.register_forward_hook(choice.end, always_call=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read_choices(self) -> Tensor:
        """Return [N, L, K] the experts of the tokens of the pass, and forget them.

        Raises:
            ConfigError: a router did not call topk as expected.
        """
        layers = [c for c in self.chosen if c is not None]
        if len(layers) < len(self.chosen):
            raise ConfigError(
                f"{type(self._routers.modules[0]).__name__} chooses its experts by something other than topk, so they "
                "cannot be recorded; set algorithm.routing.replay to off"
            )
        self.chosen, self.logits = [None] * len(layers), [None] * len(layers)
        return torch.stack(layers, dim=1)


class _Choice(TorchFunctionMode):
    """Stands in for `topk` while one router runs."""

    def __init__(self, of: RoutingPass, layer: int) -> None:
        super().__init__()
        self._of, self._layer = of, layer
        self._unmasked: Tensor | None = None
        """The scores of all experts, if the router masked some groups before its choice."""

    def begin(self, *_: object) -> None:
        """Start before the router's forward pass."""
        self._unmasked = None
        self.__enter__()

    def end(self, module: nn.Module, args: object, output: Any) -> None:
        """Finish after the forward pass, even if a recomputation stopped it early."""
        self.__exit__(None, None, None)
        if output is not None and self._of.logits[self._layer] is None:
            self._of.logits[self._layer] = output[0]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_of_all = func in (*_TOPK, *_MASKS) and args[0].dim() == 2 and args[0].shape[1] == self._of.shape.num_experts
        if is_of_all and func in _MASKS:
            self._unmasked = args[0]
        return self._choose(args[0], *out) if is_of_all and func in _TOPK else out

    def _choose(self, scores: Tensor, values: Tensor, experts: Tensor) -> Any:
        of, layer = self._of, self._layer
        chosen = experts
        if of.recorded is not None:
            routes = of.recorded[:, layer].to(torch.int64)
            is_recorded = routes[:, :1] != LIVE
            chosen = torch.where(is_recorded, routes, experts)
            scores = scores if self._unmasked is None else self._unmasked
            values = torch.where(is_recorded, scores.gather(1, chosen), values)
        if of.chosen[layer] is None:
            of.chosen[layer], of.live[layer] = chosen, experts
        return torch.return_types.topk((values, chosen))


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))
