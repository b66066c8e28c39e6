"""ScoringModel: the module that is trained and sharded, with the whole forward pass from micro-batch to targets.

    PolicyModel    MicroBatch -> log-probabilities of its targets      contains the output embedding
    ValueModel     MicroBatch -> values at its targets                 contains a value head

Log-probabilities are log_softmax(logits / temperature), over the vocabulary, or over the tokens that top-k and top-p left if
the sample recorded them (`support_SK`). Most of training's time and memory is spent here, so hidden states of targets are
gathered first, and only they go through the vocabulary projection. Some models also scale or cap logits, so a test on a few
tokens shows whether the logits are the output embedding applied to the last hidden state.

The hooks of the sharded root module gather parameters before a pass. So the whole pass, including the head, runs inside this
module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from polyturn.algorithms.kl import entropy
from polyturn.batching.layout import MicroBatch
from polyturn.engines.routers import Routers, RoutingPass, require_same_shape
from polyturn.training.context_parallel import ContextRow, ContextShare
from polyturn.training.head import OUTSIDE, Fusion, compiles_on, is_plain, outside, target_scores
from polyturn.training.lora import base_weights, has_lora, plain_name, whole_merged
from polyturn.training.modality_encoders import touching
from polyturn.training.packed_attention import PackedView, attending, why_not_packed
from polyturn.training.router_figures import Figures, router_figures
from polyturn.training.shards import Names

_T = TypeVar("_T")


class TargetScores(NamedTuple):
    """The result of the forward pass for each target."""

    logprobs_S: Tensor
    """[S] in at least float32, with gradient unless gradients are off."""
    entropy_S: Tensor | None
    """[S] entropy of the distribution that each target was drawn from, in nats; None unless requested."""
    balance_S: Tensor | None = None
    """[S] the balance loss of each target's sequence; None without routers."""
    figures: Figures = MappingProxyType({})
    """Metrics of the routers, on the device."""

    def at(self, index: Tensor) -> TargetScores:
        """Return the scores of the targets at `index`."""
        entropy_S, balance_S = (None if t is None else t[index.to(t.device)] for t in (self.entropy_S, self.balance_S))
        return self._replace(logprobs_S=self.logprobs_S[index], entropy_S=entropy_S, balance_S=balance_S)


MAX_LOGITS = 2**27
"""Largest number of logits computed at a time: 512 MiB in float32, of which about three tensors exist at once."""
MAX_LOGITS_CPU = 2**22
"""The same on a CPU, 16 MiB: there, touching fresh memory pages costs as much as computing the logits."""
_LOUD = 1e3
"""The largest logit in the test of a head."""
MIN_CHUNK = 128
"""Smallest number of targets per chunk, because every chunk reads the whole output embedding."""


class ScoringModel(nn.Module):
    """A network that a backend trains. A subclass implements `forward`."""

    whose = "checkpoint"
    """The name of its state in error messages."""
    backbone: PreTrainedModel
    """The part with decoder layers, which may be split over ranks."""
    encoders: Sequence[nn.Module] = ()
    """Modules that run only on some ranks (`modality_encoders`); empty in one process."""
    context: ContextRow | None = None
    """The ranks that split the tokens of each batch; None if this rank computes all."""
    names = Names()
    """The names and splits of its tensors."""

    @property
    def saved(self) -> nn.Module:
        """The module whose names the state uses."""
        raise NotImplementedError

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """Modules other than layers that are sharded separately from the root."""
        return ()

    def scores(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability or value of each target."""
        output: TargetScores | Tensor = self(batch)
        return output.logprobs_S if isinstance(output, TargetScores) else output

    def entropies(self, batch: MicroBatch) -> Tensor:
        """Return [S] the entropy of the distribution of each target; only a policy has one."""
        target_scores: TargetScores = self(batch, entropy_grad=False)
        assert target_scores.entropy_S is not None
        return target_scores.entropy_S

    def cut(self, batch: MicroBatch) -> tuple[MicroBatch, ContextShare | None]:
        """Return the part of `batch` that this rank computes, and the description of the share; None if the part is all."""
        return (batch, None) if self.context is None else self.context.cut(batch)

    def try_out(self, *, packs: bool) -> str | None:
        """Test, with weights loaded, how the network can be computed. With `packs`, return the reason if it cannot be
        packed, else None."""
        return None

    def routed(self, batch: MicroBatch) -> AbstractContextManager[object]:
        """Within the context, compute passes with the attention of `batch`'s layout and the experts that the engine
        chose."""
        return nullcontext()

    def tensors(self) -> dict[str, Any]:
        """Return name -> live tensor that training changes: with LoRA only the adapter, and a value function's head. Tied
        tensors have the first name."""
        if not has_lora(self.saved):
            return self.own_tensors()
        return {name: p.detach() for name, p in self.saved.named_parameters() if p.requires_grad}

    def own_tensors(self) -> dict[str, Any]:
        """Return name -> live tensor of the model without an adapter. Tied tensors have the first name."""
        names = dict(self.saved.named_parameters(remove_duplicate=False)).keys()
        again = {plain_name(name) for name in names - dict(self.saved.named_parameters()).keys()}
        return {name: tensor for name, tensor in base_weights(self.saved).items() if name not in again}

    def merged(self, name: str, whole: Any) -> Any:
        """Return a whole weight, on ranks that have it, with the adapter added; the call is collective."""
        return whole_merged(self.saved, name, whole)


class TargetForward:
    """Computes log-probabilities at the targets with a model."""

    def __init__(self, model: PreTrainedModel, *, max_logits: int | None = None) -> None:
        """Take the model.

        Args:
            model: The model; it may still move to another device. Call `find_head` once it has weights.
            max_logits: Number of logits computed at a time; None takes `MAX_LOGITS` or `MAX_LOGITS_CPU`.
        """
        self._model = model
        self._head: nn.Module | None = None
        self._is_tried = False
        self._vocab = int(model.config.get_text_config().vocab_size)
        self._max_logits = max_logits
        self._fusion = Fusion()
        if not next(model.parameters()).is_meta:
            self.find_head()

    @property
    def reads_hidden_states(self) -> bool:
        """Whether only the hidden states of targets go through the output embedding."""
        return self._head is not None

    def find_head(self) -> None:
        """Test whether the logits are the output embedding applied to the last hidden state."""
        if not self._is_tried:
            self._head, self._is_tried = _separate_head(self._model), True

    def __call__(
        self, batch: MicroBatch, share: ContextShare | None = None, *, entropy_grad: bool | None = None
    ) -> TargetScores:
        """Return the log-probability of each target of `batch`, and the entropy.

        Logits are computed for a chunk of targets at a time, and again in the backward pass. Only a model whose logits are
        not its output embedding applied to the last hidden state computes [S, V] at once.

        Args:
            batch: A micro-batch from `layout`, on the model's device.
            share: This rank's share of a micro-batch, if `batch` was cut from one; the results are for all its targets.
            entropy_grad: None: no entropy. False: entropy without gradient (a metric). True: with gradient (a loss term).
        """
        # No attention mask: rows are padded on the right and attention is causal, so no target attends to padding, and the
        # attention kernel builds no T x T mask.
        inputs = _inputs(batch, share, dtype=self._model.dtype)
        with attending(self._model, batch.packing):
            # At each target, the last hidden state [S, H], or the logits [S, V].
            if self._head is None:
                out_BTX: Tensor = self._model(**inputs).logits
            else:
                out_BTX = self._model.base_model(**inputs).last_hidden_state
            read_SX = out_BTX.flatten(0, 1).index_select(0, batch.flat_S)
        chunk = self._chunk(read_SX.device)
        if self._head is not None and is_plain(self._head):
            head = cast(nn.Linear, self._head)
            scores = target_scores(
                head,
                read_SX,
                batch.targets_S,
                batch.temperature_S,
                batch.support_SK,
                entropy_grad=entropy_grad,
                chunk=chunk,
                fusion=self._fusion if compiles_on(read_SX.device) else None,
            )
            return _whole(TargetScores(*scores), share)
        score = functools.partial(_score, self._head, entropy_grad=entropy_grad)
        parts = in_chunks(score, chunk, read_SX, batch.targets_S, batch.temperature_S, batch.support_SK)
        entropies = [p.entropy_S for p in parts if p.entropy_S is not None]
        logprobs_S = torch.cat([p.logprobs_S for p in parts])
        return _whole(TargetScores(logprobs_S, torch.cat(entropies) if entropies else None), share)

    def _chunk(self, device: torch.device) -> int:
        """Return the number of targets per chunk on `device`."""
        if self._max_logits is not None:
            return max(1, self._max_logits // self._vocab)
        return max(MIN_CHUNK, (MAX_LOGITS_CPU if device.type == "cpu" else MAX_LOGITS) // self._vocab)


class PolicyModel(ScoringModel):
    """A causal language model that returns log-probabilities."""

    def __init__(self, model: PreTrainedModel, *, routers: Routers | None = None, replays: bool = True) -> None:
        """Wrap a model. Its `routers`, if any, are recorded; with `replays` they follow the engine's choices."""
        super().__init__()
        self.backbone = model
        self._targets = TargetForward(model)
        self._routers, self._replays = routers, replays
        self._routing: RoutingPass | None = None

    @property
    def saved(self) -> PreTrainedModel:
        """The model."""
        return self.backbone

    def try_out(self, *, packs: bool) -> str | None:
        """Test whether the head can be computed by itself, and whether samples can be packed."""
        self._targets.find_head()
        return why_not_packed(self.backbone) if packs else None

    @contextmanager
    def routed(self, batch: MicroBatch) -> Iterator[None]:
        """Send tokens to the experts that the engine chose, record the routers' choices, and attend by `batch`'s layout."""
        with attending(self.backbone, batch.packing):
            if self._routers is None:
                yield
                return
            try:
                routes = self.cut(batch)[0].routes_NLK if self._replays else None
                if routes is not None:
                    require_same_shape(routes, self._routers.shape, num_experts=batch.num_experts)
                with RoutingPass(self._routers, routes=routes) as self._routing:
                    yield
            finally:
                self._routing = None

    def forward(self, batch: MicroBatch, *, balance_grad: bool = False, **options: Any) -> TargetScores:
        """Return the scores of each target; within `routed` also the balance loss, with gradient if `balance_grad`."""
        own, share = self.cut(batch)
        scores = self._targets(own, share, **options)
        if self._routing is not None:
            routing = self._routing if share is None else self._over_row(self._routing, share, batch)
            figures = router_figures(routing, batch, with_grad=balance_grad, replays=self._replays)
            scores = scores._replace(balance_S=figures.balance_S, figures=figures.figures)
        # The hook of a sharded module's backward pass must not sit on a view, hence the copy.
        return scores._replace(logprobs_S=touching(scores.logprobs_S.clone(), self.encoders))

    def _over_row(self, own: RoutingPass, share: ContextShare, batch: MicroBatch) -> RoutingPass:
        """Gather this rank's routing `own` into the routing of all tokens of `batch`, because balance and load are computed
        over whole sequences."""
        assert self._routers is not None
        routing = RoutingPass(self._routers, routes=batch.routes_NLK if self._replays else None)
        for whole, parts in ((routing.logits, own.logits), (routing.chosen, own.chosen), (routing.live, own.live)):
            whole[:] = [None if part is None else share.of_tokens(part) for part in parts]
        return routing


class ValueModel(ScoringModel):
    """A backbone and a linear map from its last hidden state to a value, initially 0."""

    whose = "checkpoint's critic"

    def __init__(self, backbone: PreTrainedModel) -> None:
        """Add a head to `backbone`."""
        super().__init__()
        like = next(backbone.parameters())
        self.backbone = backbone
        head = value_head(int(backbone.config.get_text_config().hidden_size), dtype=like.dtype)
        self.head = head.to("cpu" if like.is_meta else like.device)

    @property
    def saved(self) -> nn.Module:
        """Backbone and head."""
        return self

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """The head."""
        return (self.head,)

    def try_out(self, *, packs: bool) -> str | None:
        """Test whether samples can be packed."""
        return why_not_packed(self.backbone) if packs else None

    def routed(self, batch: MicroBatch) -> AbstractContextManager[object]:
        """Attend by `batch`'s layout, also when the backward pass computes layers again."""
        return attending(self.backbone, batch.packing)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return [S] the value at each target of `batch`."""
        own, share = self.cut(batch)
        with attending(self.backbone, batch.packing):
            inputs = _inputs(own, share, dtype=next(self.backbone.parameters()).dtype)
            hidden_BTH = self.backbone(**inputs).last_hidden_state
        read_SH = hidden_BTH.flatten(0, 1).index_select(0, own.flat_S)
        values_S: Tensor = self.head(read_SH.to(self.head.weight.dtype))[:, 0]
        # The hook of a sharded module's backward pass must not sit on a view, hence the copy.
        return touching(values_S.clone() if share is None else share.of_targets(values_S), self.encoders)


def value_head(hidden: int, *, dtype: torch.dtype) -> nn.Linear:
    """Return a map from hidden states to values, initially 0. It is float32 whatever the backbone is, so it is sharded by
    itself."""
    head = nn.Linear(hidden, 1, dtype=torch.promote_types(dtype, torch.float32))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _inputs(batch: MicroBatch, share: ContextShare | None, *, dtype: torch.dtype) -> dict[str, Any]:
    """Return the model's arguments for `batch`, or for this rank's `share` of it."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids_BT,
        "position_ids": batch.position_ids,
        **{name: v.to(dtype) if v.is_floating_point() else v for name, v in batch.media_inputs.items()},
        "use_cache": False,
    }
    if batch.packing is not None:
        inputs["packed_view"] = PackedView(batch.packing, batch.input_ids_BT.device, share)
    return inputs


def in_chunks(score: Callable[..., _T], chunk: int, read_SX: Tensor, *inputs_S: Tensor | None) -> list[_T]:
    """Return `score` of each chunk of targets, from a row of `read_SX` and of `inputs_S` per target; None stays None."""
    parts = []
    for start in range(0, max(1, len(read_SX)), chunk):
        part = [None if one is None else one[start : start + chunk] for one in (read_SX, *inputs_S)]
        if len(read_SX) > chunk and torch.is_grad_enabled():
            # The head has no randomness, so no random state is kept for recomputation.
            parts.append(checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(score(*part))
    return parts


def _score(
    head: nn.Module | None,
    read_SX: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor | None,
    support_SK: Tensor | None,
    entropy_grad: bool | None,
) -> TargetScores:
    logits_SV = read_SX if head is None else head(read_SX)
    # bfloat16 would round log-probabilities by more than one optimizer step changes them.
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    if temperature_S is not None:
        logits_SV = logits_SV / temperature_S[:, None]
    if support_SK is not None:
        logits_SV = logits_SV.masked_fill(outside(support_SK, logits_SV.shape[1]), OUTSIDE)
    logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
    logprobs_S = logprobs_SV.gather(1, targets_S[:, None])[:, 0]
    if entropy_grad is None:
        return TargetScores(logprobs_S, None)
    # An entropy that is only a metric must not keep a second [S, V] for the backward pass.
    return TargetScores(logprobs_S, entropy(logprobs_SV if entropy_grad else logprobs_SV.detach()))


def _whole(scores: TargetScores, share: ContextShare | None) -> TargetScores:
    """Gather the scores at this rank's targets into the scores at all targets."""
    if share is None:
        return scores
    entropy_S = None if scores.entropy_S is None else share.of_targets(scores.entropy_S)
    return TargetScores(share.of_targets(scores.logprobs_S), entropy_S)


def _separate_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output embedding if the model's logits are its output for the last hidden state; None otherwise."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return None
    ids = torch.arange(4, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
    was_training = model.training
    # Amplify logits beyond any cap: near 0, where logits of random weights are, a cap has almost no effect.
    amplified = head.register_forward_hook(lambda module, args, out: out * (_LOUD / out.abs().max().clamp_min(1e-30)))
    model.eval()
    try:
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits
            parts = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    finally:
        amplified.remove()
        model.train(was_training)
    is_same = whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-4, atol=1e-5 * _LOUD)
    return head if is_same else None
