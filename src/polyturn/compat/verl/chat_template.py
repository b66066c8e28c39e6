"""verl.utils.chat_template (verl.utils.tokenizer.chat_template since 0.9): parts of a chat template, for agent loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.compat.verl.tokenizer import normalize_token_ids

__all__ = [
    "apply_chat_template", "extract_system_prompt_and_generation", "initialize_system_prompt", "initialize_turn_separator",
]  # fmt: skip


def initialize_system_prompt(tokenizer: Any, **apply_chat_template_kwargs: Any) -> list[int]:
    """Return the tokens of a template before the first message."""
    one, two = (_users(tokenizer, [""] * n, **apply_chat_template_kwargs) for n in (1, 2))
    return one[: len(one) - (len(two) - len(one))]


def extract_system_prompt_and_generation(tokenizer: Any, **apply_chat_template_kwargs: Any) -> tuple[list[int], list[int]]:
    """Return the tokens before the first message, and those that start the assistant's turn."""
    closed = _users(tokenizer, [""], **apply_chat_template_kwargs)
    opened = _users(tokenizer, [""], add_generation_prompt=True, **apply_chat_template_kwargs)
    return initialize_system_prompt(tokenizer, **apply_chat_template_kwargs), opened[len(closed) :]


def initialize_turn_separator(tokenizer: Any, **apply_chat_template_kwargs: Any) -> list[int]:
    """Return the tokens between a turn's end token and the next turn."""
    empty, filled = (_users(tokenizer, [text], **apply_chat_template_kwargs) for text in ("", "x"))
    pairs = zip(reversed(empty), reversed(filled), strict=False)
    num_same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(empty), len(filled)))
    suffix = empty[len(empty) - num_same :]
    ends = getattr(tokenizer, "eos_token_id", None)
    if ends is None:
        ends = getattr(getattr(tokenizer, "tokenizer", None), "eos_token_id", None)
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    return suffix[max((i for i, token in enumerate(suffix) if token in ends), default=0) + 1 :]


def apply_chat_template(
    processor: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenize: bool = True,
    add_generation_prompt: bool = True,
    tools: Any = None,
    return_dict: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a conversation's ids or text.

    If the template refuses a conversation without a user message, an empty one is put first and its part is removed.
    """
    options = {"tokenize": tokenize, "tools": tools, "return_dict": return_dict, **kwargs}
    try:
        return processor.apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt, **options)
    except Exception:  # some templates refuse a conversation without a user, with various errors
        if any(message.get("role") == "user" for message in messages):
            raise
    user = [{"role": "user", "content": [{"type": "text", "text": ""}]}]
    whole = processor.apply_chat_template([*user, *messages], add_generation_prompt=add_generation_prompt, **options)
    prefix = processor.apply_chat_template(user, add_generation_prompt=False, **options)
    if not tokenize:
        return whole[len(prefix) :]
    if return_dict:
        num = prefix["input_ids"].shape[1]
        cut = ("input_ids", "attention_mask", "mm_token_type_ids")
        return {key: value[:, num:] if key in cut else value for key, value in dict(whole).items()}
    return normalize_token_ids(whole)[len(normalize_token_ids(prefix)) :]


def _users(tokenizer: Any, contents: Sequence[str], **kwargs: Any) -> list[int]:
    """Return the ids of user messages."""
    messages = [{"role": "user", "content": content} for content in contents]
    return normalize_token_ids(
        tokenizer.apply_chat_template(messages, tokenize=True, **{"add_generation_prompt": False, **kwargs})
    )
