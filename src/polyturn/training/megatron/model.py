"""Networks of megatron-core's layers, made from a Hugging Face model: a policy and a value function.

    ids [B, T]  ->  stage -> stage  ->  hidden states of targets [S, H]  ->  log-probabilities or values [S] on every rank

Two autograd functions send hidden states and their gradients between stages, so a loss simply calls `backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.algorithms.balance import balance_loss
from polyturn.batching.layout import MicroBatch
from polyturn.core.metrics import Mean
from polyturn.core.routing import RouteShape
from polyturn.engines.routers import LIVE, require_same_shape
from polyturn.training.context_parallel import ContextRow, ContextShare
from polyturn.training.lora import ADAPTER, adapted_layers, adapter_tensors
from polyturn.training.megatron.layers import make_gpt
from polyturn.training.megatron.lora import adapter_entries, add_adapter
from polyturn.training.megatron.weights import ShardedNames, entries, is_sparse, value_entries
from polyturn.training.model import MAX_LOGITS, MAX_LOGITS_CPU, MIN_CHUNK, ScoringModel, TargetScores, ValueModel, in_chunks
from polyturn.training.options import Degrees
from polyturn.training.packed_attention import PackedView
from polyturn.training.router_figures import Figures, sequence_of_targets, tokens_of_sequences


class MegatronModel(ScoringModel):
    """A network of megatron-core's layers. The last stage's results are sent to every rank of a row."""

    names: ShardedNames
    is_split_tie = False
    """Whether the first and the last stage each hold a copy of a tied tensor."""

    def __init__(
        self, model: PreTrainedModel, degrees: Degrees, device: torch.device, *, form: ValueModel | None = None
    ) -> None:
        """Make this rank's part of `model`, without weights; with `form`, of a value function with the head of `form`."""
        super().__init__()
        config = model.config
        self._is_first = parallel_state.is_pipeline_first_stage()
        self._is_last = parallel_state.is_pipeline_last_stage()
        self._hidden = config.hidden_size
        self._tp = parallel_state.get_tensor_model_parallel_group()
        if degrees.context_parallel > 1:
            self.context = ContextRow(parallel_state.get_context_parallel_group())
        recomputes, whole = bool(model.is_activation_checkpointing), form or model
        weights = list((entries if form is None else value_entries)(config))
        adapter = adapter_entries(whole, weights, config, degrees)
        gpt = make_gpt(config, degrees, dtype=model.dtype, recomputes=recomputes, has_values=form is not None)
        self.backbone = gpt.to(device)  # type: ignore[assignment]
        self._first_layer = gpt.decoder.layers[0].layer_number - 1
        add_adapter(gpt, whole, weights, first_layer=self._first_layer)
        self._scaling = next((layer.scaling[ADAPTER] for layer in adapted_layers(whole).values()), 0.0)
        num_experts = config.num_experts // degrees.expert_parallel if config.model_type == "qwen3_moe" else 0
        self.names = ShardedNames(
            whole,
            config,
            dict(gpt.named_parameters()),
            [*weights, *adapter],
            degrees=degrees,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            first_layer=self._first_layer,
            first_expert=parallel_state.get_expert_model_parallel_rank() * num_experts,
        )
        self.names.take(self.tensors(), adapter_tensors(whole))

    @property
    def saved(self) -> nn.Module:
        """megatron-core's model."""
        return self.backbone

    def merged(self, name: str, whole: Tensor | None) -> Tensor | None:
        """Return a whole weight, on the first rank, with the adapter added."""
        pair = [f"{name.removesuffix('.weight')}.lora_{one}.{ADAPTER}.weight" for one in "AB"]
        adapter = self.tensors()
        if pair[0] not in self.names.kinds(adapter):
            return whole
        down, up = (self.names.whole(adapter, one) for one in pair)
        return None if whole is None or down is None or up is None else whole + (up @ down * self._scaling).to(whole)

    def _run(self, batch: MicroBatch, read: Callable[[Tensor, MicroBatch], Tensor], *, count: int = 1) -> Tensor:
        """Return [count, S] the result of `read` on the hidden states [S, H] of targets, called with this rank's share of
        `batch`; collective over the ranks of a row."""
        own, share = self.cut(batch)
        rows, length = own.input_ids_BT.shape
        gpt: Any = self.backbone
        ids = functional.pad(own.input_ids_BT, (0, self._padding(length)))
        self._pack(own, share)
        if not self._is_first:
            shape = (ids.shape[1] // self._tp.size(), rows, self._hidden)
            # An input with a gradient; without one autograd would not call the backward function that sends gradients back.
            anchor = torch.zeros((), device=ids.device, requires_grad=torch.is_grad_enabled())
            dtype = next(gpt.parameters()).dtype
            gpt.set_input_tensor(_FromPrevious.apply(anchor, shape, dtype, ids.device))
        hidden_TBH = gpt(ids, None, None)
        if not self._is_last:
            output: Tensor = _ToNext.apply(hidden_TBH, (count, batch.num_targets))
            return output
        if self._tp.size() > 1:
            hidden_TBH = tensor_parallel.gather_from_sequence_parallel_region(hidden_TBH, tensor_parallel_output_grad=False)
        at_S = own.flat_S % length * rows + own.flat_S // length  # hidden states are [positions, rows]
        output = read(hidden_TBH.flatten(0, 1).index_select(0, at_S), own)
        if share is not None:
            output = share.of_targets(output.T).T.contiguous()
        if not self._is_first:
            dist.broadcast(output.detach().clone(), *_last_stage())
        return output

    def _pack(self, own: MicroBatch, share: ContextShare | None) -> None:
        """Set the attention of the layers to the layout of a batch; it stays set, because a backward pass may compute layers
        again."""
        gpt: Any = self.backbone
        view = None if own.packing is None else PackedView(own.packing, own.input_ids_BT.device, share)
        gpt.rotary_pos_emb.positions = None
        if view is not None:
            gpt.rotary_pos_emb.positions = functional.pad(own.position_ids[0], (0, self._padding(view.num_tokens)))
        for layer in gpt.decoder.layers:
            layer.self_attention.core_attention.view = view

    def _padding(self, length: int) -> int:
        """Return the padding that makes the length of rows divisible among ranks."""
        return -length % self._tp.size()


class MegatronPolicy(MegatronModel):
    """A causal language model that returns log-probabilities."""

    def __init__(self, model: PreTrainedModel, degrees: Degrees, device: torch.device, *, replays: bool) -> None:
        """Make this rank's part of `model`, without weights; with `replays`, routers follow the engine's choices."""
        super().__init__(model, degrees, device)
        config, gpt = model.config, self.backbone
        self._config, self._vocab = config, config.vocab_size
        self._is_tied = bool(config.tie_word_embeddings)
        self.is_split_tie = self._is_tied and not (self._is_first and self._is_last)
        self._routers = [layer.mlp.router for layer in gpt.decoder.layers if hasattr(layer.mlp, "router")]  # type: ignore[union-attr]
        self._first_router = sum(is_sparse(config, layer) for layer in range(self._first_layer))
        self._num_routers = sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))
        self._replays = replays

    @contextmanager
    def routed(self, batch: MicroBatch) -> Iterator[None]:
        """Send tokens to the experts that the engine chose."""
        own = self.cut(batch)[0]
        if not self._routers or not self._replays or own.routes_NLK is None:
            yield
            return
        config = self._config
        shape = RouteShape(self._num_routers, config.num_experts_per_tok, config.num_experts)
        require_same_shape(own.routes_NLK, shape, num_experts=batch.num_experts)
        rows, length = own.input_ids_BT.shape
        routes_BTLK = own.routes_NLK.unflatten(0, (rows, length)).long()
        recorded_TBLK = functional.pad(routes_BTLK, (0, 0, 0, 0, 0, self._padding(length)), value=LIVE).transpose(0, 1)
        recorded_NLK = recorded_TBLK.chunk(self._tp.size())[self._tp.rank()].flatten(0, 1)
        for i, router in enumerate(self._routers, self._first_router):
            router.router_replay.recorded = recorded_NLK[:, i]
        try:
            yield
        finally:
            for router in self._routers:
                router.router_replay.recorded = None

    def forward(self, batch: MicroBatch, *, entropy_grad: bool | None = None, balance_grad: bool = False) -> TargetScores:
        """Return the scores of each target, and with `balance_grad` the balance loss; collective over the ranks of a row."""
        for router in self._routers:
            router.keeps_logits = balance_grad
        count = 1 if entropy_grad is None else 2
        both_KS = self._run(batch, functools.partial(self._scores, entropy_grad=entropy_grad), count=count)
        scores = TargetScores(both_KS[0], both_KS[1] if count == 2 else None, figures=self._router_figures())
        if not balance_grad:
            return scores
        balance_B = self._balance(batch)
        balance = balance_B.detach().sum(), functools.partial(Mean, count=len(balance_B))
        of_S = sequence_of_targets(batch).to(balance_B.device, non_blocking=True)
        return scores._replace(balance_S=balance_B[of_S], figures={**scores.figures, "policy/router_balance": balance})

    def _scores(self, read_SH: Tensor, own: MicroBatch, *, entropy_grad: bool | None) -> Tensor:
        """Return [1 or 2, S] log-probabilities and entropies."""
        gpt: Any = self.backbone
        weight = gpt.embedding.word_embeddings.weight if self._is_tied and self._is_first else gpt.output_layer.weight
        max_logits = MAX_LOGITS_CPU if read_SH.device.type == "cpu" else MAX_LOGITS
        chunk = max(MIN_CHUNK, max_logits * self._tp.size() // self._vocab)
        score = functools.partial(_score, weight, group=self._tp, entropy_grad=entropy_grad)
        return torch.cat(in_chunks(score, chunk, read_SH, own.targets_S, own.temperature_S), dim=1)

    def _balance(self, batch: MicroBatch) -> Tensor:
        """Return [B] the balance loss of each sequence, averaged over layers. Its gradient reaches this rank's positions and
        layers."""
        own, share = self.cut(batch)
        rows, length = own.input_ids_BT.shape
        index_M, row_M = tokens_of_sequences(batch)
        if share is not None:
            local_M = share.local_M[index_M]
            index_M, row_M = local_M[local_M >= 0], row_M[local_M >= 0]
        count = (length + self._padding(length)) // self._tp.size()
        position_M = index_M % length - count * self._tp.rank()
        is_own_M = (position_M >= 0) & (position_M < count)
        own_M = (position_M * rows + index_M // length)[is_own_M], row_M[is_own_M]
        at_M, sequence_M = (torch.from_numpy(one).to(own.input_ids_BT.device, non_blocking=True) for one in own_M)
        both = parallel_state.get_tensor_and_context_parallel_group()
        own_B = torch.zeros(len(batch.row_indices), device=at_M.device)
        for router in self._routers:
            own_B = own_B + balance_loss(
                router.logits,
                router.router_replay.chosen,
                at_M,
                sequence_M,
                num_rows=len(batch.row_indices),
                added_up=functools.partial(tensor_parallel.reduce_from_tensor_model_parallel_region, group=both),
            )
            router.logits = None
        whole_B = own_B.detach().clone()
        dist.all_reduce(whole_B, group=parallel_state.get_pipeline_model_parallel_group())
        # The value over all stages, but the gradient of this stage only: each stage sends gradients to its own routers.
        return (own_B + (whole_B - own_B.detach())) / self._num_routers

    def _router_figures(self) -> Figures:
        """Return the share of this rank's tokens that the engine sent to other experts than this rank's routers choose."""
        counts = [r.router_replay.counts for r in self._routers if r.router_replay.recorded is not None]
        return {"policy/router_changed": (torch.stack(counts).sum(dim=0), Mean)} if counts else {}


class MegatronValues(MegatronModel):
    """A value function over a backbone, equal to the `ValueModel` of one process."""

    def __init__(self, form: ValueModel, degrees: Degrees, device: torch.device) -> None:
        """Make this rank's part, with a head of 0 and otherwise without weights."""
        super().__init__(form.backbone, degrees, device, form=form)
        self.whose = form.whose

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return [S] the value at each target of `batch`; collective over the ranks of a row."""
        head: Any = self.backbone.head
        return self._run(batch, lambda read_SH, own: head(read_SH.to(head.weight.dtype)).T)[0]


def _score(
    weight: Tensor,
    read_SH: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor | None,
    group: dist.ProcessGroup,
    entropy_grad: bool | None,
) -> Tensor:
    """Return [1 or 2, S] log-probabilities and entropies from logits whose vocabulary the ranks of `group` split."""
    logits_SV = functional.linear(tensor_parallel.copy_to_tensor_model_parallel_region(read_SH), weight)
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    if temperature_S is not None:
        logits_SV = logits_SV / temperature_S[:, None]
    # All ranks must subtract the largest logit of the whole vocabulary before their sums are added.
    top_S = logits_SV.detach().amax(dim=-1)
    dist.all_reduce(top_S, op=dist.ReduceOp.MAX, group=group)
    logits_SV = logits_SV - top_S[:, None]
    reduce, copy = (
        tensor_parallel.reduce_from_tensor_model_parallel_region,
        tensor_parallel.copy_to_tensor_model_parallel_region,
    )
    log_sum_S = reduce(logits_SV.exp().sum(dim=-1)).log()
    own_S = targets_S - group.rank() * logits_SV.shape[1]
    is_own_S = (own_S >= 0) & (own_S < logits_SV.shape[1])
    picked_S = logits_SV.gather(1, own_S.clamp(0, logits_SV.shape[1] - 1)[:, None])[:, 0]
    logprobs_S = reduce(torch.where(is_own_S, picked_S, 0.0)) - log_sum_S
    if entropy_grad is None:
        return logprobs_S[None]
    with nullcontext() if entropy_grad else torch.no_grad():
        mean_S = reduce(((logits_SV - copy(log_sum_S)[:, None]).exp() * logits_SV).sum(dim=-1))
        entropy_S = log_sum_S - mean_S
    return torch.stack([logprobs_S, entropy_S])


def _last_stage() -> tuple[int, dist.ProcessGroup]:
    return parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()


class _FromPrevious(torch.autograd.Function):
    """Receives the hidden states of the previous stage; sends their gradient back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        hidden = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(hidden, src=parallel_state.get_pipeline_model_parallel_prev_rank())
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dist.send(grads[0].contiguous(), dst=parallel_state.get_pipeline_model_parallel_prev_rank())
        return torch.zeros((), device=grads[0].device), None, None, None


class _ToNext(torch.autograd.Function):
    """Sends hidden states to the next stage; receives their gradient from it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.like = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        dist.send(hidden.detach().contiguous(), dst=parallel_state.get_pipeline_model_parallel_next_rank())
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        buffer = torch.empty(shape, dtype=dtype, device=hidden.device)
        dist.broadcast(buffer, *_last_stage())
        return buffer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dist.recv(ctx.like, src=parallel_state.get_pipeline_model_parallel_next_rank())
        return ctx.like, None
