"""A tiny tokenizer that is trained at run time, without downloads or data files.

It is a byte-level BPE trained on a few hundred fixed lines (word problems, JSON, tool calls), with ChatML turn tokens and a
chat template that renders tools, tool calls and tool results in hermes style. As in published models, the turn tokens are
special, but the tool and reasoning tags are added tokens that are not special, so code that handles only special tokens
fails here as well. The same arguments always give the same ids.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from polyturn.tokens.train import CHAT_TEMPLATE, TAG_TOKENS, TURN_TOKENS, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "TAG_TOKENS", "TURN_TOKENS", "tiny_tokenizer"]


def tiny_tokenizer(
    vocab_size: int = 384, *, texts: Iterable[str] | None = None, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ChatML tokens; digits are never merged.

    Args:
        vocab_size: Size of the vocabulary, including added tokens; at least 265, for the bytes and the added tokens.
        texts: Texts to learn merges from; fixed lines by default. Texts with few repetitions give a smaller vocabulary.
        chat_template: The Jinja template of the tokenizer.

    Raises:
        ConfigError: `vocab_size` is too small for the bytes and the added tokens.
    """
    if texts is not None:
        return train_tokenizer(texts, vocab_size=vocab_size, chat_template=chat_template)
    tokenizer = copy.deepcopy(_trained(vocab_size))
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def _trained(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer trained on the fixed lines, once per process."""
    return train_tokenizer(_canned_texts(), vocab_size=vocab_size)


def _canned_texts() -> list[str]:
    """Return the fixed lines for learning merges: word problems, feedback, JSON and schemas."""
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
