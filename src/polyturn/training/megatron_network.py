"""MegatronNetwork: a causal language model in megatron-core's form, from the config of its Hugging Face one.

    ids [B, T]  ->  stage -> stage  ->  hidden states of targets [S, H]  ->  log-probabilities [S] on every rank of a row

megatron-core's layers are composed with torch's own attention and norms, which run on a CPU too. Between stages, hidden
states and their gradients are sent by two autograd functions, so that whoever computes a loss calls `backward` as anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from polyturn.batching.layout import MicroBatch
from polyturn.core.metrics import Mean, Metrics
from polyturn.engines.routers import LIVE
from polyturn.training.backend import Degrees
from polyturn.training.megatron_weights import ShardedNames, is_sparse
from polyturn.training.network import MAX_LOGITS, MAX_LOGITS_CPU, MIN_CHUNK, Network, TargetScores


class SdpaAttention(nn.Module):
    """Causal attention by torch's own kernels, in place of megatron-core's, which build a [T, T] mask."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return [T, B, heads x size] of queries [T, B, heads, size] and keys and values [T, B, groups, size]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        found = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
        )
        return found.permute(2, 0, 1, 3).flatten(2)


class RmsNorm(nn.RMSNorm):
    """Torch's norm in place of megatron-core's, which without transformer_engine refuses to see a share of the positions."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as megatron-core marks it


class Rotary(RotaryEmbedding):
    """megatron-core's rotary positions with the frequencies of transformers, on the device of the model."""

    def __init__(self, config: PreTrainedConfig, head_dim: int) -> None:
        base, kind = config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"]
        super().__init__(head_dim, rotary_percent=1.0, rotary_base=base, use_cpu_initialization=True)
        frequencies = self.inv_freq if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
        del self.inv_freq
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return [positions, 1, 1, head] angles."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class Router(TopKRouter):
    """megatron-core's router with float32 logits by torch's own kernel, which can be told its choices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = ToldChoice()

    def gating(self, input: Tensor) -> Tensor:
        """Return [tokens, experts] logits; megatron-core's own needs transformer_engine."""
        return functional.linear(input.float(), self.weight.float())


def make_gpt(config: PreTrainedConfig, degrees: Degrees, *, dtype: torch.dtype, recomputes: bool) -> GPTModel:
    """Return this rank's part of megatron-core's model of a Hugging Face config, its weights unset."""
    has_experts = config.model_type == "qwen3_moe"
    experts = _experts(config, degrees) if has_experts else {}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    own = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.to_dict().get("head_dim"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=degrees.tensor_parallel,
        pipeline_model_parallel_size=degrees.pipeline_parallel,
        sequence_parallel=degrees.tensor_parallel > 1,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
        **experts,
        **(recompute if recomputes else {}),
    )
    gpt = GPTModel(
        own,
        _layers(own),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
    )
    gpt.rotary_pos_emb = Rotary(config, own.kv_channels)
    gpt.register_state_dict_post_hook(_drop_empty)
    gpt.post_process = False  # what is read off hidden states is for `MegatronNetwork` to say; the layers were made before
    return gpt


def _layers(own: TransformerConfig) -> Any:
    """Return megatron-core's description of the layers, with our norms, attention and router in place of its own."""
    spec = get_gpt_decoder_block_spec(own, use_transformer_engine=False, normalization="RMSNorm")
    spec.layer_norm = RmsNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
        if layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.router = Router
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = SdpaAttention
        if own.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    return spec


def _experts(config: PreTrainedConfig, degrees: Degrees) -> dict[str, Any]:
    """Return megatron-core's settings of sparse layers; their balance is our own loss, where there is one."""
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_layer_freq": [int(is_sparse(config, layer)) for layer in range(config.num_hidden_layers)],
        "expert_model_parallel_size": degrees.expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def _drop_empty(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave out what megatron-core's layers keep for transformer_engine, which is nothing."""
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]


class MegatronNetwork(Network):
    """A causal language model in megatron-core's form that gives log-probabilities, on every rank of a row."""

    names: ShardedNames

    def __init__(self, model: PreTrainedModel, degrees: Degrees, device: torch.device, *, replays: bool) -> None:
        """Make this rank's part of `model`, without its weights; `replays` lets routers follow the engine's."""
        super().__init__()
        config = model.config
        recomputes = bool(model.is_activation_checkpointing)
        self._is_first = parallel_state.is_pipeline_first_stage()
        self._is_last = parallel_state.is_pipeline_last_stage()
        self._is_tied = bool(config.tie_word_embeddings)
        self.is_split_tie = self._is_tied and not (self._is_first and self._is_last)
        self._hidden, self._vocab = config.hidden_size, config.vocab_size
        self._tp = parallel_state.get_tensor_model_parallel_group()
        self.backbone = make_gpt(config, degrees, dtype=model.dtype, recomputes=recomputes).to(device)  # type: ignore[assignment]
        first_layer = self.backbone.decoder.layers[0].layer_number - 1  # type: ignore[index,union-attr]
        num_experts = config.num_experts // degrees.expert_parallel if config.model_type == "qwen3_moe" else 0
        self.names = ShardedNames(
            model,
            dict(self.backbone.named_parameters()),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            first_layer=first_layer,
            first_expert=parallel_state.get_expert_model_parallel_rank() * num_experts,
        )
        self._routers = [layer.mlp.router for layer in self.backbone.decoder.layers if hasattr(layer.mlp, "router")]  # type: ignore[union-attr]
        self._first_router = sum(is_sparse(config, layer) for layer in range(first_layer))
        self._replays = replays

    @property
    def saved(self) -> nn.Module:
        """megatron-core's model, under its own names."""
        return self.backbone

    def try_out(self, *, packs: bool) -> str | None:
        """Return why it cannot be packed."""
        return "megatron-core packs rows with transformer_engine alone" if packs else None

    @contextmanager
    def routed(self, batch: MicroBatch) -> Iterator[None]:
        """Let tokens go to the experts that the engine chose."""
        if not self._routers or not self._replays or batch.routes_NLK is None:
            yield
            return
        rows, length = batch.input_ids_BT.shape
        told_BTLK = batch.routes_NLK.unflatten(0, (rows, length)).long()
        told_TBLK = functional.pad(told_BTLK, (0, 0, 0, 0, 0, self._padding(length)), value=LIVE).transpose(0, 1)
        own = told_TBLK.chunk(self._tp.size())[self._tp.rank()].flatten(0, 1)
        for i, router in enumerate(self._routers, self._first_router):
            router.router_replay.told = own[:, i]
        try:
            yield
        finally:
            for router in self._routers:
                router.router_replay.told = None

    def forward(self, batch: MicroBatch, *, entropy_grad: bool | None = None) -> TargetScores:
        """Return what the forward pass gives for each target; collective over the ranks of a row."""
        rows, length = batch.input_ids_BT.shape
        gpt: Any = self.backbone
        ids = functional.pad(batch.input_ids_BT, (0, self._padding(length)))
        if not self._is_first:
            shape = (ids.shape[1] // self._tp.size(), rows, self._hidden)
            anchor = torch.zeros((), device=ids.device, requires_grad=torch.is_grad_enabled())
            gpt.set_input_tensor(_FromPrevious.apply(anchor, shape, self._dtype(), ids.device))
        hidden_TBH = gpt(ids, None, None)
        count = 1 if entropy_grad is None else 2
        if self._is_last:
            found_KS = self._scores(hidden_TBH, batch, entropy_grad=entropy_grad)
            if not self._is_first:
                dist.broadcast(found_KS.detach().clone(), *_last_stage())
        else:
            found_KS = _ToNext.apply(hidden_TBH, (count, batch.num_targets))
        metrics = self._router_metrics(batch)
        return TargetScores(found_KS[0], found_KS[1] if count == 2 else None, metrics=metrics)

    def scores(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        found: TargetScores = self(batch)
        return found.logprobs_S

    def _padding(self, length: int) -> int:
        """Return by how much rows grow, so that ranks share their positions evenly."""
        return -length % self._tp.size()

    def _dtype(self) -> torch.dtype:
        return next(self.backbone.parameters()).dtype

    def _scores(self, hidden_TBH: Tensor, batch: MicroBatch, *, entropy_grad: bool | None) -> Tensor:
        """Return [1 or 2, S] log-probabilities and entropies, from the hidden states of the last stage."""
        rows, length = batch.input_ids_BT.shape
        if self._tp.size() > 1:
            hidden_TBH = tensor_parallel.gather_from_sequence_parallel_region(hidden_TBH, tensor_parallel_output_grad=False)
        at_S = batch.flat_S % length * rows + batch.flat_S // length  # hidden states have positions before rows
        read_SH = hidden_TBH.flatten(0, 1).index_select(0, at_S)
        gpt: Any = self.backbone
        weight = gpt.embedding.word_embeddings.weight if self._is_tied and self._is_first else gpt.output_layer.weight
        max_logits = MAX_LOGITS_CPU if read_SH.device.type == "cpu" else MAX_LOGITS
        chunk = max(MIN_CHUNK, max_logits * self._tp.size() // self._vocab)
        parts = []
        for start in range(0, batch.num_targets, chunk):
            part = slice(start, start + chunk)
            temperature = None if batch.temperature_S is None else batch.temperature_S[part]
            inputs = (weight, read_SH[part], batch.targets_S[part], temperature, self._tp, entropy_grad)
            if batch.num_targets > chunk and torch.is_grad_enabled():
                parts.append(checkpoint(_score, *inputs, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(_score(*inputs))
        return torch.cat(parts, dim=1)

    def _router_metrics(self, batch: MicroBatch) -> Metrics:
        """Return how many of this rank's tokens the engine routed otherwise than its routers would."""
        told = [r.router_replay for r in self._routers if r.router_replay.told is not None]
        if not told:
            return {}
        changed, known = (sum(getattr(one, name) for one in told) for name in ("num_changed", "num_told"))
        return {"policy/router_changed": Mean(float(changed), int(known))} if known else {}


class ToldChoice(RouterReplay):
    """The choice of one router: what it is told, and its own where it is told nothing.

    megatron-core's class keeps every instance in one list, for one model a process, and replays all tokens or none; here a
    reference may stand beside the policy, and a token may have no route.
    """

    def __init__(self) -> None:
        self.told: Tensor | None = None
        """[tokens, top-k] experts; `LIVE` where a token has no route."""
        self.num_changed = self.num_told = 0

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the experts that are chosen, with gradient, and which ones these are."""
        assert default_compute_topk is not None
        values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.told is None:
            return values, live
        is_told = self.told[:, :1] != LIVE
        chosen = torch.where(is_told, self.told, live)
        differs = (chosen.sort(dim=-1).values != live.sort(dim=-1).values).any(dim=-1)
        self.num_changed, self.num_told = int(differs.sum()), int(is_told.sum())
        return scores.gather(1, chosen), chosen


def _score(
    weight: Tensor,
    read_SH: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor | None,
    group: dist.ProcessGroup,
    entropy_grad: bool | None,
) -> Tensor:
    """Return [1 or 2, S] log-probabilities and entropies, of logits whose vocabulary the ranks of `group` share."""
    logits_SV = functional.linear(tensor_parallel.copy_to_tensor_model_parallel_region(read_SH), weight)
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    if temperature_S is not None:
        logits_SV = logits_SV / temperature_S[:, None]
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
        return_S = log_sum_S - mean_S
    return torch.stack([logprobs_S, return_S])


def _last_stage() -> tuple[int, dist.ProcessGroup]:
    return parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()


class _FromPrevious(torch.autograd.Function):
    """The hidden states of the stage before; their gradient goes back to it."""

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
    """What the last stage makes of these hidden states; their gradient comes from the next one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.like = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        dist.send(hidden.detach().contiguous(), dst=parallel_state.get_pipeline_model_parallel_next_rank())
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        found = torch.empty(shape, dtype=dtype, device=hidden.device)
        dist.broadcast(found, *_last_stage())
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dist.recv(ctx.like, src=parallel_state.get_pipeline_model_parallel_next_rank())
        return ctx.like, None
