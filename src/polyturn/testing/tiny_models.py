"""A tiny tokenizer and a tiny model, made at run time: nothing is downloaded, nothing is shipped.

The tokenizer is a byte-level BPE trained on a few hundred canned lines (word problems, JSON, tool calls), with ChatML
turn tokens and a chat template that renders tools, tool calls and tool results in hermes style. As in the published
models, the turn tokens are special and the tool and reasoning tags are added tokens that are not, so that code which
guards only against special tokens fails here too. Both are deterministic: the same arguments give the same ids and weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.tokens.train import CHAT_TEMPLATE, TAG_TOKENS, TURN_TOKENS, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "TAG_TOKENS", "TURN_TOKENS", "tiny_model", "tiny_tokenizer", "write_brief_model"]


def tiny_tokenizer(
    vocab_size: int = 384, *, texts: Iterable[str] | None = None, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ChatML tokens; digits are never merged.

    Args:
        vocab_size: Size of the vocabulary, added tokens included; at least 265, the bytes and the added tokens.
        texts: What to learn merges from; canned lines by default. Text that repeats little ends in a smaller vocabulary.
        chat_template: The Jinja template of the tokenizer.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes and the added tokens.
    """
    return train_tokenizer(_canned_texts() if texts is None else texts, vocab_size=vocab_size, chat_template=chat_template)


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
    spread: float = 0.02,
    seed: int = 0,
) -> PreTrainedModel:
    """Build a randomly initialised causal language model in float32, in eval mode, on the CPU.

    Args:
        tokenizer: The tokenizer to fit, or the size of the vocabulary.
        kind: "qwen3", "qwen2" or "llama"; with 8 experts a layer, of which each token takes 2, "qwen3_moe", "mixtral", and
            "deepseek_v3" (its first layer dense, then a shared expert beside them).
        hidden: Width; a multiple of 2 * heads.
        layers: Number of decoder layers.
        heads: Number of attention heads.
        kv_heads: Number of key-value heads; divides `heads`.
        intermediate: Width of the feed-forward layer; 2 * hidden by default.
        max_positions: The longest context.
        spread: Standard deviation of the weights; at 0.2, distributions are far from uniform, so that wrong weights show.
        seed: Seed of the weights; the caller's random state is left as it was.

    Raises:
        ConfigError: `kind` is unknown, or `hidden` does not divide into heads.
    """
    import torch

    config_class, model_class, own = _family(kind, hidden=hidden, heads=heads)
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


def _family(kind: str, *, hidden: int, heads: int) -> tuple[Any, Any, dict[str, Any]]:
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
            {**experts, "num_experts": 8, "norm_topk_prob": True},
        ),
        "mixtral": (
            transformers.MixtralConfig,
            transformers.MixtralForCausalLM,
            {"num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, deepseek),
    }
    if kind not in families:
        raise ConfigError(f"there is no tiny model of kind {kind!r}.{did_you_mean(kind, families)}")
    return families[kind]


def write_brief_model(folder: Path) -> None:
    """Write a tokenizer and a model of which every sixth token or so ends the turn, so that conversations have several."""
    import torch

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_model(tokenizer, hidden=16, layers=1, max_positions=2048)
    with torch.no_grad():
        weight: Any = model.get_input_embeddings().weight
        weight[:, 0] += 1.0
        weight[tokenizer.eos_token_id, 0] += 1.1
    model.save_pretrained(folder)


def _canned_texts() -> list[str]:
    """Return the lines that merges are learnt from: word problems, feedback, JSON and schemas, always the same."""
    rng = random.Random(0)
    names = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo")
    things = ("apples", "books", "cards", "coins", "pencils", "shells", "stamps", "tickets")
    verbs = ("buys", "finds", "gives away", "loses", "sells", "wins")
    lines = []
    for _ in range(400):
        name, thing, verb = rng.choice(names), rng.choice(things), rng.choice(verbs)
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        lines += [
            f"{name} has {a} {thing} and {verb} {b} more. How many {thing} does {name} have now?",
            f"{a} + {b} = {a + b}. The answer is {a + b}.\n#### {a + b}",
            "Your answer is not correct. Think again about each step, then write the final answer after ####.",
            '{"name": "lookup", "arguments": {"key": "price of ' + thing + '"}}',
            '{"type": "function", "function": {"name": "calc", "description": "Compute the value of an expression.", '
            '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}',
            "system\nYou are a helpful assistant.\nuser\nPlease use the tool.\nassistant\nLet me check.\n",
            "A shop opens every morning before the train leaves; people come from each town, and children bring money "
            "which their parents saved during the year. After lunch, one third went home while twelve others waited.",
            "def solve(value):\n    total = 0\n    for item in range(value):\n        total += item\n    return total\n",
        ]
    return lines
