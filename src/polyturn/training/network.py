"""Network: a model as it is trained and sharded, with its whole forward pass inside one module.

    PolicyNetwork    MicroBatch -> log-probabilities of its targets      owns the output embedding
    ValueNetwork     MicroBatch -> values at its targets                 (`critic`)

The root of what is sharded must be what is called, because its hooks gather parameters before a pass; so nothing of a pass,
the head included, happens outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.batching.layout import MicroBatch
from polyturn.engines.routers import Routers, RoutingPass
from polyturn.training.forward import TargetForward, TargetScores
from polyturn.training.lora import adapter_tensors, base_weights, has_lora
from polyturn.training.modality_encoders import touching
from polyturn.training.packed_attention import why_not_packed
from polyturn.training.router_figures import router_figures
from polyturn.training.shards import Names


class Network(nn.Module):
    """What a backend trains; a subclass gives `forward`."""

    whose = "checkpoint"
    """What sentences call a state of it."""
    backbone: PreTrainedModel
    """The part with decoder layers, which may be split over ranks."""
    encoders: Sequence[nn.Module] = ()
    """What only some ranks would run (`modality_encoders`); empty where one process runs everything."""
    names = Names()
    """How its tensors are named and split."""

    @property
    def saved(self) -> nn.Module:
        """The module whose names a state uses."""
        raise NotImplementedError

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """What is sharded by itself beside the layers."""
        return ()

    def scores(self, batch: MicroBatch) -> Tensor:
        """Return [S] what the network says of each target."""
        raise NotImplementedError

    def try_out(self, *, packs: bool) -> str | None:
        """Find out, with its weights in place, how the network is computed; return why it cannot be packed, where it is
        asked and it cannot."""
        return None

    def routed(self, batch: MicroBatch) -> AbstractContextManager[object]:
        """Let tokens go to the experts that the engine chose, in forward and backward passes of `batch` inside."""
        return nullcontext()

    def tensors(self) -> dict[str, Any]:
        """Return name -> live tensor of what training changes: with LoRA the adapter alone; of tied ones the first."""
        return adapter_tensors(self.saved) if has_lora(self.saved) else self.own_tensors()

    def own_tensors(self) -> dict[str, Any]:
        """Return name -> live tensor of the model without an adapter; of tied ones the first."""
        names = dict(self.saved.named_parameters(remove_duplicate=False)).keys()
        again = {name.replace(".base_layer.", ".") for name in names - dict(self.saved.named_parameters()).keys()}
        return {name: tensor for name, tensor in base_weights(self.saved).items() if name not in again}


class PolicyNetwork(Network):
    """A causal language model that gives log-probabilities."""

    def __init__(self, model: PreTrainedModel, *, routers: Routers | None = None, replays: bool = True) -> None:
        """Take a model; where it has `routers` they are looked at, and `replays` says whether they follow the engine's."""
        super().__init__()
        self.backbone = model
        self._targets = TargetForward(model)
        self._routers, self._replays = routers, replays
        self._routing: RoutingPass | None = None

    @property
    def saved(self) -> PreTrainedModel:
        """The model, under its own names."""
        return self.backbone

    def try_out(self, *, packs: bool) -> str | None:
        """Find out whether the head may be computed by itself, and whether samples may be packed."""
        self._targets.find_head()
        return why_not_packed(self.backbone) if packs else None

    @contextmanager
    def routed(self, batch: MicroBatch) -> Iterator[None]:
        """Let tokens go to the experts that the engine chose, and look at what routers choose."""
        if self._routers is None:
            yield
            return
        try:
            with RoutingPass(self._routers, told=batch.routes_NLK if self._replays else None) as self._routing:
                yield
        finally:
            self._routing = None

    def forward(self, batch: MicroBatch, *, balance_grad: bool = False, **options: Any) -> TargetScores:
        """Return what the forward pass gives for each target; inside `routed` also of routers, with gradient if asked."""
        scores = self._targets(batch, **options)
        if self._routing is not None:
            figures = router_figures(self._routing, batch, with_grad=balance_grad, replays=self._replays)
            scores = scores._replace(balance_S=figures.balance_S, metrics=figures.metrics)
        # The hook of a sharded module's backward pass must not sit on a view, hence the copy.
        return scores._replace(logprobs_S=touching(scores.logprobs_S.clone(), self.encoders))

    def scores(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        found: TargetScores = self(batch)
        return found.logprobs_S
