"""Estimate the memory of a run's processes, and the duration of a weight sync, from the sizes of a model.

    rank      (b + m + 8 + g) P / N, b P / N for each frozen model, the gathered blocks, activations     FSDP2 over N, AdamW
    server    b P / t + KV cache / min(t, its heads; 1 for a latent)                                     t: tensor parallel
    sync      b P / B, once for all servers of a broadcast                                               B: bytes/s of a link

Ranks that spread experts gather only their experts of a layer, and are assumed to receive as many tokens as they send. Ranks
that split tokens divide activations and logits, but each keeps all keys and values. With Megatron each row of ranks has a
copy: N is the number of ranks of a row, except for masters and moments, where it is the number of all ranks. Nothing is
gathered, and a row also divides activations and logits.

The model has P numbers of b bytes. In float32, b = 4, m = 0 (no masters) and g = 4. In bfloat16, b = 2, m = 4 and g = 4 + 2:
gradients are summed in float32 while those of one backward pass still exist in bfloat16. An offloaded optimizer takes the
other 16 P / N bytes from the machine's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from polyturn.engines.weights.stream import BUCKET_BYTES
from polyturn.training.modality_encoders import encoders_of, layers_of
from polyturn.training.model import MAX_LOGITS, MAX_LOGITS_CPU, MIN_CHUNK
from polyturn.training.options import Degrees

_WHOLE_HEADS = ("minicpm3",)
"""Models with a latent of which vLLM (0.32) caches the heads' keys, and values padded to the width of keys."""
_AT_REST = ("parameters", "float32 masters", "moments of AdamW", "frozen models")
"""Parts of `rank_bytes` that a rank also holds between updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes that memory depends on."""

    parameters: int
    """Number of parameters; tied ones count once."""
    trained: int
    """Number of parameters with gradients; with an adapter, the adapter's parameters."""
    layer: int
    """Number of parameters of the largest layer, which is gathered by itself."""
    outside: int
    """Number of parameters outside the layers, which are gathered together for a whole pass."""
    widest: int
    """Number of parameters of the largest trained tensor, usually the embedding."""
    element: int
    """Bytes of a parameter."""
    hidden: int
    num_layers: int
    vocab: int
    kv_width: int
    """Width of a token's keys and values in a layer, of all heads together."""
    cached: int
    """Width that a KV cache keeps of a token in a layer: `kv_width`, or less if it keeps a latent instead of the heads' keys
    and values (multi-head latent attention: DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""
    kv_heads: int
    """Number of heads among which GPUs divide a KV cache; 1 for a latent, which every GPU keeps."""
    kept: int
    """Bytes per token that a layer keeps for its backward pass."""
    experts: int = 0
    """Number of parameters of all experts; `parameters` includes them."""
    layer_experts: int = 0
    """Number of parameters of the experts of the largest layer."""

    @classmethod
    def of(cls, model: PreTrainedModel, *, engine: object = None) -> ModelSize:
        """Return the sizes of a model, with or without weights; `engine` is the kind of engine that keeps the KV cache."""
        config = model.config.get_text_config()
        layer_list = layers_of(model, encoders_of(model))
        layers = [sum(p.numel() for p in layer.parameters()) for layer in layer_list]
        experts = [sum(p.numel() for p in layer.parameters() if p.dim() == 3) for layer in layer_list]
        parameters = sum(p.numel() for p in model.parameters())
        fields = config.to_dict()
        attention = _Attention.of(fields, heads=config.num_attention_heads, hidden=config.hidden_size, engine=engine)
        element = next(model.parameters()).element_size()
        kept = _kept(
            fields,
            attention,
            hidden=int(config.hidden_size),
            element=element,
            norms_heads=any("q_norm" in name for name, _ in model.named_parameters()),
        )
        return cls(
            parameters=parameters,
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            layer=max(layers, default=0),
            outside=parameters - sum(layers),
            widest=max((p.numel() for p in model.parameters() if p.requires_grad), default=0),
            element=element,
            hidden=int(config.hidden_size),
            num_layers=int(config.num_hidden_layers),
            vocab=int(config.vocab_size),
            kv_width=attention.key + attention.value,
            cached=attention.cached,
            kv_heads=attention.kv_heads,
            kept=kept,
            experts=sum(experts),
            layer_experts=max(experts, default=0),
        )


class _Attention(NamedTuple):
    """The widths of a layer's attention, in numbers per token."""

    query: int
    key: int
    value: int
    kept: int
    """Numbers that autograd keeps: queries, keys, values and output; no scores (FlashAttention)."""
    latents: int
    """Width of the latents, which are normalised before queries, keys and values are made of them."""
    cached: int
    kv_heads: int

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, heads: int, hidden: int, engine: object) -> _Attention:
        """Return the widths of a model with the config `fields`."""
        if (rank := fields.get("kv_lora_rank")) is None:
            kv_heads = int(fields.get("num_key_value_heads") or heads)
            width = int(fields.get("head_dim") or hidden // heads)
            query, key = heads * width, kv_heads * width
            return cls(query, key, key, kept=2 * query + 2 * key, latents=0, cached=2 * key, kv_heads=kv_heads)
        plain, rotated, wide = (int(fields[f"{part}_head_dim"]) for part in ("qk_nope", "qk_rope", "v"))
        key, value = heads * (plain + rotated), heads * wide
        # Values are a view of a tensor that also has the keys' part without positions; the output is kept in two orders.
        kept = 2 * key + (heads * plain + value) + 2 * value
        latents = int(rank) + int(fields.get("q_lora_rank") or 0)
        whole = engine == "vllm" and fields.get("model_type") in _WHOLE_HEADS
        cached, kv_heads = (2 * key, heads) if whole else (int(rank) + rotated, 1)
        return cls(key, key, value, kept=kept, latents=latents, cached=cached, kv_heads=kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """Everything except the model's size that determines the memory of a trainer rank."""

    ranks: int = 1
    expert_parallel: int = 1
    """Ranks over which FSDP2 spreads the experts of a layer."""
    context_parallel: int = 1
    """Ranks that split the tokens of a micro-batch."""
    megatron: Degrees | None = None
    """How Megatron splits a copy within a row of ranks; None shards one copy over all ranks (FSDP2)."""
    num_trained: int = 1
    """Number of trained models of this size: the policy, and a critic if the estimator needs one."""
    num_frozen: int = 0
    """Number of further models that only score: a reference, a teacher."""
    tokens: int = 0
    """Number of tokens of a micro-batch."""
    recomputes: bool = False
    """Whether layers are computed again in the backward pass."""
    keeps_whole_gradient: bool = False
    """Whether gradients are summed over ranks only after the last micro-batch (`gradient_sync: last`)."""
    on_gpu: bool = True
    num_offloaded: int = 0
    """Number of trained models whose optimizer is in the machine's memory (`optim.offload`)."""


def rank_bytes(size: ModelSize, load: RankLoad) -> dict[str, int]:
    """Return a trainer rank's peak bytes by part. The peak is in the backward pass through the output embedding, after the
    forward pass of all layers.

    At that point the embedding's gradient exists twice: as the sum over chunks of targets, and for the current chunk.
    If layers are computed again, the rank keeps the input of each layer and the activations of one.
    """
    low, copies, split = size.element < 4, load.num_trained, load.megatron or Degrees()
    optimizers = copies - load.num_offloaded * load.on_gpu
    wide, stages = split.tensor_parallel, split.pipeline_parallel
    at_once = wide * max(MIN_CHUNK, (MAX_LOGITS if load.on_gpu else MAX_LOGITS_CPU) // size.vocab)
    # A layer is gathered while the previous one is still in memory, and its gradient is whole before it is cut.
    layer = size.layer - size.layer_experts + size.layer_experts // load.expert_parallel
    is_sharded, is_gathered = load.megatron is None, load.megatron is None and load.ranks > 1
    gathered = (2 * size.outside + 3 * layer) * size.element if is_gathered else 0
    keeps_whole = is_gathered and load.keeps_whole_gradient
    # With stages, the first and the last each hold an embedding, tied or not.
    ends = min(size.outside, size.vocab * size.hidden) * stages - size.outside if stages > 1 else 0

    def bytes_of(count: int, *, bytes_of_each: int, is_state: bool = False) -> int:
        if is_sharded:
            return count // load.ranks * bytes_of_each
        if count < size.parameters:  # an adapter has no experts; every rank of a stage has half of each pair whole
            return count * bytes_of_each // max(1, load.ranks // wide if is_state else stages)
        parts, of_experts = wide * stages, split.expert_parallel * stages
        if is_state:  # the optimizer's state, which ranks with the same part also divide
            parts, of_experts = max(parts, load.ranks), max(of_experts, load.ranks)
        return ((count - size.experts + ends) // parts + size.experts // of_experts) * bytes_of_each

    # A rank has its share of the experts; an adapter does not train experts.
    of_others = size.experts - size.experts // load.expert_parallel if size.trained == size.parameters else 0
    num_layers = size.num_layers // stages
    inputs = num_layers * size.hidden * size.element
    # megatron-core's layers keep a quarter more than transformers' layers: half of the feed-forward layer's input again,
    # keys, and the factors of rotary positions.
    kept = size.kept if is_sharded else size.kept * 5 // 4
    tokens = -(-load.tokens // load.context_parallel)
    activations = tokens * (inputs + kept if load.recomputes else num_layers * kept) // wide
    # Attention keeps the keys and values of all tokens; other layers keep only the rank's tokens.
    layers_kept = 1 if load.recomputes else num_layers
    activations += (load.tokens - tokens) * size.kv_width * size.element * layers_kept // wide
    # glibc frees blocks of medium size within its heap, and lasting gradients settle in the gaps. So the heap keeps the size
    # of a micro-batch's activations, and on ranks of a gathered layer and its whole gradient.
    gaps = activations if is_sharded else activations * 3 // 2  # measured: Megatron's leave more
    gaps += 2 * size.parameters * size.element if is_gathered else 0
    return {
        "parameters": bytes_of(size.parameters, bytes_of_each=copies * size.element),
        "float32 masters": bytes_of(size.trained, bytes_of_each=optimizers * 4, is_state=True) if low else 0,
        "gradients": bytes_of(size.trained, bytes_of_each=optimizers * 4 + copies * size.element * low),
        "moments of AdamW": bytes_of(size.trained, bytes_of_each=optimizers * 8, is_state=True),
        "frozen models": load.num_frozen * bytes_of(size.parameters, bytes_of_each=size.element),
        "gathered blocks": gathered,
        "whole gradient until the last micro-batch": 4 * copies * (size.trained - of_others) * keeps_whole,
        # If there is a whole gradient, the sum is already counted: in the gathered blocks, or in low precision.
        "buffer of the largest gradient": (1 if low or gathered else 2) * size.widest * size.element // wide,
        f"activations of a micro-batch of {load.tokens} tokens": activations,
        "freed memory that the allocator keeps": 0 if load.on_gpu else gaps,
        "logits": 3 * 4 * min(tokens, at_once) * size.vocab // wide,
    }


def _kept(fields: Mapping[str, Any], attention: _Attention, *, hidden: int, element: int, norms_heads: bool) -> int:
    """Return the bytes per token that autograd keeps for a Llama, Qwen or DeepSeek layer of transformers.

    With e bytes of a number, h the hidden width, q that of queries, k that of keys, i that of the feed-forward layer:

        2 norms                       (4 + 2e) h each     its input in float32, that normalized, its output
        norms of queries and keys     (4 + e) (q + k)     the same, without the output, which is rotated before it is kept
        attention                     e (2q + 2k)         queries, keys, values, its output; no scores (FlashAttention)
        feed-forward                  4 e i               both projections, the activation, the product

    Attention with a latent keeps `_Attention.kept`, and 4 + 2e per number of its normalised latents.

    In a mixture of experts, i is the sum over the token's experts, and each adds 2 e h for its input and output. A shared
    expert of another width adds its i, and e h for its output, which is scaled by a gate. Tests
    compare this with `torch.autograd.graph.saved_tensors_hooks`. Fused kernels keep less, and so does an adapter on frozen
    weights. Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, eq. 1) derive 34 h in
    the same way for GPT's layers, whose norms are not in float32 and whose feed-forward layer has no gate.
    """
    experts = int(fields.get("num_experts_per_tok") or 0)
    widths = fields.get("intermediate_size") or 4 * hidden  # GPT-2's config has none, and some configs have one per layer
    inner = int(np.max((experts and fields.get("moe_intermediate_size")) or widths))
    through = experts + int(fields.get("n_shared_experts") or 0) if experts else 1
    shared = int(fields.get("shared_expert_intermediate_size") or 0)
    norms = (4 + 2 * element) * (2 * hidden + attention.latents)
    norms += (4 + element) * (attention.query + attention.key) * norms_heads
    feed_forward = 4 * (through * inner + shared) + (2 * experts + (shared > 0)) * hidden
    return norms + element * (attention.kept + feed_forward)


def server_bytes(size: ModelSize, *, tensor_parallel: int = 1, tokens: int = 0) -> dict[str, int]:
    """Return the bytes on each GPU of an inference server whose KV cache has room for `tokens`."""
    cache = size.num_layers * size.cached * size.element * tokens
    parts = min(tensor_parallel, size.kv_heads)  # with more GPUs than heads, several GPUs keep the same head
    return {"weights": size.parameters * size.element // tensor_parallel, "KV cache": cache // parts}


def shared_bytes(size: ModelSize, load: RankLoad, *, tensor_parallel: int = 1, tokens: int = 0) -> dict[str, dict[str, int]]:
    """Return phase -> part -> bytes on a GPU that a rank shares with a server.

    During rollout the rank is idle. While weights arrive, two buckets are in flight and the server has no KV cache; in the
    test sync at the start the rank also keeps its original parameters. In an update the server sleeps and holds nothing that
    grows with the model.
    """
    rank, server = rank_bytes(size, load), server_bytes(size, tensor_parallel=tensor_parallel, tokens=tokens)
    rest = {f"rank: {name}": rank[name] for name in _AT_REST}
    weights = {"server: weights": server["weights"]}
    return {
        "in rollout": rest | weights | {"server: KV cache": server["KV cache"]},
        "as weights arrive": rest
        | weights
        | {
            "rank: gathered blocks": rank["gathered blocks"],
            "rank: original parameters": rank["parameters"],
            "buckets of weights": min(2 * BUCKET_BYTES, size.parameters * size.element),
        },
        "in an update": rank,
    }


def sync_seconds(size: ModelSize, *, link: float, adapter_only: bool = False) -> float:
    """Return the seconds of a broadcast of the weights, or of an adapter, to all servers over a link of `link` bytes/s."""
    return (size.trained if adapter_only else size.parameters) * size.element / link
