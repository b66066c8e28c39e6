"""The routers of a mixture-of-experts model: their choices in a pass, recorded or replayed.

    router      scores [N, E] of all experts  ->  topk: [N, K] experts and their scores  ->  weights of the chosen
    told        [N, L, K] experts             ->  topk returns these, and their scores gathered from the router's own

Only the choice is exchanged; the scores of the chosen are computed as ever, so gradients reach the router. Whatever else a
router does (softmax before or after, a bias, groups of experts, normalised or not) is the architecture's, and stays: no
formula is written here a second time. Source: Ma et al. 2025 (R3, arXiv 2510.11370).
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
"""In place of a told expert: the router's own choice."""
_TOPK = (torch.topk, Tensor.topk)
_MASKS = (torch.masked_fill, Tensor.masked_fill)


class Routers:
    """The routers of one model, in the order of its layers."""

    def __init__(self, modules: Sequence[nn.Module], shape: RouteShape) -> None:
        self.modules = modules
        self.shape = shape

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the routers of a causal language model, which may be on the meta device; None of one without experts.

        A router is what stands beside the experts of a layer (parameters of three axes, experts first) and has a matrix with
        a row for each of them.

        Raises:
            ConfigError: there are experts, and no router that this finds beside them.
        """
        router_modules, at, counts = [], [], set()
        for name, layer in model.named_modules():
            count, routers = beside_experts(layer)
            own = list(routers.values())
            if count:
                if any("lora_" in part for part, _ in layer.named_parameters()) and not own:
                    raise ConfigError(
                        f"model.lora adapts the {count} experts of a layer, and tokens go to experts as the engine chose "
                        "only where those have no adapter; let model.lora.target_modules name layers of attention (q_proj, "
                        "k_proj, v_proj, o_proj), or set algorithm.routing.replay to off"
                    )
                if len(own) != 1:
                    raise ConfigError(
                        f"{type(layer).__name__} has {count} experts and {len(own)} modules that may be their router; set "
                        "algorithm.routing.replay to off for this model"
                    )
                router_modules += own
                at.append(int(next(part for part in name.split(".") if part.isdigit())))
                counts.add(count)
        if not router_modules:
            return None
        if len(counts) > 1:
            raise ConfigError(
                f"the layers have {sorted(counts)} experts; routes are kept of models whose layers have equally many, so "
                "set algorithm.routing.replay to off for this one"
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
    """Return the number of experts in `layer`, 0 if it has none, and name -> module that may be their router."""
    parts = dict(layer.named_children())
    stack = next((part for part in parts.values() if sum(p.dim() == 3 for p in _own(part)) > 1), None)
    if stack is None:
        return 0, {}
    count = next(p.shape[0] for p in _own(stack) if p.dim() == 3)

    def routes(part: nn.Module) -> bool:
        return part is not stack and any(p.dim() == 2 and p.shape[0] == count for p in _own(part))

    return count, {name: part for name, part in parts.items() if routes(part)}


def require_told(routes: Tensor, shape: RouteShape) -> None:
    """Refuse routes [N, L, K] that are not of a model of `shape`.

    Raises:
        AlignmentError: they are of another one.
    """
    if routes.shape[1:] != (shape.num_layers, shape.top_k) or int(routes.max()) >= shape.num_experts:
        raise AlignmentError(
            f"the samples hold routes of shape {tuple(routes.shape[1:])} with experts up to {int(routes.max())}, and the "
            f"model has {shape.num_experts} experts in each of {shape.num_layers} layers and takes {shape.top_k}; "
            "train the model that was sampled from"
        )


class RoutingPass:
    """Routers' choices in one pass over a batch; a context manager that must also span the backward pass, because layers
    that are computed again must choose the same."""

    def __init__(self, routers: Routers, *, routes: Tensor | None = None) -> None:
        """Prepare a pass.

        Args:
            routers: Of the model.
            routes: [N, L, K] the experts to choose, `LIVE` where the router is to choose itself; None lets all choose.

        Raises:
            AlignmentError: `routes` is of another model.
        """
        shape = routers.shape
        if routes is not None:
            require_told(routes, shape)
        self.shape, self.told = shape, routes
        count = shape.num_layers
        self.chosen: list[Tensor | None] = [None] * count
        """For each layer [N, K] the experts that its tokens went to."""
        self.live: list[Tensor | None] = [None] * count
        """For each layer [N, K] the experts that its router chose by itself."""
        self.logits: list[Tensor | None] = [None] * count
        """For each layer [N, E] what its router gave for each expert, with gradient."""
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
        """Return [N, L, K] the experts that the tokens of the pass went to, and forget them.

        Raises:
            ConfigError: a router did not choose as routers are known to.
        """
        layers = [c for c in self.chosen if c is not None]
        if len(layers) < len(self.chosen):
            raise ConfigError(
                f"{type(self._routers.modules[0]).__name__} takes its experts by something other than topk, so they cannot "
                "be read; set algorithm.routing.replay to off"
            )
        self.chosen, self.logits = [None] * len(layers), [None] * len(layers)
        return torch.stack(layers, dim=1)


class _Choice(TorchFunctionMode):
    """Stands in for `topk` while one router runs."""

    def __init__(self, of: RoutingPass, layer: int) -> None:
        super().__init__()
        self._of, self._layer = of, layer
        self._unmasked: Tensor | None = None
        """The scores of all experts, where the router hid those of some groups from its choice."""

    def begin(self, *_: object) -> None:
        """Before the router's forward pass."""
        self._unmasked = None
        self.__enter__()

    def end(self, module: nn.Module, args: object, output: Any) -> None:
        """Behind it, also where it was broken off because enough of it was computed again."""
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
        if of.told is not None:
            routes = of.told[:, layer].to(torch.int64)
            is_told = routes[:, :1] != LIVE
            chosen = torch.where(is_told, routes, experts)
            scores = scores if self._unmasked is None else self._unmasked
            values = torch.where(is_told, scores.gather(1, chosen), values)
        if of.chosen[layer] is None:
            of.chosen[layer], of.live[layer] = chosen, experts
        return torch.return_types.topk((values, chosen))


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))
