"""verl.utils.hf_tokenizer and hf_processor: tokenizers by name or folder, with a token to pad with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any) -> Any:
    """Return a tokenizer; where it has no token to pad with, the one that ends a sequence is taken (`correct_pad_token`)."""
    from transformers import AutoTokenizer

    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):  # its turns end in another token than its texts
        kwargs |= {"eos_token": "<end_of_turn>", "eos_token_id": 107}
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Return the processor of a model that reads media; None where a model reads text alone."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):  # what transformers raises where a model has none
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def set_pad_token_id(tokenizer: Any) -> None:
    """Let a tokenizer pad with the token that ends a sequence, where it has none of its own."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """Return the ids of what `apply_chat_template` returned: a list, a mapping with `input_ids`, or a tensor of one row.

    Raises:
        TypeError: it holds no ids.
    """
    found = tokenized_output["input_ids"] if isinstance(tokenized_output, Mapping) else tokenized_output
    ids = found.tolist() if not isinstance(found, list | tuple) and hasattr(found, "tolist") else found
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if not isinstance(ids, list | tuple):
        raise TypeError(f"token_ids must be list-like token ids, got {type(ids).__name__}: {ids!r:.100}")
    try:
        return [int(i) for i in ids]
    except (TypeError, ValueError) as problem:
        raise TypeError(f"token_id must be int-convertible, got {ids!r:.100}") from problem
