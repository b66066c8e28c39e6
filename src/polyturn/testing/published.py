"""Tiny versions of published models: the architecture, the tokenizer's first merges, the chat template, random weights.

    folder = tiny("Qwen/Qwen3-0.6B")          a folder like the published model's, with half a million parameters
    polyturn train config.yaml model.path=$(python -c "import polyturn.testing as t; print(t.tiny('Qwen/Qwen3-0.6B'))")

A run reads the same files as for the real model, so scripts, templates and configs can be tried without a download. The
README of `qwen/` lists the included files and their licence.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
_QWEN3 = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {**_QWEN2, **_sizes(896, 4864, 24, 14, 2, 151936, True)},
    "Qwen/Qwen2.5-1.5B-Instruct": {**_QWEN2, **_sizes(1536, 8960, 28, 12, 2, 151936, True)},
    "Qwen/Qwen2.5-3B-Instruct": {**_QWEN2, **_sizes(2048, 11008, 36, 16, 2, 151936, True)},
    "Qwen/Qwen2.5-7B-Instruct": {**_QWEN2, **_sizes(3584, 18944, 28, 28, 4, 152064, False)},
    "Qwen/Qwen3-0.6B": {**_QWEN3, **_sizes(1024, 3072, 28, 16, 8, 151936, True)},
    "Qwen/Qwen3-1.7B": {**_QWEN3, **_sizes(2048, 6144, 28, 16, 8, 151936, True)},
    "Qwen/Qwen3-4B": {**_QWEN3, **_sizes(2560, 9728, 36, 32, 8, 151936, True)},
    "Qwen/Qwen3-8B": {**_QWEN3, **_sizes(4096, 12288, 36, 32, 8, 151936, False)},
}
"""Name on the hub -> the fields of the published config.json that define the model's computation."""

TURN_TOKENS = 24
"""Approximate number of tokens that the random model samples per turn."""

_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_TAGS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
    "<|file_sep|>",
)
_TAGS_OF_QWEN3 = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tiny(name: str = "", folder: Path | str | None = None, *, turn_tokens: int = TURN_TOKENS, seed: int = 0) -> Path:
    """Write a tiny version of a published model, with random weights, and return its folder.

    Args:
        name: The model's name on the hub, one of `PUBLISHED`.
        folder: The folder to write to; None uses the cache of the Hugging Face libraries, where it is created once.
        turn_tokens: Approximate number of sampled tokens per turn. A random model would hardly ever sample the
            token that ends a turn.
        seed: Seed of the weights.

    Raises:
        ConfigError: the name is empty or unknown.
    """
    from polyturn.training.hf import save_model

    fields = _published(name)
    if folder is None:
        from huggingface_hub import cached_assets_path

        facts = json.dumps([fields, _SMALL, turn_tokens, seed, _read("merges.txt"), _read(_template(fields))])
        folder_name = f"{name.rpartition('/')[2]}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
        folder = cached_assets_path(library_name="polyturn", namespace="tiny", subfolder=folder_name) / "model"
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        tokenizer = published_tokenizer(name)
        save_model(_small_model(fields, tokenizer, turn_tokens=turn_tokens, seed=seed), folder, tokenizer=tokenizer)
        shutil.copy(str(_file("LICENSE")), folder / "LICENSE")
    return folder


def published_config(name: str, folder: Path | str) -> Path:
    """Write a published model's config and a trimmed tokenizer, without weights, to plan the memory of the full model."""
    folder = Path(folder)
    published_tokenizer(name).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(dict(_published(name)), indent=1))
    return folder


def published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a published model with the first 4,096 entries of its vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = _published(name)
    merges = [(left, right) for left, right in (line.split(" ") for line in _read("merges.txt").splitlines())]
    words = [*_byte_letters(), *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tags = (*_TAGS, *(_TAGS_OF_QWEN3 if fields["model_type"] == "qwen3" else ()))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=131072
    )
    tokenizer.chat_template = _read(_template(fields))
    return tokenizer


def _small_model(
    fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, *, turn_tokens: int, seed: int
) -> PreTrainedModel:
    from polyturn.training.hf import build_model

    few = {"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32"}
    # Padded like the published vocabularies: the embedding has rows beyond the tokenizer's last token.
    padded = -(-len(tokenizer) // 128) * 128
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = build_model({**fields, **_SMALL, **few, **ends, "vocab_size": padded}, seed=seed)
    _end_turns(model, int(tokenizer.eos_token_id), turn_tokens=turn_tokens)
    return model.eval()


def _end_turns(model: PreTrainedModel, eos: int, *, turn_tokens: int) -> None:
    """Adjust the end token's output row until the token is sampled about once in `turn_tokens` tokens."""
    import torch

    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    with torch.no_grad():
        inputs.weight[:, 0] += 1.0  # a direction with a component in every hidden state
        row = outputs.weight[eos].clone()
        ids = torch.arange(256, dtype=torch.long)[None]
        low, high = 0.0, 64.0
        for _ in range(24):
            middle = (low + high) / 2
            outputs.weight[eos] = row
            outputs.weight[eos, 0] += middle
            often = float(model(input_ids=ids).logits.softmax(-1)[..., eos].mean())
            low, high = (low, middle) if often > 1 / turn_tokens else (middle, high)


def _published(name: str) -> Mapping[str, Any]:
    if not name:
        raise ConfigError(f"polyturn.tiny needs the name of a model: polyturn.tiny({next(iter(PUBLISHED))!r})")
    if name not in PUBLISHED:
        raise ConfigError(f"polyturn.tiny does not support the model {name!r}.{did_you_mean(str(name), PUBLISHED)}")
    return PUBLISHED[name]


def _template(fields: Mapping[str, Any]) -> str:
    return "qwen3.jinja" if fields["model_type"] == "qwen3" else "qwen2_5.jinja"


def _file(name: str) -> Any:
    return importlib.resources.files("polyturn.testing") / "qwen" / name


def _read(name: str) -> str:
    return str(_file(name).read_text(encoding="utf-8"))


def _byte_letters() -> list[str]:
    """Return the letter of each byte in id order: printable bytes unchanged, the others as letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*map(chr, printable), *(chr(0x100 + n) for n in range(256 - len(printable)))]
