"""Small causal language models of the kinds that polyturn trains, made at run time with random weights.

tiny_model(tiny_tokenizer())        Qwen3, 2 layers; the same arguments give the same weights
write_brief_model(folder)           a tokenizer and a model that ends its turns soon
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.testing.tiny_models import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def tiny_model(
    tokenizer: PreTrainedTokenizerFast | int,
    kind: str = "qwen3",
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    intermediate: int | None = None,
    max_positions: int = 32768,
    experts: int = 8,
    spread: float = 0.02,
    seed: int = 0,
) -> PreTrainedModel:
    """Build a randomly initialised causal language model in float32, in eval mode, on the CPU.

    Args:
        tokenizer: The tokenizer to fit, or the size of the vocabulary.
        kind: "qwen3", "qwen2", "llama" or "minicpm3"; with experts, of which each token takes 2, "qwen3_moe", "mixtral",
            and with a shared expert "qwen2_moe" and "deepseek_v3" (its first layer dense).
        hidden: Width; a multiple of 2 * heads.
        layers: Number of decoder layers.
        heads: Number of attention heads.
        kv_heads: Number of key-value heads; divides `heads`.
        intermediate: Width of the feed-forward layer; 2 * hidden by default.
        max_positions: The longest context.
        experts: Number of experts of a layer of "qwen2_moe" and "qwen3_moe"; the others have 8.
        spread: Standard deviation of the weights; at 0.2, distributions are far from uniform, so that wrong weights show.
        seed: Seed of the weights; the caller's random state is left as it was.

    Raises:
        ConfigError: `kind` is unknown, or `hidden` does not divide into heads.
    """
    import torch

    config_class, model_class, own = _family(kind, hidden=hidden, heads=heads, num_experts=experts)
    if hidden % (2 * heads) or heads % kv_heads:
        raise ConfigError(
            f"hidden={hidden}, heads={heads}, kv_heads={kv_heads} do not divide; rotary halves need even heads"
        )
    eos = pad = None
    if not isinstance(tokenizer, int):
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    fields: dict[str, Any] = {
        "vocab_size": tokenizer if isinstance(tokenizer, int) else len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_positions,
        "initializer_range": spread,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    config = config_class(**{**fields, **own})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
    return model.float().eval()


def _family(kind: str, *, hidden: int, heads: int, num_experts: int) -> tuple[Any, Any, dict[str, Any]]:
    """Return the classes of a kind's configuration and model, and the fields that it has of its own.

    Raises:
        ConfigError: there is no such kind.
    """
    import transformers

    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    half = hidden // heads // 2
    latent = {"q_lora_rank": half, "kv_lora_rank": half, "qk_rope_head_dim": half, "qk_nope_head_dim": half}
    groups = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    deepseek = {**experts, **groups, **latent, "v_head_dim": 2 * half, "num_key_value_heads": heads, "head_dim": half}
    families: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            transformers.Qwen3MoeForCausalLM,
            {**experts, "num_experts": num_experts, "norm_topk_prob": True},
        ),
        "qwen2_moe": (
            transformers.Qwen2MoeConfig,
            transformers.Qwen2MoeForCausalLM,
            {**experts, "num_experts": num_experts, "shared_expert_intermediate_size": 3 * hidden},
        ),
        "mixtral": (
            transformers.MixtralConfig,
            transformers.MixtralForCausalLM,
            {"num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, deepseek),
        "minicpm3": (
            transformers.MiniCPM3Config,
            transformers.MiniCPM3ForCausalLM,
            {**latent, "v_head_dim": 2 * half, "num_key_value_heads": heads},
        ),
    }
    if kind not in families:
        raise ConfigError(f"there is no tiny model of kind {kind!r}.{did_you_mean(kind, families)}")
    return families[kind]


def in_float64(model: Any) -> Any:
    """Return the model in float64, norms included: transformers' own round to float32, which hides small differences."""
    import torch

    for name, norm in [(n, m) for n, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")]:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, torch.nn.RMSNorm(len(norm.weight), eps=norm.variance_epsilon))
    return model.double()


def write_brief_model(folder: Path, *, max_positions: int = 2048) -> None:
    """Write a tokenizer and a model of which every sixth token or so ends the turn, so that conversations have several."""
    import torch

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_model(tokenizer, hidden=16, layers=1, max_positions=max_positions)
    with torch.no_grad():
        weight: Any = model.get_input_embeddings().weight
        weight[:, 0] += 1.0
        weight[tokenizer.eos_token_id, 0] += 1.1
    model.save_pretrained(folder)
