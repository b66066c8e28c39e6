"""A byte-level BPE tokenizer with ChatML turns and hermes tools, trained on texts when a run starts.

It is for models without a tokenizer: in the quick start, in tests, and in experiments from scratch. As in published models,
the turn tokens are special, and the tool and reasoning tags are added tokens that are not special. The same texts always
give the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TURN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens: padding, the start and the end of a turn."""
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special: `decode(skip_special_tokens=True)` keeps them."""

CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages else none -%}
{%- set has_system = first and first.role == 'system' -%}
{%- if has_system or tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if has_system -%}{{- first.content -}}{%- endif -%}
    {%- if tools -%}
        {%- if has_system -%}{{- '\\n\\n' -}}{%- endif -%}
        {{- 'Tools:\\n' -}}
        {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
        {{- 'Call a tool with <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
            {{- '\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML with hermes tools. Appending messages does not change the render of earlier messages."""

_SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; digits are never merged.

    Args:
        texts: Texts to learn merges from. If they repeat little, the vocabulary becomes smaller than `vocab_size`.
        vocab_size: Size of the vocabulary, including added tokens; at least 265 for the bytes and the added tokens.
        chat_template: The Jinja template of the tokenizer; None uses `CHAT_TEMPLATE`.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes and the added tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    num_added = len(TURN_TOKENS) + len(TAG_TOKENS)
    if vocab_size < 256 + num_added:
        raise ConfigError(f"a tokenizer needs a vocabulary of at least {256 + num_added}, not {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(list(texts), trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in TURN_TOKENS])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE if chat_template is None else chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
