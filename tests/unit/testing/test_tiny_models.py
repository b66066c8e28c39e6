"""The tiny tokenizer and model: deterministic, and shaped like the real ones."""

import pytest

from polyturn.core.errors import ConfigError
from polyturn.testing.tiny_models import TAG_TOKENS, TURN_TOKENS, tiny_tokenizer
from support.models import tiny_model
from support.refusals import refuses

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_tokenizer_is_always_the_same() -> None:
    assert tiny_tokenizer().get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("size", [265, 384, 600])
def test_vocabulary_has_the_given_size(size: int) -> None:
    tokenizer = tiny_tokenizer(size)
    assert len(tokenizer) == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))


def test_any_text_survives_encoding() -> None:
    tokenizer = tiny_tokenizer()
    text = "  17 + 25 = 42\n\n\t日本語 é e\u0301 🙂 ... ####"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_turn_tokens_are_special_and_tags_are_not() -> None:
    tokenizer = tiny_tokenizer()
    for token in (*TURN_TOKENS, *TAG_TOKENS):
        assert len(tokenizer.encode(token)) == 1
    text = "<|im_start|><tool_call>x</tool_call><|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "<tool_call>x</tool_call>"


def test_template_renders_tools_calls_and_results() -> None:
    text = tiny_tokenizer().apply_chat_template(
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "3"},
        ],
        tools=TOOLS,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.endswith(
        "<|im_start|>user\n1+1?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert '"name": "add"' in text.split("<|im_end|>")[0]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_model_of_each_kind_scores_tokens(kind: str) -> None:
    import torch

    tokenizer = tiny_tokenizer()
    model, again = tiny_model(tokenizer, kind, seed=3), tiny_model(tokenizer, kind, seed=3)
    ids = torch.tensor([tokenizer.encode("2 + 2 = 4")])
    with torch.no_grad():
        logits = model(ids).logits
        assert logits.shape == (1, ids.shape[1], len(tokenizer))
        assert torch.equal(logits, again(ids).logits)


def test_unknown_kind_and_small_vocabulary_are_refused() -> None:
    refuses(lambda: tiny_model(384, "qwen"), ConfigError, "'qwen3'")
    refuses(lambda: tiny_tokenizer(100), ConfigError, "at least 265, not 100")
