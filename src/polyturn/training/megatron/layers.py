"""megatron-core's layers for a Hugging Face causal language model, made from its config.

They use torch's attention and norms, which also run on a CPU, and a router that can replay recorded choices. `model.py`
reads log-probabilities and values off the last hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from polyturn.engines.routers import LIVE
from polyturn.training.megatron.weights import is_sparse
from polyturn.training.model import value_head
from polyturn.training.options import Degrees
from polyturn.training.packed_attention import PackedView, attend_packed


class SdpaAttention(nn.Module):
    """Causal attention with torch's kernels. megatron-core's build a [T, T] mask, or need transformer_engine for packed
    rows."""

    view: PackedView | None = None
    """The attention of the current packed batch; None for padded rows."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return [T, B, heads x size] of queries [T, B, heads, size] and keys and values [T, B, groups, size]."""
        length = query.shape[0]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.view is None:
            is_grouped = key.shape[1] != query.shape[1]
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        else:
            num_tokens = self.view.num_tokens
            query, key, value = (x[:, :, :num_tokens] for x in (query, key, value))
            attended = attend_packed(query, key, value, self.view)
            attended = functional.pad(attended, (0, 0, 0, length - num_tokens))  # so that ranks share the positions evenly
        return attended.permute(2, 0, 1, 3).flatten(2)


class RmsNorm(nn.RMSNorm):
    """Torch's norm. megatron-core's does not support sequence parallelism without transformer_engine."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as megatron-core marks it


class Rotary(RotaryEmbedding):
    """megatron-core's rotary embedding with the frequencies of transformers, on the device of the model."""

    positions: Tensor | None = None
    """[T] the position of each token of packed rows; None counts from 0."""

    def __init__(self, config: PreTrainedConfig, head_dim: int) -> None:
        base, kind = config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"]
        super().__init__(head_dim, rotary_percent=1.0, rotary_base=base, use_cpu_initialization=True)
        frequencies = self.inv_freq if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
        del self.inv_freq
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return [positions, 1, 1, head] angles."""
        if self.positions is None:
            angles = self.get_freqs_non_repeated(max_seq_len, 0)
        else:
            angles = torch.outer(self.positions.to(self.inv_freq), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class RecordedChoice(RouterReplay):
    """Replays the recorded experts at one router; tokens without a record are routed by the router.

    megatron-core's class keeps all instances in one list, assumes one model per process, and replays all tokens or none.
    Here a process may have a policy and a reference, and a token may lack a route.
    """

    def __init__(self) -> None:
        self.recorded: Tensor | None = None
        """[tokens, top-k] recorded experts; `LIVE` for a token without a route."""
        self.chosen: Tensor | None = None
        """[tokens, top-k] the experts that processed the tokens of the last pass."""
        self.counts = torch.zeros(2, dtype=torch.int64)
        """[2] the tokens of the last pass whose recorded experts differ from the router's, and the tokens with a record; on
        the device, so that the pass does not wait for it."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts, with gradient, and their indices."""
        assert default_compute_topk is not None
        values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chosen = live
        if self.recorded is None:
            return values, live
        is_recorded = self.recorded[:, :1] != LIVE  # [tokens, 1]: a token has all of its experts recorded, or none
        self.chosen = chosen = torch.where(is_recorded, self.recorded, live)
        differs = (chosen.sort(dim=-1).values != live.sort(dim=-1).values).any(dim=-1)
        self.counts = torch.stack([differs.sum(), is_recorded.sum()])
        # The choice is the engine's, but the weights are the router's, so that the router gets a gradient.
        return scores.gather(1, chosen), chosen


class Router(TopKRouter):
    """megatron-core's router with float32 logits from torch's kernel and replay of recorded choices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = RecordedChoice()
        self.logits: Tensor | None = None
        """[tokens, experts] logits of the last pass, with gradient; None unless `keeps_logits` is set."""
        self.keeps_logits = False

    def gating(self, input: Tensor) -> Tensor:
        """Return [positions, rows, experts] logits; megatron-core's method needs transformer_engine."""
        logits = functional.linear(input.float(), self.weight.float())
        self.logits = logits.flatten(0, 1) if self.keeps_logits else None
        return logits


class RecomputedLayer(TransformerLayer):
    """A layer that keeps only its input and is computed again in the backward pass, by torch. megatron-core's recomputation
    detaches the output, which hides the router from its balance loss, and needs the random state of a GPU."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def make_gpt(
    config: PreTrainedConfig, degrees: Degrees, *, dtype: torch.dtype, recomputes: bool, has_values: bool = False
) -> GPTModel:
    """Return this rank's part of megatron-core's model for a Hugging Face config, without weights. With `has_values`, a
    value head takes the place of the output embedding, on every rank."""
    has_experts = config.model_type == "qwen3_moe"
    experts = _experts(config, degrees) if has_experts else {}
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
    )
    gpt = GPTModel(
        own,
        _layers(own, recomputes=recomputes),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_word_embeddings and not has_values,
        position_embedding_type="rope",
    )
    gpt.rotary_pos_emb = Rotary(config, own.kv_channels)
    gpt.register_state_dict_post_hook(_drop_empty)
    if has_values:
        if gpt.post_process:
            del gpt.output_layer
        gpt.head = value_head(config.hidden_size, dtype=dtype)
    gpt.post_process = False  # so that it returns hidden states, which `model.py` reads; its last layers exist already
    return gpt


def _layers(own: TransformerConfig, *, recomputes: bool) -> Any:
    """Return megatron-core's description of the layers, with the norms, attention and router of this module."""
    spec = get_gpt_decoder_block_spec(own, use_transformer_engine=False, normalization="RMSNorm")
    spec.layer_norm = RmsNorm
    for layer in spec.layer_specs:
        layer.module = RecomputedLayer if recomputes else layer.module
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
        if layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.router = Router
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = SdpaAttention
        if own.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    return spec


def _experts(config: PreTrainedConfig, degrees: Degrees) -> dict[str, Any]:
    """Return megatron-core's settings of sparse layers, without its balance loss."""
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
    """Leave out the empty entries that megatron-core's layers keep for transformer_engine."""
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]
