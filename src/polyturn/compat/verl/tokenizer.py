"""verl.utils.hf_tokenizer and hf_processor: load tokenizers with a pad token, and processors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a tokenizer; if it has no pad token, the end-of-sequence token is used (`correct_pad_token`).

    Code from a model's repository is never run: `trust_remote_code` only logs a warning.
    """
    from transformers import AutoTokenizer

    _warn_of_code(name_or_path, trust_remote_code)
    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):  # its turns end with another token than its texts
        kwargs |= {"eos_token": "<end_of_turn>", "eos_token_id": 107}
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def hf_processor(name_or_path: str, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """Return the processor of a multimodal model, or None for a text model."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    _warn_of_code(name_or_path, trust_remote_code)
    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=False, **kwargs)
    except (OSError, ValueError):  # raised by transformers if a model has no processor
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _warn_of_code(name_or_path: str, trust_remote_code: bool) -> None:
    if trust_remote_code:
        warnings.warn(
            f"{name_or_path}: trust_remote_code has no effect; code from a model's repository is never run", stacklevel=3
        )


def set_pad_token_id(tokenizer: Any) -> None:
    """Set the pad token to the end-of-sequence token if the tokenizer has none."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """Return the ids in a result of `apply_chat_template`: a list, a mapping with `input_ids`, or a tensor of one row.

    Raises:
        TypeError: the result has no ids.
    """
    token_ids = tokenized_output["input_ids"] if isinstance(tokenized_output, Mapping) else tokenized_output
    ids = token_ids.tolist() if not isinstance(token_ids, list | tuple) and hasattr(token_ids, "tolist") else token_ids
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if not isinstance(ids, list | tuple):
        raise TypeError(f"token_ids must be list-like token ids, got {type(ids).__name__}: {ids!r:.100}")
    try:
        return [int(i) for i in ids]
    except (TypeError, ValueError) as problem:
        raise TypeError(f"token_id must be int-convertible, got {ids!r:.100}") from problem
